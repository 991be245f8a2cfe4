"""Tiles of logits, and what is gathered from them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def tiles(V: int, step: int) -> Iterator[tuple[int, int]]:
    """The first class of each tile of ``step`` classes, and the one after its last."""
    for begin in range(0, V, step):
        yield begin, min(begin + step, V)


def label_entry(y: Tensor, begin: int, rows: int) -> tuple[Tensor, Tensor]:
    """Where labels ``y (C,)`` stand in a tile ``(rows, C)``, as an index ``(1, C)``; and whether.

    The index is in range for all of them.
    """
    local = y - begin
    inside = (local >= 0) & (local < rows)
    return local.clamp(0, rows - 1)[None], inside


def clear_labels(tile: Tensor, at: Tensor, inside: Tensor, value: float = 0) -> None:
    """Write ``value`` where labels stand."""
    tile.scatter_(0, at, tile.gather(0, at).masked_fill_(inside, value))


def log_sum_exp(maxima: list[Tensor], sums: list[Tensor]) -> Tensor:
    """``(C,)`` float64: of tiles' maxima and sums of ``exp(z - maximum)``, ``(C,)`` each."""
    k = torch.stack(maxima).double()  # (tiles, C)
    top = k.amax(0)
    return top + (torch.stack(sums).double() * (k - top).exp_()).sum(0).log()


class TileStats:
    """Label logits, and of the others maxima and sums of exponentials, gathered tile by tile."""

    def __init__(self, y: Tensor, acc: torch.dtype, *, argmax: bool = False) -> None:
        self.y = y
        # NaN stays where no tile holds the label.
        self.z_label = torch.full((len(y),), math.nan, dtype=acc, device=y.device)
        self.maxima: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.likeliest: list[Tensor] | None = [] if argmax else None

    def add(self, z: Tensor, begin: int) -> None:
        """Take in a tile ``z (v, C)``; it becomes ``exp(z - k)``, 0 at the labels, in place."""
        at, inside = label_entry(self.y, begin, len(z))
        self.z_label = torch.where(inside, z.gather(0, at)[0], self.z_label)
        clear_labels(z, at, inside, -math.inf)
        if self.likeliest is None:
            k = z.amax(0)
        else:  # costs as much as three exponentials on a CPU
            k, best = z.max(0)
            self.likeliest.append(best + begin)
        # A tile of nothing but -inf must give exp(-inf) = 0, not exp(-inf + inf).
        k = k.clamp_(min=torch.finfo(z.dtype).min)
        z.sub_(k).exp_()
        self.maxima.append(k)
        self.sums.append(z.sum(0))

    def losses(self) -> Tensor:
        """``(C,)`` float64: ``log(1 + exp(L - z_label))``, NaN where no tile held the label."""
        z_label = self.z_label.double()
        gap = self._others() - z_label
        return torch.logaddexp(gap, torch.zeros_like(gap)) + nan_at_inf(z_label)

    def lse(self) -> Tensor:
        """``(C,)`` float64: the log-sum-exp of all logits."""
        return torch.logaddexp(self._others(), self.z_label.double())

    def argmax(self) -> Tensor:
        """``(C,)`` int64: the likeliest class."""
        assert self.likeliest is not None
        top, tile = torch.stack(self.maxima).max(0)
        best = torch.stack(self.likeliest).gather(0, tile[None])[0]
        return torch.where(self.z_label > top, self.y, best)

    def _others(self) -> Tensor:
        """``L``: the log-sum-exp of the logits but the label's."""
        return log_sum_exp(self.maxima, self.sums)

    def factors(self, lse: Tensor) -> Tensor:
        """``exp(k - lse) (tiles, C)`` float64: what turns each tile into probabilities."""
        return (torch.stack(self.maxima).double() - lse).exp_()


def nan_at_inf(z: Tensor) -> Tensor:
    """0, or NaN where ``z`` is +inf: the log-probability there is inf - inf."""
    return torch.zeros_like(z).masked_fill_(z == math.inf, math.nan)
