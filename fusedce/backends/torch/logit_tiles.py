"""Tiles of logits, and the statistics that are gathered from them tile by tile."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedce.backends.mean_logit import sample, sampled_mean_row
from fusedce.backends.plan import Way
from fusedce.backends.torch.products import Products
from fusedce.contract.problem import Projection

OUTLIER_P = 0.125  # a probability; entries of that size are not rounded

# Nats. Exponentials of so much and factors that undo them are far from the ends of float32, also
# times gradients and weights of tokens of 1e-20.
ABOVE = 30
HIGHEST = math.exp(ABOVE)
NEAR = 15  # nats: logits of that size have exponentials near 1, as far as a float32 goes
_ELEMENTS, _LEAST = 2**19, 256  # of a tile where its products take no longer than a pass over it


def tiles(V: int, step: int) -> Iterator[tuple[int, int]]:
    """The first class of each tile of ``step`` classes, and the one after its last."""
    for begin in range(0, V, step):
        yield begin, min(begin + step, V)


def label_entry(y: Tensor, begin: int, rows: int) -> tuple[Tensor, Tensor]:
    """Where labels ``y (C,)`` stand in a tile ``(rows, C)``, as an index ``(1, C)``; and whether.

    The index is in range for all of them. ``y (K, C)``: both are ``(K, C)``.
    """
    local = y - begin
    inside = (local >= 0) & (local < rows)
    local = local.clamp(0, rows - 1)
    return local if y.dim() == 2 else local[None], inside


def clear_labels(tile: Tensor, at: Tensor, inside: Tensor, value: float = 0) -> None:
    """Write ``value`` where labels stand."""
    tile.scatter_(0, at, tile.gather(0, at).masked_fill_(inside, value))


class Logits:
    """Logits of a head, tile by tile, in memory that every tile uses again."""

    def __init__(self, head: Projection, products: Products) -> None:
        self.head, self.products = head, products
        self._z = self._w = head.weight.new_empty(0, dtype=head.acc)
        self._widened = (0, 0)  # the rows that are in `_w`

    def operand(self, hidden: Tensor) -> Tensor:
        """``hidden (C, H)`` as :meth:`tile` takes it."""
        return hidden.to(self.products.logits)

    def tile(self, h: Tensor, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """``(v, C)`` logits of classes ``begin`` to ``end``, in ``out`` or until the next tile."""
        w = self.rows(begin, end, self.products.logits)
        return self.finished(self._product(w, h, out), slice(begin, end))

    def step(self, way: Way) -> int:
        """Classes of a tile: those of the plan, or fewer, so that its logits stay in the cache."""
        if not self.products.exact_bf16:
            return way.classes
        return min(way.classes, max(_ELEMENTS // max(way.tokens, 1), _LEAST))

    def of_classes(self, h: Tensor, classes: Tensor) -> Tensor:
        """``(K, C)`` logits of ``classes (K,)``, until the next tile."""
        w = self.head.weight[classes].to(self.products.logits)
        return self.finished(self._product(w, h, None), classes[:, None])

    def mean_row(self) -> Tensor:
        """``(H,)`` in ``acc``: about the mean of the weight's rows, a sample's."""
        return sampled_mean_row(self.head.weight)

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """``(v, H)`` rows of the weight; widened ones stay until others are asked for."""
        w = self.head.weight[begin:end]
        if w.dtype == dtype:
            return w
        self._w = _as_large_as(self._w, w.numel())
        wide = self._w[: w.numel()].view(w.shape)
        if self._widened != (begin, end):
            wide.copy_(w)
            self._widened = (begin, end)
        return wide

    def _product(self, w: Tensor, h: Tensor, out: Tensor | None) -> Tensor:
        if self.products.by_onednn(w):
            z: Tensor = torch.ops.mkldnn._linear_pointwise(w, h, None, "none", [], "")
            return z if out is None else out.copy_(z)
        if out is None:
            self._z = _as_large_as(self._z, len(w) * len(h))
            out = self._z[: len(w) * len(h)].view(len(w), len(h))
        return self.products(w, h.t(), out)

    def finished(self, z: Tensor, classes: Tensor | slice) -> Tensor:
        """Logits of products ``z`` with rows of the weight, in their place."""
        head = self.head
        if head.bias is not None:
            bias = head.bias[classes].to(z.dtype)
            z.add_(bias[:, None] if isinstance(classes, slice) else bias)
        if head.scale != 1.0:
            z.mul_(head.scale)
        if head.softcap is not None:
            z.div_(head.softcap).tanh_().mul_(head.softcap)
        return z


def _as_large_as(buffer: Tensor, elements: int) -> Tensor:
    return buffer if buffer.numel() >= elements else buffer.new_empty(elements)


class ReferenceTooLow(Exception):
    """A logit is so far above the reference that its exponential leaves its range.

    :meth:`TileStats.add` raises it at most once for each object, and has destroyed the tile by
    then. The caller computes the same tile again and calls ``add`` again, which now raises the
    reference instead.
    """


class TileStats:
    """Statistics gathered tile by tile: the labels' logits, sums and maxima of the others.

    Exponentials are ``exp(z - k)``. All tiles of a token share one reference ``k (C,)`` as long as
    no logit is more than `ABOVE` above it; where one is, its tile and those that follow take its
    logit as reference. Rows of NaN keep theirs.

    With a first reference that fits nearly always, nobody looks for maxima before a sum of
    exponentials shows that it did not fit.
    """

    def __init__(
        self,
        y: Tensor,  # (C,) labels
        acc: torch.dtype,
        *,
        argmax: bool = False,
        k: Tensor | None = None,  # (C,) the first reference; by default that of the first tile
    ) -> None:
        self.y = y
        self._trusted = k is not None and not argmax
        self._refer_to(torch.full_like(y, torch.finfo(acc).min, dtype=acc) if k is None else k)
        self.spans = [(0, self.k)]  # first classes, references
        # NaN stays where no tile holds the label.
        self.z_label = torch.full_like(self.k, math.nan)
        self.sums: list[Tensor] = []  # of each tile, relative to the reference of its span
        self._total = torch.zeros_like(self.k, dtype=torch.float64)
        self._likeliest: list[tuple[Tensor, Tensor]] | None = [] if argmax else None
        self._in_order, self._tokens = y.sort()
        self._classes = self._in_order.tolist()

    def _refer_to(self, k: Tensor) -> None:
        self.k, self._limit = k, k + ABOVE
        self._shifted = bool(k.any())

    def add(self, z: Tensor, begin: int) -> Tensor | None:
        """Take in a tile ``z (v, C)``; it becomes ``exp(z - k)``, 0 at the labels, in place.

        Returns what turns sums over earlier tiles, (C,), into those of a new reference; ``None``
        where that is the old one.

        Raises:
            ReferenceTooLow: compute the tile again and call this again, once; only with ``k``.
        """
        first, last = (bisect.bisect_left(self._classes, x) for x in (begin, begin + len(z)))
        if first < last:
            tokens, rows = self._tokens[first:last], self._in_order[first:last] - begin
            self.z_label[tokens] = z[rows, tokens]
            z[rows, tokens] = -math.inf
        ratio = None if self._trusted else self._raise_reference(z, begin)
        if self._shifted:  # a tile of nothing but -inf gives exp(-inf) = 0: k is never -inf
            z.sub_(self.k)
        sums = z.exp_().sum(0)
        if self._trusted and bool((sums > HIGHEST).any()):
            self._trusted = False  # the next call looks for maxima, and cannot raise
            raise ReferenceTooLow
        self.sums.append(sums)
        self._total += sums
        return ratio

    def _raise_reference(self, z: Tensor, begin: int) -> Tensor | None:
        if self._likeliest is None:
            top = z.amax(0)
        else:  # costs as much as three exponentials on a CPU
            top, best = z.max(0)
            self._likeliest.append((top, best + begin))
        higher = top > self._limit
        if not higher.any():
            return None
        k = torch.where(higher, top, self.k)
        ratio = (self.k - k).exp_()
        self._total *= ratio
        self._refer_to(k)
        if begin == self.spans[-1][0]:
            self.spans.pop()
        self.spans.append((begin, k))
        return ratio

    def losses(self) -> Tensor:
        """``(C,)`` float64: ``log(1 + exp(L - z_label))``, NaN where no tile held the label."""
        z_label = self.z_label.double()
        gap = self.others() - z_label
        return torch.logaddexp(gap, torch.zeros_like(gap)) + nan_at_inf(z_label)

    def lse(self) -> Tensor:
        """``(C,)`` float64: the log-sum-exp of all logits."""
        return torch.logaddexp(self.others(), self.z_label.double())

    def argmax(self) -> Tensor:
        """``(C,)`` int64: the likeliest class."""
        assert self._likeliest is not None
        tops, bests = (torch.stack(x) for x in zip(*self._likeliest, strict=True))
        top, tile = tops.max(0)
        return torch.where(self.z_label > top, self.y, bests.gather(0, tile[None])[0])

    def factors(self, lse: Tensor) -> list[tuple[int, Tensor]]:
        """``exp(k - lse) (C,)`` float64 for each reference, and the first class that has it."""
        return [(begin, (k.double() - lse).exp_()) for begin, k in self.spans]

    def others(self) -> Tensor:
        """``L``: the log-sum-exp of the logits but the label's."""
        return self.k.double() + self._total.log()


def first_reference(logits: Logits, h: Tensor, y: Tensor) -> Tensor:
    """``(C,)``: the largest logit but the label's of some classes, evenly chosen.

    With a reference that all tiles share, a chunk's exponentials can be multiplied as a whole. It
    is 0 where that fits as well: there is nothing to subtract then. Half of a sample is enough.
    """
    classes = sample(logits.head.weight)[::2]
    z = logits.of_classes(h, classes)
    z.masked_fill_(classes[:, None] == y, -math.inf)
    k = z.amax(0).clamp_(min=torch.finfo(z.dtype).min)
    return k.masked_fill_(k.abs() <= NEAR, 0)


def nan_at_inf(z: Tensor) -> Tensor:
    """0, or NaN where ``z`` is +inf: the log-probability there is inf - inf."""
    return torch.zeros_like(z).masked_fill_(z == math.inf, math.nan)
