"""Chunks of tokens, tiles of their logits, and the statistics gathered from these tile by tile."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedce.backends.plan import ROW_MULTIPLE, Way
from fusedce.backends.torch.products import Products
from fusedce.contract.problem import Projection

# Largest sum of exponentials that is accepted. It and its inverse are far from the ends of
# float32's range, even times gradients and token weights of 1e-20.
HIGHEST = math.exp(40)
NEAR = 15  # nats: logits up to this size need no reference, float32 holds their exponentials
SAMPLE = 64  # classes that are tried for the first reference, the largest of their logits
Rows = slice | Tensor  # rows of a matrix: a slice if they are contiguous, else their indices
_ELEMENTS, _LEAST = 2**19, 256  # elements of a tile, and least classes, with fast bf16 products


def chunks_of(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    """``rows`` in chunks; none at all where there is no row."""
    return rows.split(size) if len(rows) else ()


def blocks_of(rows: Tensor, size: int) -> Iterator[Rows]:
    """``rows`` in blocks of at most ``size``, each filled up to a multiple of `ROW_MULTIPLE`.

    Its last row is repeated: libraries compute the last few rows of a matrix with other
    instructions, which would give a token other bits there, and in backward other logits.
    """
    for block in chunks_of(rows, size):
        missing = -len(block) % ROW_MULTIPLE
        if missing:
            yield torch.cat([block, block[-1:].expand(missing)])
        elif block.device.type == "cpu" and block[-1] - block[0] == len(block) - 1:
            yield slice(int(block[0]), int(block[-1]) + 1)
        else:
            yield block


def tiles(V: int, step: int) -> Iterator[tuple[int, int]]:
    """The first class of each tile of ``step`` classes, and the one after its last."""
    for begin in range(0, V, step):
        yield begin, min(begin + step, V)


def label_entry(y: Tensor, begin: int, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of labels ``y (K, C)`` in a tile ``(rows, C)``, clamped; and whether they lie in it."""
    local = y - begin
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


def write_labels(
    tile: Tensor,  # (v, C)
    y: Tensor,  # (C,)
    begin: int,
    value: Tensor | float,  # (C,), or of all
) -> tuple[Tensor, Tensor]:
    """Write ``value`` at labels in a tile; return what was there, and whether they lie in it."""
    at, inside = label_entry(y[None], begin, len(tile))
    found = tile.gather(0, at)
    tile.scatter_(0, at, torch.where(inside, value, found))
    return found[0], inside[0]


class Logits:
    """Logits of a head, tile by tile, in memory that every tile uses again."""

    def __init__(self, head: Projection) -> None:
        self.head, self.products = head, Products.of(head.weight)
        self._z = self._w = head.weight.new_empty(0, dtype=head.acc)
        self._widened = (0, 0)  # the rows that are in `_w`

    def operand(self, hidden: Tensor) -> Tensor:
        """``hidden (C, H)`` as :meth:`tile` takes it."""
        return hidden.to(self.products.logits)

    def tile(self, h: Tensor, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """``(v, C)`` logits of classes ``begin:end``; without ``out``, until the next tile."""
        w = self.rows(begin, end, self.products.logits)
        return self.head.finished(self._product(w, h, out), slice(begin, end))

    def step(self, way: Way) -> int:
        """Classes of a tile: those of the plan, or fewer, so that its logits stay in the cache."""
        if not self.products.exact_bf16:
            return way.classes
        return min(way.classes, max(_ELEMENTS // max(way.tokens, 1), _LEAST))

    def of_classes(self, h: Tensor, classes: Tensor) -> Tensor:
        """``(K, C)`` logits of ``classes (K,)``; the next tile overwrites them."""
        w = self.head.weight[classes].to(self.products.logits)
        return self.head.finished(self._product(w, h, None), classes[:, None])

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """``(v, H)`` rows of the weight; a widened copy is valid until other rows are asked for."""
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


def _as_large_as(buffer: Tensor, elements: int) -> Tensor:
    return buffer if buffer.numel() >= elements else buffer.new_empty(elements)


class Sums:
    """Sums of the exponentials ``exp(z - k)`` of tiles of logits, each relative to a ``k (C,)``."""

    def __init__(self) -> None:
        self.references: list[Tensor] = []
        self.sums: list[Tensor] = []

    def add(self, z: Tensor, k: Tensor, out: Tensor) -> bool:
        """Write ``exp(z - k)`` of a tile ``z (v, C)`` to ``out``; False if a sum is too large."""
        sums = torch.exp(torch.sub(z, k, out=out) if k.any() else z, out=out).sum(0)
        self.references.append(k)
        self.sums.append(sums)
        return not bool((sums > HIGHEST).any())

    def lse(self, like: Tensor) -> Tensor:
        """``(C,)`` float64: the log-sum-exp of all tiles; -inf where there is none."""
        if not self.sums:
            return torch.full_like(like, -math.inf, dtype=torch.float64)
        k = torch.stack(self.references).double()  # (tiles, C)
        top = k.amax(0)
        return top + (torch.stack(self.sums).double() * (k - top).exp_()).sum(0).log()


class TileStats:
    """Statistics gathered tile by tile: the labels' logits, and the log-sum-exp of the others.

    Exponentials are ``exp(z - k)``, with a reference ``k (C,)`` for all tiles if one is given (see
    :func:`references`), else with the maxima of each tile, as the entropy needs. The entropy
    is ``log S + T / S`` with ``S = sum exp(z - top)`` and ``T = sum exp(z - top) * (top -
    z)``, two terms that are never negative. ``S = 1 + R``, where ``R`` leaves the largest logit
    out; with ``log1p(R)`` nothing cancels where one class has nearly all the probability.
    """

    def __init__(
        self,
        y: Tensor,  # (C,) labels
        acc: torch.dtype,
        k: Tensor | None = None,  # (C,)
        *,
        argmax: bool = False,
        entropy: bool = False,
    ) -> None:
        self.y, self.k = y, k
        # NaN stays where no tile holds the label.
        self.z_label = torch.full_like(y, math.nan, dtype=acc)
        self._sums = Sums()
        # (C,) each, by tile: the largest logit and its class, and R and T.
        self._likeliest: list[tuple[Tensor, Tensor]] | None = [] if argmax or entropy else None
        self._moments: list[tuple[Tensor, Tensor]] | None = [] if entropy else None

    def add(self, z: Tensor, begin: int) -> bool:
        """Take in a tile ``z (v, C)``; it becomes ``exp(z - k)``, 0 at the labels, in place.

        Returns whether the reference fits: if not, start again with the next one. With the entropy
        the tile holds nothing of use.
        """
        found, inside = write_labels(z, self.y, begin, -math.inf)
        self.z_label = torch.where(inside, found, self.z_label)
        if self._likeliest is not None:  # costs as much as three exponentials on a CPU
            top, best = z.max(0)
            self._likeliest.append((top, best + begin))
            if self._moments is not None:
                lowest = torch.finfo(z.dtype).min
                # Differences of -inf have an exponential of 0; 0 * inf is NaN.
                below = z.sub_(top.clamp_(min=lowest)).clamp_(min=lowest)
                e = below.exp().scatter_(0, best[None], 0)
                R = e.sum(0)
                self._moments.append((R, e.mul_(below).sum(0).neg_()))
                self._sums.references.append(top)
                self._sums.sums.append(R + 1)
                return True
        return self._sums.add(z, maxima(z) if self.k is None else self.k, z)

    def losses(self) -> Tensor:
        """``(C,)`` float64: ``log(1 + exp(L - z_label))``, NaN where no tile held the label."""
        z_label = self.z_label.double()
        gap = self.others() - z_label
        nll = torch.logaddexp(gap, torch.zeros_like(gap))
        return nll.masked_fill_(z_label == math.inf, math.nan)  # the log-probability is inf - inf

    def lse(self) -> Tensor:
        """``(C,)`` float64: the log-sum-exp of all logits."""
        return torch.logaddexp(self.others(), self.z_label.double())

    def likeliest(self) -> tuple[Tensor, Tensor]:
        """``(C,)`` int64 and float: the likeliest class, and its logit."""
        assert self._likeliest is not None
        tops, bests = (torch.stack(x) for x in zip(*self._likeliest, strict=True))
        top, tile = tops.max(0)
        best = bests.gather(0, tile[None])[0]
        return torch.where(self.z_label > top, self.y, best), torch.maximum(self.z_label, top)

    def with_entropy(self) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, log-sum-exps and entropies, ``(C,)`` float64 each, of sums that have moments."""
        assert self._moments is not None
        z, none = self.z_label.double(), torch.zeros_like(self.z_label)
        # The label is one more tile, of one logit.
        ks, moments = [*self._sums.references, self.z_label], [*self._moments, (none, none)]
        R, T = (torch.stack(x).double() for x in zip(*moments, strict=True))  # (tiles, C)
        k = torch.stack(ks).clamp_(min=torch.finfo(none.dtype).min).double()
        top, winner = k.max(0, keepdim=True)
        w = (k - top).exp_()
        # Sums relative to k become sums relative to top. The largest logit of the winning tile is
        # left out of R; those of the other tiles belong to it.
        T = ((T + (1 + R) * (top - k)) * w).sum(0)
        R = (R * w + w.scatter(0, winner, 0)).sum(0)
        log_sum = R.log1p()
        return top[0] - z + log_sum, top[0] + log_sum, log_sum + T / (1 + R)

    def others(self) -> Tensor:
        """``L``: the log-sum-exp of the logits but the label's."""
        return self._sums.lse(self.y)


def maxima(z: Tensor) -> Tensor:
    """``(C,)``: the largest of each column of ``z (v, C)``; a finite number if all are -inf."""
    return z.amax(0).clamp_(min=torch.finfo(z.dtype).min)


def references(logits: Logits, h: Tensor, y: Tensor, step: int) -> Iterator[Tensor]:
    """References ``(C,)`` to try: one that fits nearly always, then one that fits.

    With a reference that all tiles share, a chunk's exponentials can be multiplied as a whole. The
    first is the largest logit but the label's of a few classes, evenly chosen, or 0 where that fits
    as well: there is nothing to subtract then. The second takes a product of its own.
    """
    V = len(logits.head.weight)
    classes = torch.arange(0, V, -(-V // SAMPLE), device=h.device)
    z = logits.of_classes(h, classes).masked_fill_(classes[:, None] == y, -math.inf)
    k = maxima(z)
    yield k.masked_fill_(k.abs() <= NEAR, 0)
    k.fill_(torch.finfo(k.dtype).min)
    for begin, end in tiles(V, step):
        z = logits.tile(h, begin, end)
        write_labels(z, y, begin, -math.inf)
        k = torch.maximum(k, maxima(z))
    yield k
