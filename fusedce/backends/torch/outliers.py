"""What rounding a tile of gradients to bfloat16 would take, given back in float32.

The labels' entries and others that are large beside their token's whole gradient leave the tile:
alone in their size, they have no neighbours to average their rounding with. The errors of the rest
reach d_hidden with the rows of the head, whose common part they would add up: it is taken away.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients
from fusedce.backends.mean_logit import sampled_mean_row
from fusedce.backends.torch.logit_tiles import label_entry
from fusedce.contract.problem import Problem

P = 0.125  # of a token's probability; entries of that size are not rounded
_COLUMNS = 64  # tokens whose entries are looked through at a time
_ENTRIES = 64  # and entries that are added at a time


class Found(NamedTuple):
    """Entries that left a tile, and what rounding took from the others of each token."""

    classes: Tensor  # (K,) rows of the tile
    columns: Tensor  # (K,) tokens of the block
    entries: Tensor  # (K,) in acc
    left: Tensor  # (C,) in acc


class Outliers:
    """Takes entries out of rounded tiles, and adds them to the gradients."""

    def __init__(self, problem: Problem, grads: Gradients) -> None:
        self.problem, self.grads = problem, grads
        self.mean_row = sampled_mean_row(problem.weight)

    def take(self, of: Any, g: Tensor, tile: Tensor, begin: int) -> Found:
        """Set the labels' entries and large ones of ``tile``, ``g (v, C)`` rounded, to 0."""
        least = of.large()
        at, inside = label_entry(of.y, begin, len(g))
        # (A norm of the columns costs 13 ns an element on a CPU, these two 0.1 each.)
        holds = inside.any(0) | (torch.maximum(g.amax(0), g.amin(0).neg_()) >= least)
        found = [(at.new_empty(0), at.new_empty(0))]
        for tokens in holds.nonzero()[:, 0].split(_COLUMNS):
            some = g.index_select(1, tokens)
            chosen = some.abs() >= least[tokens]
            labels = torch.zeros_like(chosen, dtype=torch.int16)
            chosen |= labels.scatter_add_(0, at[:, tokens], inside[:, tokens].short()) > 0
            classes, column = chosen.nonzero().unbind(1)
            found.append((classes, tokens[column]))
        classes, columns = (torch.cat(x) for x in zip(*found, strict=True))
        entries = g[classes, columns]
        tile[classes, columns] = 0
        left = g.sum(0).sub_(tile.sum(0, dtype=g.dtype)).index_add_(0, columns, entries, alpha=-1)
        return Found(classes, columns, entries, left)

    def give_back(self, of: Any, found: Found, d_weight: Tensor | None, begin: int) -> None:
        """Add the entries, and the others' rounding as if of the head's mean row."""
        rows, d_hidden, problem = of.rows, self.grads.hidden, self.problem
        positions = rows
        if isinstance(rows, slice):
            positions = torch.arange(rows.start, rows.stop, device=found.left.device)
        for first in range(0, len(found.entries), _ENTRIES):
            part = slice(first, first + _ENTRIES)
            classes, tokens, entries = found.classes[part], found.columns[part], found.entries[part]
            if d_weight is not None:
                h = problem.hidden[positions[tokens]]
                d_weight.index_add_(0, classes, h * entries[:, None])
            if d_hidden is not None:
                w = problem.weight[begin + classes].to(entries.dtype)
                d_hidden.index_add_(0, positions[tokens], w.mul_(entries[:, None]))
        if d_hidden is not None:
            d_hidden.index_add_(0, positions, found.left[:, None] * self.mean_row)
