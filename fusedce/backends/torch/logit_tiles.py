"""Chunks of tokens, tiles of their logits, and the statistics gathered from these tile by tile."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...contract.problem import Projection
from ..gradients import allocate
from ..plan import ROW_MULTIPLE, Plan
from .products import Products, on_cpu

# Largest sum of exponentials that is accepted. It and its inverse are far from the ends of
# float32's range, even times gradients and token weights of 1e-20.
HIGHEST = math.exp(40)
NEAR = 15  # nats: logits up to this size need no reference, float32 holds their exponentials
SAMPLE = 64  # classes that are tried for the first reference, the largest of their logits
Rows = slice | Tensor  # rows of a matrix: a slice if they are contiguous, else their indices
_FEW = 32  # tokens


def chunks_of(rows: Tensor, size: int) -> Sequence[Tensor]:
    """``rows`` in chunks; none at all where there is no row."""
    return rows.split(size) if len(rows) else ()


def chunks_of_rows(rows: Rows, size: int) -> Sequence[Rows]:
    """:func:`chunks_of`, where a slice is all rows."""
    if not isinstance(rows, slice):
        return chunks_of(rows, size)
    n = rows.stop
    return (rows,) if size >= n else [slice(i, min(i + size, n)) for i in range(0, n, size)]


def blocks_of(rows: Tensor, size: int, N: int) -> Iterator[Rows]:
    """``rows`` of ``N`` in blocks of at most ``size``; slices where they are known to be one."""
    begin = 0
    for block in chunks_of(rows, size):
        if len(rows) == N:  # every row, as their number says without a wait
            yield slice(begin, begin + len(block))
        elif on_cpu(block) and block[-1] - block[0] == len(block) - 1:
            yield slice(int(block[0]), int(block[-1]) + 1)
        else:
            yield block
        begin += len(block)


def filled(x: Tensor) -> Tensor:
    """``x (n, ...)`` with its last row repeated until there are a multiple of `ROW_MULTIPLE`.

    Libraries compute the last few rows of a matrix with other instructions, which would give a
    token other bits there, and in backward other logits.
    """
    missing = -len(x) % ROW_MULTIPLE
    return torch.cat([x, x[-1:].expand(missing, *x.shape[1:])]) if missing else x


def tiles(V: int, step: int) -> Iterator[tuple[int, int]]:
    """The first class of each tile of ``step`` classes, and the one after its last."""
    for begin in range(0, V, step):
        yield begin, min(begin + step, V)


class TileLabels:
    """Labels ``y (C,)`` in order, so that each tile knows its own; a bad label is in no tile.

    A device is waited for once, where :meth:`read` asks it how many labels each tile has. A single
    tile needs no order.
    """

    def __init__(self, y: Tensor, V: int, step: int) -> None:
        self.y, self.step = y, step
        self._read: list[int] | None = None
        if step >= V and on_cpu(y):
            self._tokens = ((y >= 0) & (y < V)).nonzero()[:, 0]
            self._rows, self._read = y[self._tokens], [0, len(self._tokens)]
            return
        ordered, self._tokens = y.sort(stable=True)
        self._rows = ordered % step
        starts = torch.arange(0, V + step, step, device=y.device).clamp_(max=V)
        self._borders = torch.searchsorted(ordered, starts)

    def read(self, flag: Tensor | None = None) -> bool:
        """Read the borders between tiles, and a bool ``flag ()`` in the same wait."""
        if self._read is not None:
            return flag is not None and bool(flag)
        borders = self._borders
        if flag is not None:
            borders = torch.cat([borders, flag.view(1)])
        self._read = borders.tolist()
        return flag is not None and bool(self._read[-1])

    def of(self, begin: int) -> tuple[Tensor, Tensor] | None:
        """Rows in the tile from class ``begin`` on, and tokens, of its labels; None without any."""
        if self._read is None:
            self.read()
        assert self._read is not None
        number = begin // self.step
        first, last = self._read[number : number + 2]
        return (self._rows[first:last], self._tokens[first:last]) if first < last else None


class Logits:
    """Logits of a head, tile by tile, in memory that every tile uses again.

    It is that of a ``plan``; without one, of the sizes that are asked for.
    """

    def __init__(self, head: Projection, plan: Plan | None = None, of: str = "weight") -> None:
        self.head, self.products, self.plan = head, Products.of(head.weight), plan
        self._rows_of = f"rows of {of}"
        self._z: Tensor | None = None
        self._w: Tensor | None = None
        self._widened = (0, 0)  # the rows that are in `_w`

    def operand(self, hidden: Tensor) -> Tensor:
        """``hidden (C, H)`` as :meth:`tile` takes it."""
        return hidden.to(self.products.operands)

    def tile(self, h: Tensor, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """``(v, C)`` logits of classes ``begin:end``; without ``out``, until the next tile."""
        w = self.rows(begin, end, self.products.operands)
        return self.head.finished(self._product(w, h, out), slice(begin, end))

    def copy(self, z: Tensor, rows: Rows) -> Tensor:
        """The columns ``rows`` of logits ``z (v, N)``, `filled`, until the next tile."""
        found = z[:, rows]
        v, n = found.shape
        made = self._scratch(v, n + -n % ROW_MULTIPLE)
        made[:, :n].copy_(found)
        made[:, n:] = made[:, n - 1 : n]
        return made

    def of_classes(self, h: Tensor, classes: Tensor) -> Tensor:
        """``(K, C)`` logits of ``classes (K,)``; the next tile overwrites them."""
        w = self.head.weight[classes].to(self.products.operands)
        return self.head.finished(self._product(w, h, None), classes[:, None])

    def rows(self, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """``(v, H)`` rows of the weight; a widened copy is valid until other rows are asked for."""
        w = self.head.weight
        if end - begin < w.shape[0]:
            w = w[begin:end]
        if w.dtype == dtype:
            return w
        if self._w is None or len(self._w) < len(w):
            self._w = self._memory(self._rows_of, w.shape)
        wide = self._w[: len(w)]
        if self._widened != (begin, end):
            wide.copy_(w)
            self._widened = (begin, end)
        return wide

    def _product(self, w: Tensor, h: Tensor, out: Tensor | None) -> Tensor:
        if out is not None:
            return self.products(w, h.t(), out)
        v, C = w.shape[0], h.shape[0]
        if C < _FEW:  # (a product of few columns takes twice the time of one of few rows)
            return self.products(h, w.t(), self._scratch(C, v)).t()
        return self.products(w, h.t(), self._scratch(v, C))

    def _scratch(self, rows: int, columns: int) -> Tensor:
        """``(rows, columns)`` in the memory of the tile before, where that is large enough."""
        n, z = rows * columns, self._z
        if z is None or z.numel() < n:
            self._z = z = self._memory("tile of logits", (rows, columns))
        return z if z.shape == (rows, columns) else z.view(-1)[:n].view(rows, columns)

    def _memory(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The plan's buffer of that name; without a plan, memory of this ``shape``."""
        acc, device = self.products.acc, self.head.weight.device
        if self.plan is None:
            return torch.empty(shape, dtype=acc, device=device)
        return allocate(self.plan, name, acc, device)


class Sums:
    """Sums of the exponentials ``exp(z - k)`` of tiles of logits, each relative to a ``k (C,)``."""

    def __init__(self) -> None:
        self.references: list[Tensor] = []
        self.sums: list[Tensor] = []

    def add(self, z: Tensor, k: Tensor, out: Tensor, *, near: bool = False) -> None:
        """Write ``exp(z - k)`` of a tile ``z (v, C)`` to ``out``; ``near``: k is 0, out is z."""
        if not near:
            torch.sub(z, k, out=out)
        self.references.append(k)
        self.sums.append(exp_(out).sum(0))

    def lse(self, like: Tensor) -> Tensor:
        """``(C,)`` float64: the log-sum-exp of all tiles; -inf where there is none."""
        if not self.sums:
            return torch.full_like(like, -math.inf, dtype=torch.float64)
        if len(self.sums) == 1:
            return self.references[0].double() + self.sums[0].double().log()
        k = torch.stack(self.references).double()  # (tiles, C)
        top = k.amax(0)
        return top + (torch.stack(self.sums).double() * (k - top).exp_()).sum(0).log()


class TileStats:
    """Statistics gathered tile by tile: the labels' logits, and the log-sum-exp of the others.

    Exponentials are ``exp(z - k)``, with a reference ``k (C,)`` for all tiles if one is given (see
    :func:`sampled_reference`), else with the maxima of each tile, as the entropy needs. The entropy
    is ``log S + T / S`` with ``S = sum exp(z - top)`` and ``T = sum exp(z - top) * (top -
    z)``, two terms that are never negative. ``S = 1 + R``, where ``R`` leaves the largest logit
    out; with ``log1p(R)`` nothing cancels where one class has nearly all the probability.
    """

    def __init__(
        self,
        labels: TileLabels,
        acc: torch.dtype,
        k: Tensor | None = None,  # (C,)
        *,
        near: bool = False,  # k is 0
        argmax: bool = False,
        entropy: bool = False,
    ) -> None:
        self.labels, self.y, self.k, self.near = labels, labels.y, k, near
        # NaN stays where no tile holds the label.
        self.z_label = torch.full_like(self.y, math.nan, dtype=acc)
        self._sums = Sums()
        # (C,) each, by tile: the largest logit and its class, and R and T.
        self._likeliest: list[tuple[Tensor, Tensor]] | None = [] if argmax or entropy else None
        self._moments: list[tuple[Tensor, Tensor]] | None = [] if entropy else None

    def fit(self) -> bool:
        """Whether no sum is too large for the reference; waits for a device."""
        return not bool((torch.stack(self._sums.sums) > HIGHEST).any())

    def add(self, z: Tensor, begin: int) -> None:
        """Take in a tile ``z (v, C)``; it becomes ``exp(z - k)``, 0 at the labels, in place.

        With ``entropy=True`` the tile is scratch afterwards.
        """
        if at := self.labels.of(begin):
            self.z_label[at[1]] = z[at]
            z[at] = -math.inf
        if self._likeliest is not None:  # costs as much as three exponentials on a CPU
            top, best = largest(z)
            self._likeliest.append((top, best + begin))
            if self._moments is not None:
                lowest = torch.finfo(z.dtype).min
                # Differences of -inf have an exponential of 0; 0 * inf is NaN.
                top = top.clamp(min=lowest)
                below = z.sub_(top).clamp_(min=lowest)
                e = exp_(below.clone()).scatter_(0, best[None], 0)
                R = e.sum(0)
                self._moments.append((R, e.mul_(below).sum(0).neg_()))
                self._sums.references.append(top)
                self._sums.sums.append(R + 1)
                return
        self._sums.add(z, maxima(z) if self.k is None else self.k, z, near=self.near)

    def losses(self) -> Tensor:
        """``(C,)`` float64: ``log(1 + exp(L - z_label))``, NaN where no tile held the label."""
        gap = self.others - self.z_label
        # Beyond the threshold the result is the gap: exp(-40) is below float64's rounding of 40.
        nll = torch.nn.functional.softplus(gap, threshold=40)
        return nll.masked_fill_(self.z_label == math.inf, math.nan)  # inf - inf

    def lse(self) -> Tensor:
        """``(C,)`` float64: the log-sum-exp of all logits."""
        return torch.logaddexp(self.others, self.z_label.double())

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

    @functools.cached_property
    def others(self) -> Tensor:
        """``(C,)`` float64: ``L``: the log-sum-exp of the logits but the label's."""
        return self._sums.lse(self.y)


def take_labels(z: Tensor, y: Tensor) -> Tensor:
    """``(C,)`` labels' logits of ``z (V, C)``, where -inf takes their place; NaN for bad labels."""
    at = y[None] if on_cpu(z) else y[None].clamp(0, len(z) - 1)
    found = z.gather(0, at)[0]
    z.scatter_(0, at, -math.inf)
    # Labels on a device are not read before. All of the token is NaN by its label.
    return found if on_cpu(z) else found.masked_fill_(at[0] != y, math.nan)


def column_sums(z: Tensor, c: Tensor | None) -> Tensor:
    """``sum_v c_v z_v (C,)`` float64 of a tile ``z (v, C)``; a class of weight 0 adds 0."""
    if c is None:  # (pairwise in float32, a third of float64's time; tiles are added in float64)
        return z.sum(0).double()
    return torch.mv(z.masked_fill((c == 0)[:, None], 0).t(), c).double()


_GROUP = 64  # classes whose maximum is found first: on a CPU `amax` is five times as fast as `max`


def largest(z: Tensor) -> tuple[Tensor, Tensor]:
    """``(C,)`` each: the largest of every column of ``z (v, C)``, and its row."""
    whole = len(z) // _GROUP * _GROUP
    if not on_cpu(z) or whole < 8 * _GROUP:
        return z.max(0)
    top, group = z[:whole].unflatten(0, (-1, _GROUP)).amax(1).max(0)
    first = group * _GROUP
    rows = first + torch.arange(_GROUP, device=z.device)[:, None]
    best = first + z.gather(0, rows).argmax(0)
    if whole < len(z):
        last, at = z[whole:].max(0)
        best = torch.where(last > top, at + whole, best)
        top = torch.maximum(top, last)
    return top, best


_LOG2E = math.log2(math.e)


def exp_(x: Tensor) -> Tensor:
    """``exp(x)`` in place.

    As a power of two on a CPU: torch's exponential is MKL's, which takes three times as long as
    ``exp2`` on AMD's CPUs. The product is rounded as a log-probability is.
    """
    if x.dtype == torch.float32 and on_cpu(x):
        return x.mul_(_LOG2E).exp2_()
    return x.exp_()


def maxima(z: Tensor) -> Tensor:
    """``(C,)``: the largest of each column of ``z (v, C)``; a finite number if all are -inf."""
    return z.amax(0).clamp_(min=torch.finfo(z.dtype).min)


def sampled_reference(logits: Logits, h: Tensor, y: Tensor) -> Tensor:
    """``(C,)``: the largest logit but the label's of a few classes, evenly chosen; fits mostly.

    With a reference that all tiles share, a chunk's exponentials can be multiplied as a whole. It
    is 0 where that fits as well: if it is for all tokens, there is nothing to subtract.
    """
    V = len(logits.head.weight)
    classes = torch.arange(0, V, -(-V // SAMPLE), device=h.device)
    z = logits.of_classes(h, classes).masked_fill_(classes[:, None] == y, -math.inf)
    k = maxima(z)
    return k.masked_fill_(k.abs() <= NEAR, 0)


def exact_reference(logits: Logits, h: Tensor, labels: TileLabels) -> Tensor:
    """``(C,)``: the largest logit but the label's of all classes; takes a product of its own."""
    k = torch.full_like(labels.y, torch.finfo(logits.products.acc).min, dtype=logits.products.acc)
    for begin, end in tiles(len(logits.head.weight), labels.step):
        z = logits.tile(h, begin, end)
        if at := labels.of(begin):
            z[at] = -math.inf
        k = torch.maximum(k, maxima(z))
    return k


def add_at(total: Tensor, y: Tensor, rows: Tensor) -> None:
    """``total[y] += rows``, of one dtype; deterministic, and no wait."""
    # index_add_ is serial on a CPU, where it is faster; on a device index_put_ sorts.
    if on_cpu(total):
        total.index_add_(0, y, rows)
    else:
        total.index_put_((y,), rows, accumulate=True)
