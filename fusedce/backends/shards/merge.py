"""The one merge: of tiles, of the label and the rest, and of ranks that hold other classes.

Ranks merge between the two looks of the walk: masses as those of tiles, label logits by their
maximum (one rank alone has them), sums by addition.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.backends.shards.collectives import RunningSums, all_gather, all_reduce
from fusedce.contract.task import Shard


class Mass(NamedTuple):
    """``exp(top) * (1 + rest)``: some logits of each token, (C,) float64."""

    top: Tensor
    rest: Tensor  # the others' exponentials relative to the largest; -1 for no logit at all
    moment: Tensor  # sum of exp(z - top) * (top - z)
    best: Tensor  # int64: the class of the largest

    def lse(self) -> Tensor:
        """Their log-sum-exp."""
        return self.top + self.rest.log1p()

    def entropy(self) -> Tensor:
        """That of their softmax."""
        return self.rest.log1p() + self.moment / (1 + self.rest)


def merged(a: Mass, b: Mass) -> Mass:
    """Two disjoint sets of logits as one."""
    gap = a.top - b.top
    q = gap.abs().neg_().exp_()  # the lower one's factor
    drop = torch.where(q == 0, 0.0, gap.abs() * q)
    second = gap < 0
    (rest, less), (moment, lower) = (
        (torch.where(second, y, x), torch.where(second, x, y))
        for x, y in ((a.rest, b.rest), (a.moment, b.moment))
    )
    return Mass(
        torch.maximum(a.top, b.top),
        rest + (1 + less) * q,
        moment + lower * q + (1 + less) * drop,
        torch.where(second, b.best, a.best),
    )


class Merge:
    """Of the tokens of one chunk."""

    def __init__(self, shard: Shard, running: RunningSums, before: int) -> None:
        self.shard, self._running, self._before = shard, running, before

    def seen(self, *of: Any) -> None:
        """Merge the statistics of a `Seen` each.

        Collectives: one all-gather of 3 float64 a token each, or 4 to 6.
        """
        rows = [row for seen in of for row in _rows(seen, self.shard.first)]
        table = all_gather(torch.stack(rows), self.shard.group).view(-1, len(rows), len(of[0].y))
        for seen in of:
            mine, table = table[:, : (n := len(_rows(seen, 0)))], table[:, n:]
            _take(seen, mine)
        self._running.start(self._before)  # after small messages, which must not wait for it

    def largest(self, x: Tensor, row: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest ``x (C,)`` of a rank, its ``row``, and all else summed, ``others`` too.

        The row is counted from the first one here. Collectives: one all-gather of 3 float64 a
        token.
        """
        mine = torch.stack([x, (row + self.shard.first).double(), others])
        values, rows, rest = all_gather(mine, self.shard.group).view(-1, 3, len(x)).unbind(1)
        top, rank = values.max(0, keepdim=True)
        rest = rest + values.scatter(0, rank, 0).masked_fill(values == -math.inf, 0)
        return top[0], rows.gather(0, rank)[0].long() - self.shard.first, rest.sum(0)

    def sums(self, *x: Tensor) -> list[Tensor]:
        """Totals of float64 ``(C,)``. Collectives: one all-reduce of as many numbers a token."""
        table = torch.stack(x)
        all_reduce(table, self.shard.group)
        return list(table.unbind())


def _rows(seen: Any, first: int) -> list[Tensor]:
    mass, z = seen.mass, seen.z_label.double()
    of_classes = [mass.moment, (mass.best + first).double()] if seen.moments else []
    return [mass.top, mass.rest, z, *of_classes, *([] if seen.zsum is None else [seen.zsum])]


def _take(seen: Any, table: Any) -> None:
    """``table (ranks, n, C)``, the rows of every rank."""
    masses = []
    for one in table:
        mass = seen.mass._replace(top=one[0], rest=one[1])
        if seen.moments:
            mass = mass._replace(moment=one[3], best=one[4].long())
        masses.append(mass)
    seen.mass = functools.reduce(merged, masses)
    seen.z_label = table[:, 2].amax(0).to(seen.acc)
    if seen.zsum is not None:
        seen.zsum = table[:, -1].sum(0)
