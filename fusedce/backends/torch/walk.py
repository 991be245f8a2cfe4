"""The one walk of the torch backend: over chunks of tokens, and tiles of the vocabulary.

A tile of logits is stored vocabulary-major, ``(v, C)``: both products that follow then read it
along its fast dimension. An :class:`Objective` sees every tile twice. The first time it gathers
statistics; between the two times, ranks that hold other rows of the vocabulary merge theirs; the
second time it turns the tile into the gradient by its logits, of which :class:`Sums` makes the
three gradients. Logits of a chunk wait in memory in between (:func:`by_chunks`, three products of
the head's size), or are computed again (:func:`by_tiles`, four products and less memory).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients
from fusedce.backends.plan import Way
from fusedce.backends.torch.logit_tiles import Logits, tiles
from fusedce.backends.torch.outliers import Outliers
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import Rows
from fusedce.contract.problem import Problem


class Objective(Protocol):
    """What is made of the logits of some tokens. Tiles ``(v, C)`` of finished logits."""

    rows: Rows  # the tokens' positions
    y: Tensor  # (K, C) classes whose entries stand out, as rows of the weight
    needs_gradient: bool  # for its losses

    def see(self, z: Tensor, begin: int) -> None:
        """Take in a tile, which stays as it is."""

    def merge(self, z: Tensor) -> None:
        """Every tile of ``z (V, C)`` was seen."""

    def gradient(self, z: Tensor, begin: int) -> Tensor:
        """The derivative by the products of hidden states and weight, in the tile's place."""

    def large(self) -> Tensor:
        """``(C,)``: the size of entries of the gradient that must not be rounded."""


class Sums:
    """Gradients of hidden, weight and bias, to which tiles of the logits' gradient are added."""

    def __init__(self, problem: Problem, logits: Logits, grads: Gradients, classes: int) -> None:
        self.problem, self.logits, self.grads = problem, logits, grads
        weight, acc = grads.weight, logits.products.acc
        self._wide = None  # rows of a narrow gradient of the weight, until they are complete
        if weight is not None and weight.dtype != acc:
            self._wide = torch.empty(classes, weight.shape[1], dtype=acc, device=weight.device)
        narrow = logits.products.gradients != acc
        self._outliers = Outliers(problem, grads) if narrow else None

    def add(self, of: Objective, g: Tensor, begin: int, *, first: bool, last: bool) -> None:
        """Add a tile ``g (v, C)``; ``first`` and ``last`` of these classes."""
        grads, products = self.grads, self.logits.products
        end, gemm = begin + len(g), products.gradients
        if grads.bias is not None:
            grads.bias[begin:end] += g.sum(1)
        tile = g.to(gemm)
        found = None if self._outliers is None else self._outliers.take(of, g, tile, begin)
        if grads.hidden is not None:
            w = self.logits.rows(begin, end, gemm)
            add_to_rows(products, grads.hidden, of.rows, tile, w)
        d_weight = None
        if grads.weight is not None:
            d_weight = grads.weight[begin:end] if self._wide is None else self._wide[: len(g)]
            products(tile, self.problem.hidden[of.rows].to(gemm), d_weight, add=not first)
        if self._outliers is not None and found is not None:
            self._outliers.give_back(of, found, d_weight, begin)
        if self._wide is not None and grads.weight is not None and last:
            grads.weight[begin:end] = self._wide[: len(g)]  # rounded once


def by_chunks(
    problem: Problem,
    logits: Logits,
    chunks: Sequence[Rows],
    way: Way,
    grads: Gradients,
    objective: Callable[[Rows, Tensor], Objective],  # of a chunk, from its hidden states
    written: Callable[[Objective], None],  # called after each chunk
) -> None:
    """Statistics and gradients of one chunk after another, whose logits are held."""
    V = len(problem.weight)
    train = any(x is not None for x in (grads.hidden, grads.weight, grads.bias))
    kept = logits.head.weight.new_empty(V * way.tokens if chunks else 0, dtype=logits.head.acc)
    sums = Sums(problem, logits, grads, way.classes)
    for number, rows in enumerate(chunks):
        h = logits.operand(problem.hidden[rows])
        of, z = objective(rows, h), kept[: V * len(h)].view(V, len(h))
        for begin, end in tiles(V, way.classes):
            of.see(logits.tile(h, begin, end, out=z[begin:end]), begin)
        of.merge(z)
        for begin, end in tiles(V if train or of.needs_gradient else 0, way.classes):
            g = of.gradient(z[begin:end], begin)
            if train:
                sums.add(of, g, begin, first=number == 0, last=number == len(chunks) - 1)
        written(of)


def by_tiles(
    problem: Problem, logits: Logits, blocks: Sequence[Objective], way: Way, grads: Gradients
) -> None:
    """Gradients of blocks of tokens whose statistics are known, from logits computed again."""
    sums = Sums(problem, logits, grads, way.classes)
    for begin, end in tiles(len(problem.weight) if blocks else 0, way.classes):
        for number, of in enumerate(blocks):
            z = logits.tile(logits.operand(problem.hidden[of.rows]), begin, end)
            g = of.gradient(z, begin)
            sums.add(of, g, begin, first=number == 0, last=number == len(blocks) - 1)


def add_to_rows(products: Products, total: Tensor, rows: Rows, tile: Tensor, w: Tensor) -> None:
    """``total[rows] += tile.T @ w``."""
    if isinstance(rows, slice):
        products(tile.t(), w, total[rows], add=True)
        return
    added = torch.empty(len(rows), w.shape[1], dtype=total.dtype, device=total.device)
    total.index_add_(0, rows, products(tile.t(), w, added))
