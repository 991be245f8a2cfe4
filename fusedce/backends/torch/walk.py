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
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients
from fusedce.backends.plan import Way
from fusedce.backends.torch.logit_tiles import Logits, label_entry, tiles
from fusedce.backends.torch.rows import Rows
from fusedce.contract.problem import Problem


class Gradient(Protocol):
    """The gradient by the logits of some tokens, whose statistics are known."""

    rows: Rows  # the tokens' positions

    @property
    def y(self) -> Tensor:
        """``(K, C)`` classes whose entries stand out, as rows of the weight."""

    def gradient(self, z: Tensor, begin: int) -> Tensor:
        """The derivative by the products of hidden states and weight, in the tile's place."""


class Objective(Gradient, Protocol):
    """What is made of the logits of some tokens. Tiles ``(v, C)`` of finished logits."""

    needs_gradient: bool  # for its losses

    def see(self, z: Tensor, begin: int) -> None:
        """Take in a tile, which stays as it is."""

    def merge(self, z: Tensor) -> None:
        """Every tile of ``z (V, C)`` was seen."""


class Sums:
    """Gradients of hidden, weight and bias, to which tiles of the logits' gradient are added."""

    def __init__(self, problem: Problem, logits: Logits, grads: Gradients, classes: int) -> None:
        self.problem, self.logits, self.grads, self.classes = problem, logits, grads, classes
        self._wide: Tensor | None = None  # rows of a narrow gradient, until they are complete
        # Rows of such a gradient that are not rounded before their labels' entries are added:
        # classes, the logits' gradient, and of the entries rows here, columns and what is lost.
        self._apart: list[tuple[Tensor, ...]] = []

    def add(
        self,
        of: Gradient,
        g: Tensor,  # (v, C)
        h: Tensor,  # (C, H), the operand of the logits
        begin: int,
        d_hidden: Tensor | None = None,  # (C, H), if it is not that of all tokens
        *,
        first: bool,
        last: bool,
    ) -> None:
        """Add a tile; ``first`` and ``last`` of these classes."""
        grads, products = self.grads, self.logits.products
        end, gemm = begin + len(g), products.gradients
        if grads.bias is not None:
            grads.bias[begin:end] += g.sum(1)
        tile, h = g.to(gemm), h.to(gemm)
        entries = None if gemm == products.acc else rounded_entries(of, g, tile, begin)
        if grads.hidden is not None:
            rows, total = of.rows, d_hidden
            if total is None:
                total = grads.hidden[rows] if isinstance(rows, slice) else zeros_like_rows(grads, h)
            products(tile.t(), self.logits.rows(begin, end, gemm), total, add=True)
            if entries is not None:
                classes, columns, lost = entries
                total.index_add_(0, columns, self.problem.weight[begin + classes] * lost)
            if d_hidden is None and not isinstance(rows, slice):
                grads.hidden.index_add_(0, rows, total)
        if grads.weight is None:
            return
        rows = grads.weight[begin:end]
        if first and last and rows.dtype == gemm != products.acc:  # the product rounds the sum
            torch.mm(tile, h, out=rows)
            if entries is not None and len(entries[0]):
                classes, columns, lost = entries
                chosen, at = classes.unique(return_inverse=True)
                known = sum(len(x) for x, *_ in self._apart)
                self._apart.append((begin + chosen, tile[chosen], known + at, columns, lost))
            return
        wide = rows if rows.dtype == products.acc else self._rows_in_acc(len(g))
        products(tile, h, wide, add=not first)
        if entries is not None:
            classes, columns, lost = entries
            wide.index_add_(0, classes, h[columns] * lost)
        if wide is not rows and last:
            rows.copy_(wide)  # rounded once

    def finish(self, h: Tensor) -> None:
        """Complete the rows of labels; ``h (C, H)`` is the only chunk's, where there are some."""
        if self._apart and self.grads.weight is not None:
            products = self.logits.products
            classes, g, at, columns, lost = (torch.cat(x) for x in zip(*self._apart, strict=True))
            h = h.to(products.gradients)
            rows = h.new_empty(len(classes), h.shape[1], dtype=products.acc)
            products(g, h, rows).index_add_(0, at, h[columns] * lost)
            self.grads.weight[classes] = rows.to(self.grads.weight.dtype)
            self._apart.clear()

    def _rows_in_acc(self, v: int) -> Tensor:
        if self._wide is None:
            shape, acc = (self.classes, self.problem.weight.shape[1]), self.logits.products.acc
            self._wide = self.problem.weight.new_empty(shape, dtype=acc)
        return self._wide[:v]


def rounded_entries(
    of: Gradient, g: Tensor, tile: Tensor, begin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries of chosen classes in a tile: ``(E,)`` rows, ``(E,)`` columns, ``(E, 1)`` lost.

    What rounding took from them is given back. An entry near -1 has no neighbours of its size to
    average its rounding with; without this the error of a gradient is 1.4 times as large.
    """
    at, inside = label_entry(of.y, begin, len(g))
    which, column = torch.nonzero(inside.view(at.shape)).unbind(1)
    entry = (at[which, column] * g.shape[1] + column).unique()
    classes, columns = entry // g.shape[1], entry % g.shape[1]
    return classes, columns, (g[classes, columns] - tile[classes, columns])[:, None]


def by_chunks(
    problem: Problem,
    logits: Logits,
    chunks: Sequence[Rows],
    way: Way,
    grads: Gradients,
    objective: Callable[[Any, Tensor], Any],  # an `Objective` of a chunk, from its hidden states
    written: Callable[[Any], None],  # called with it after each chunk
    dtype: torch.dtype,  # of what is held
) -> None:
    """Statistics and gradients of one chunk after another, whose logits are held."""
    V, step = len(problem.weight), logits.step(way)
    train = any(x is not None for x in (grads.hidden, grads.weight, grads.bias))
    kept = logits.head.weight.new_empty(V * way.tokens if chunks else 0, dtype=dtype)
    narrow = dtype != logits.head.acc
    sums = Sums(problem, logits, grads, step)
    for number, rows in enumerate(chunks):
        h = logits.operand(problem.hidden[rows])
        of, z = objective(rows, h), kept[: V * len(h)].view(V, len(h))
        for begin, end in tiles(V, step):
            tile = logits.tile(h, begin, end, out=None if narrow else z[begin:end])
            of.see(tile, begin)
            if narrow:
                z[begin:end] = tile
        of.merge(z)
        apart = grads.hidden is not None and not isinstance(rows, slice)
        d_hidden = zeros_like_rows(grads, h) if apart else None
        for begin, end in tiles(V if train or of.needs_gradient else 0, step):
            tile, last = z[begin:end], number == len(chunks) - 1
            g = of.gradient(logits.scratch(tile).copy_(tile) if narrow else tile, begin)
            if train:
                sums.add(of, g, h, begin, d_hidden, first=number == 0, last=last)
        sums.finish(h)
        if grads.hidden is not None and d_hidden is not None:
            grads.hidden[rows] = d_hidden
        written(of)


def by_tiles(
    problem: Problem, logits: Logits, blocks: Sequence[Gradient], way: Way, grads: Gradients
) -> None:
    """Gradients of blocks of tokens whose statistics are known, from logits computed again."""
    sums = Sums(problem, logits, grads, way.classes)
    for begin, end in tiles(len(problem.weight) if blocks else 0, way.classes):
        for number, of in enumerate(blocks):
            h = logits.operand(problem.hidden[of.rows])
            g = of.gradient(logits.tile(h, begin, end), begin)
            sums.add(of, g, h, begin, first=number == 0, last=number == len(blocks) - 1)
            sums.finish(h)


def zeros_like_rows(grads: Gradients, h: Tensor) -> Tensor:
    """``(C, H)`` zeros in the dtype of the gradient of all hidden states."""
    assert grads.hidden is not None
    return torch.zeros(h.shape, dtype=grads.hidden.dtype, device=h.device)
