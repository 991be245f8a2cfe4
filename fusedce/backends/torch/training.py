"""The torch backend: the sum of the losses, and its gradients.

Work goes by *chunks* of valid tokens and, inside a chunk, by *tiles* of the vocabulary. A tile of
logits is stored vocabulary-major, ``(v, C)``: both GEMMs that follow then read it along its fast
dimension, and the first writes it faster too (6 to 12% less time for the three on a CPU).

One exponential per logit, ``e = exp(z - k)``, with a reference ``k (C,)`` that all tiles of a chunk
share nearly always (`TileStats`). Once the log-sum-exp is known, ``p = e * exp(k - lse)`` differs
from ``e`` by one factor per token, which is applied to the small ``(C, H)`` operand or result of
each GEMM instead of to the exponentials. So d_hidden is added up in float32 while a tile and its
rows of the head are at hand, and d_weight is one product for all tiles.

The label's own entry leaves the tile (``e = 0``), and the sums with it. With ``L`` the log-sum-exp
of the *other* logits, the loss is ``log(1 + exp(L - z_label))`` and the label's gradient, added as
a rank-one term, ``p - 1 = expm1(-loss)``: nothing cancels at p -> 1, where ``1 + (1 - p)`` in
float32 would have rounded most of the loss away. Where exponentials are rounded to bfloat16, the
largest of the others leaves its tile, too, if its probability is `OUTLIER_P` or more: alone in its
size, it has no neighbours to average its rounding with. The rounding errors that are left reach
d_hidden with the rows of the head, whose common part they would add up: it is taken away.

Label smoothing takes ``s / V`` from every probability. Where those are nearly even little is left,
and of probabilities rounded to bfloat16 nothing but their errors. So the exponentials of a chunk
then wait in float32, and what is rounded is the difference.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedce.backends import two_passes
from fusedce.backends.gradients import Gradients, add_rows, call_of, waiting
from fusedce.backends.mean_logit import MeanLogit
from fusedce.backends.plan import TILES, tile_classes, tiles_of, way_of
from fusedce.backends.protocol import Summed
from fusedce.backends.torch.logit_tiles import (
    OUTLIER_P,
    Logits,
    ReferenceTooLow,
    TileStats,
    clear_labels,
    first_reference,
    label_entry,
    tiles,
)
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import chunks_of, valid_rows
from fusedce.backends.torch.stats_and_grads import token_grads, token_stats
from fusedce.contract.objective import Slopes, expected_upstream, slopes, token_losses
from fusedce.contract.problem import Problem, Projection, Wanted

_ROWS = 2**18  # elements of a product of some rows, and of its operand, at a time
_WIDENED = 2**22  # elements of the head's rows whose copy in float32 lies beside a tile


def loss(problem: Problem) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64; holds one tile of logits."""
    rows, n_valid = valid_rows(problem)
    logits = Logits(Projection.of(problem), Products.of(problem.hidden))
    acc = logits.head.acc
    total = torch.zeros((), dtype=torch.float64, device=problem.hidden.device)
    call = call_of(problem, Wanted(), len(rows))
    way = tiles_of(call, memory_budget=problem.memory_budget)
    if problem.memory_budget is None:  # of few tokens, more classes fit into the cache
        most = tile_classes(call, None, way.tokens)
        if logits.products.logits != problem.hidden.dtype:
            most = min(most, _WIDENED // max(problem.hidden.shape[1], 1))
        way = way._replace(classes=max(way.classes, most))
    step = logits.step(way)
    for chunk in chunks_of(rows, way.tokens):
        h = logits.operand(problem.hidden[chunk])  # (C, H)
        y = problem.labels[chunk].long()
        stats = TileStats(y, acc, k=first_reference(logits, h, y))
        for begin, end in tiles(len(problem.weight), step):
            try:
                stats.add(logits.tile(h, begin, end), begin)
            except ReferenceTooLow:
                stats.add(logits.tile(h, begin, end), begin)
        total += stats.losses().sum()
    return total.to(acc), n_valid


def loss_and_grads(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Summed:
    """The sum and its wanted gradients; holds the exponentials of one chunk."""
    V, H = problem.weight.shape
    device = problem.hidden.device
    rows, n_valid = valid_rows(problem)
    products = Products.of(problem.hidden)
    logits = Logits(Projection.of(problem), products)
    head, acc = logits.head, products.acc
    stored = acc if problem.label_smoothing else products.gradients
    call = call_of(problem, wanted, len(rows), waiting(problem), logit=stored.itemsize)
    way = way_of(call, chunk_tokens=problem.chunk_tokens, memory_budget=problem.memory_budget)
    if way.name == TILES:
        return two_passes.loss_and_grads(token_stats, token_grads, problem, wanted, argmax)
    step = logits.step(way)
    chunks = chunks_of(rows, way.tokens)
    grads = Gradients(problem, wanted, dtypes=waiting(problem), chunks=len(chunks))
    factor = expected_upstream(problem, n_valid)
    total = torch.zeros((), dtype=torch.float64, device=device)
    mean = MeanLogit(problem) if problem.label_smoothing else None
    mean_row = logits.mean_row() if wanted.hidden and products.gradients != acc else None
    buffer = torch.empty(V * min(way.tokens, len(rows)), dtype=stored, device=device)
    if argmax is not None:
        argmax.fill_(-1)

    for number, chunk in enumerate(chunks):
        h = problem.hidden[chunk].to(acc)  # (C, H)
        C = len(chunk)
        y = problem.labels[chunk].long()
        dh = None if grads.hidden is None else torch.zeros(C, H, dtype=acc, device=device)
        exps = buffer[: V * C].view(V, C)
        made = _Exponentials(logits, exps, step, balanced=mean_row is not None)
        stats = made.make(
            logits.operand(h), y, argmax=argmax is not None, dh=dh if mean is None else None
        )
        nll, lse = stats.losses(), stats.lse()
        if argmax is not None:
            argmax[chunk] = stats.argmax()

        y = y.clamp(0, V - 1)  # a bad label (NaN by now) must not index out of bounds
        of_chunk = problem.rows(chunk)
        total += token_losses(of_chunk, y, nll, lse, None if mean is None else mean.of(h)).sum()
        by = slopes(of_chunk, y, lse)
        outer = problem.logit_scale * factor
        at_label = outer * _label_gradient(problem, by, y, nll, head.slope(stats.z_label.double()))
        at_label = at_label.to(acc)  # (C,)
        of_p = (outer * (by.nll + by.lse)).expand(C)
        factors = [(begin, (f * of_p).to(acc)) for begin, f in stats.factors(lse)]
        made.lost.mul_(factors[-1][1])
        if dh is not None and mean is None:
            dh.mul_(factors[-1][1][:, None])
        tokens, classes, outliers, as_stored = made.without_largest(h, lse, of_p, factors)
        missing = outliers - as_stored  # in d_hidden, to which the stored ones were added above
        add_rows(made.lost, tokens, -missing)
        if mean is None:
            made.add_to_head(grads, h, factors, first=number == 0)
        else:
            shift = torch.as_tensor(outer * by.zmean / V).to(acc).expand(C)
            c = problem.class_weight
            made.lost.zero_()
            outliers = outliers + shift[tokens] * (1.0 if c is None else c[classes].to(acc))
            missing = outliers  # the tiles below hold 0 in their place
            for begin, end, f in made.tiles_of(factors):
                g = _smoothed(problem, made.exps[begin:end], f, shift, stats.y, begin)
                here = (classes >= begin) & (classes < end)
                g[classes[here] - begin, tokens[here]] = 0
                made.add_tile(grads, dh, g, h, begin, first=number == 0)
            factors = [(0, torch.ones_like(of_p, dtype=acc))]  # they are in the exponentials now

        if grads.hidden is not None and dh is not None:
            if mean_row is not None:
                dh.addr_(made.lost, mean_row)
            dh.addcmul_(problem.weight[y].to(acc), at_label[:, None])
            add_rows(dh, tokens, problem.weight[classes].to(acc) * missing[:, None])
            grads.hidden[chunk] = dh.to(grads.hidden.dtype)
        product = functools.partial(made.add_rows_to, h=h, factors=factors)
        if len(tokens):  # one sum with the labels', so that it is rounded once
            y, h, at_label = (
                torch.cat(x) for x in ((y, classes), (h, h[tokens]), (at_label, outliers))
            )
        grads.add_rows(y, h, at_label, product)

    return Summed(total.to(acc), n_valid, factor, *grads.written())


class _Exponentials:
    """The exponentials of a chunk, times the slope of their logits, and what is added of them."""

    stats: TileStats
    lost: Tensor  # (C,) what rounding took from the sum of those that d_hidden is made of

    def __init__(self, logits: Logits, exps: Tensor, step: int, *, balanced: bool) -> None:
        self.logits, self.products, self.step = logits, logits.products, step
        self.exps = exps  # (V, C), to be filled
        self._balanced = balanced  # whether `lost` is asked for

    def make(
        self,
        h: Tensor,  # (C, H), the operand of logits
        y: Tensor,  # (C,)
        *,
        argmax: bool,
        dh: Tensor | None,  # (C, H), to which exponentials times the head are added
    ) -> TileStats:
        """Fills ``exps``, each relative to the reference of its span."""
        exps, logits, acc = self.exps, self.logits, self.products.acc
        k = first_reference(logits, h, y)
        self.lost = torch.zeros_like(k)
        self.stats = stats = TileStats(y, acc, argmax=argmax, k=k)
        for begin, end in tiles(len(exps), self.step):
            tile = exps[begin:end]
            in_place = tile if exps.dtype == acc else None
            try:
                z, slope, ratio = self._one(h, begin, end, in_place)
            except ReferenceTooLow:
                z, slope, ratio = self._one(h, begin, end, in_place)
            if slope is not None:
                z.mul_(slope)
            if in_place is None:
                tile.copy_(z)
            if in_place is None and self._balanced:
                exact = stats.sums[-1] if slope is None else z.sum(0)
                if ratio is not None:
                    self.lost.mul_(ratio)
                self.lost.add_(exact).sub_(self.products.column_sums(tile))
            if dh is not None:
                if ratio is not None:
                    dh.mul_(ratio[:, None])
                w = logits.rows(begin, end, self.products.gradients)
                self.products(tile.t(), w, dh, add=True)
        return stats

    def _one(
        self, h: Tensor, begin: int, end: int, out: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A tile of ``exp(z - k)``, slopes of its logits, and what its new reference demands."""
        z = self.logits.tile(h, begin, end, out=out)
        slope = self.logits.head.slope(z)
        return z, slope, self.stats.add(z, begin)

    def without_largest(
        self,
        h: Tensor,  # (C, H) in acc
        lse: Tensor,  # (C,) float64
        of_p: Tensor,  # (C,) float64
        factors: list[tuple[int, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take the outliers out of the exponentials, which hold 0 in their place from now on.

        An outlier is an entry whose rounding would show: a probability of `OUTLIER_P` or more.
        There are none where exponentials are not rounded.

        Returns:
            Tokens, classes, gradients of the logits in ``acc``, and the same as they were stored
            (rounded): ``(n,)`` each for ``n`` outliers.
        """
        exps, head = self.exps, self.logits.head
        begins = torch.tensor([begin for begin, _ in factors], device=lse.device)
        of_span = torch.stack([f for _, f in factors])  # (spans, C)
        tokens = classes = torch.zeros_like(self.stats.y[:0])
        if self.products.gradients != self.products.acc:
            tokens, classes = self._candidates(lse)
        z = (h[tokens] * head.weight[classes].to(h.dtype)).sum(1, dtype=torch.float64)
        z = self.logits.finished(z, classes)
        p = (z - lse[tokens]).exp_()
        slope = head.slope(z)
        outliers = of_p[tokens] * (p if slope is None else p * slope)
        span = torch.bucketize(classes, begins, right=True) - 1
        rounded = exps[classes, tokens].double() * of_span[span, tokens]
        exps[classes, tokens] = 0
        return tokens, classes, outliers.to(h.dtype), rounded.to(h.dtype)

    def _candidates(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and classes of stored gradients of `OUTLIER_P` or more, one of a tile and token.

        A tile holds one only where its sum is a probability of that size. If that is so for many
        tokens, a pass over the whole tile for maxima costs less than gathering their columns.
        """
        found = [(lse[:0].long(), lse[:0].long())]
        sums = torch.stack(self.stats.sums).double()  # (tiles, C)
        spans = self.stats.factors(lse)
        factors = torch.stack([f for _, _, f in self.tiles_of(spans)])
        for number in (held := sums.mul_(factors) >= OUTLIER_P).any(1).nonzero()[:, 0].tolist():
            here, begin = held[number].nonzero()[:, 0], number * self.step
            tile, factor = self.exps[begin : begin + self.step], factors[number]
            if 4 * len(here) > len(factor):
                here = here[_maxima(tile).double().mul_(factor)[here] >= OUTLIER_P]
            if len(here):  # (rows of the transposed tile are gathered in a quarter of the time)
                top, best = tile.t().index_select(0, here).float().max(1)
                large = top.double().mul_(factor[here]) >= OUTLIER_P
                found.append((here[large], begin + best[large]))
        tokens, classes = (torch.cat(x) for x in zip(*found, strict=True))
        return tokens, classes

    def add_to_head(
        self, grads: Gradients, h: Tensor, factors: list[tuple[int, Tensor]], *, first: bool
    ) -> None:
        """Adds ``exps @ (h * factor)`` to the weight's gradient, and their sums to the bias's."""
        if grads.weight is not None:
            for begin, end, scaled in self._scaled(h, factors):
                total = grads.weight[begin:end]
                self.products(self.exps[begin:end], scaled, total, add=not first)
        if grads.bias is not None:
            for begin, end, f in self.tiles_of(factors):
                grads.bias[begin:end] += torch.mv(self.exps[begin:end].to(f.dtype), f)

    def add_rows_to(
        self,
        classes: Tensor,  # (n,) sorted
        total: Tensor,  # (n, H) in acc
        h: Tensor,  # (C, H) in acc
        factors: list[tuple[int, Tensor]],
    ) -> None:
        """Adds the rows of ``exps @ (h * factor)`` for some classes, a few at a time."""
        step = max(_ROWS // max(h.shape), 1)
        for begin, end, scaled in self._scaled(h, factors):
            first, last = torch.searchsorted(classes, classes.new_tensor([begin, end])).tolist()
            for i in range(first, last, step):
                some = slice(i, min(i + step, last))
                exps = self.exps[classes[some]].to(self.products.gradients)
                self.products(exps, scaled, total[some], add=True)

    def _scaled(
        self, h: Tensor, factors: list[tuple[int, Tensor]]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Begin and end of the classes of each factor, and ``h * factor`` for a product."""
        ends = [begin for begin, _ in factors[1:]] + [len(self.exps)]
        for (begin, f), end in zip(factors, ends, strict=True):
            yield begin, end, (h * f[:, None]).to(self.products.gradients)

    def add_tile(
        self,
        grads: Gradients,
        dh: Tensor | None,  # (C, H)
        g: Tensor,  # (v, C) in acc
        h: Tensor,  # (C, H) in acc
        begin: int,
        *,
        first: bool,
    ) -> None:
        """Adds what a tile of gradients of the logits makes of all three gradients."""
        end, gemm = begin + len(g), self.products.gradients
        if grads.bias is not None:
            grads.bias[begin:end] += g.sum(1)
        exact, g = g, g.to(gemm)
        if dh is not None:
            if g.dtype != exact.dtype:
                self.lost.add_(exact.sum(0)).sub_(self.products.column_sums(g))
            self.products(g.t(), self.logits.rows(begin, end, gemm), dh, add=True)
        if grads.weight is not None:
            self.products(g, h.to(gemm), grads.weight[begin:end], add=not first)

    def tiles_of(self, factors: list[tuple[int, Tensor]]) -> Iterator[tuple[int, int, Tensor]]:
        """Begin, end and factors of each tile."""
        begins = [begin for begin, _ in factors]
        for begin, end in tiles(len(self.exps), self.step):
            yield begin, end, factors[bisect.bisect_right(begins, begin) - 1][1]


def _maxima(tile: Tensor) -> Tensor:
    """``(C,)``: the largest of each column of ``tile (v, C)``, which has no negative element.

    bfloat16 numbers from 0 are ordered as their bits are, and torch compares integers in a quarter
    of the time.
    """
    if tile.dtype != torch.bfloat16:
        return tile.amax(0)
    return tile.view(torch.int16).amax(0).view(tile.dtype)


def _label_gradient(
    problem: Problem,
    by: Slopes,
    y: Tensor,  # (C,)
    nll: Tensor,  # (C,) float64
    slope: Tensor | None,  # (C,)
) -> Tensor:
    """``(C,)`` float64: derivative of the loss by the label's scaled product."""
    g = by.nll * torch.expm1(-nll) + by.lse * torch.exp(-nll)
    if problem.label_smoothing:
        c = 1.0 if problem.class_weight is None else problem.class_weight.double()[y]
        g = g + by.zmean * c / problem.weight.shape[0]
    return g if slope is None else g * slope


def _smoothed(
    problem: Problem,
    exps: Tensor,  # (v, C), overwritten
    factors: Tensor,  # (C,)
    shift: Tensor,  # (C,)
    y: Tensor,  # (C,)
    begin: int,
) -> Tensor:
    """``exps * factors + class_weight * shift``, and 0 at the labels."""
    g = exps.mul_(factors)
    if problem.class_weight is None:
        g.add_(shift)
    else:
        g.addr_(problem.class_weight[begin : begin + len(g)].to(g.dtype), shift)
    clear_labels(g, *label_entry(y, begin, len(g)))
    return g
