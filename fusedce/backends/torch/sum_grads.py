"""The torch backend: the sum of the losses, and its gradients.

Work goes by *chunks* of valid tokens and, inside a chunk, by *tiles* of the vocabulary. A tile of
logits is stored vocabulary-major, ``(v, C)``: both GEMMs that follow then read it along its fast
dimension, and the first writes it faster too (6 to 12% less time for the three on a CPU).

One exponential per logit, ``e = exp(z - k)``, with a reference ``k (C,)`` that all tiles of a chunk
share (:func:`sampled_reference`). Once the log-sum-exp is known, ``p = e * exp(k - lse)`` differs
from ``e`` by one factor per token, which is applied to the small ``(C, H)`` operand or result of
each GEMM instead of to the exponentials. So on a CPU d_hidden is added up in float32 while a tile
and its rows of the head are at hand, and d_weight is one product for all tiles.

The label's own entry leaves the tile (``e = 0``), and the sums with it. With ``L`` the log-sum-exp
of the *other* logits, the loss is ``log(1 + exp(L - z_label))`` and the label's gradient, added as
a rank-one term, ``p - 1 = expm1(-loss)``: nothing cancels at p -> 1, where ``1 + (1 - p)`` in
float32 would have rounded most of the loss away. A single tile has the same from its sum ``S`` of
the others' exponentials: with ``d = z_label - k <= 0`` and ``T = S + exp(d)``, the loss is
``log1p(T - 1) - d`` and ``p - 1 = -S / T``, all in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...contract.labels import used_rows
from ...contract.objective import slopes, token_losses
from ...contract.problem import ACC_DTYPE, Outputs, Problem, Projection, Task
from ..gradients import (
    Gradients,
    Summed,
    allocate,
    expected_upstream,
    saved_grad_dtypes,
    sizes_of,
)
from ..plan import (
    FEW_CHUNKS,
    ONE_CHUNK,
    TILES,
    Plan,
    choose_plan,
    evaluation_tile,
    is_one_tile,
    plan_tiles,
)
from ..upstream import loss_in_two_passes
from .logit_tiles import (
    Logits,
    Rows,
    TileLabels,
    TileStats,
    add_at,
    chunks_of_rows,
    column_sums,
    exact_reference,
    exp_,
    largest,
    sampled_reference,
    take_labels,
    tiles,
)
from .products import Products, on_cpu
from .stats_and_grads import token_grads, token_stats

# Elements of the labels' rows that are computed again at a time: of a CPU's cache, of a device.
_ROWS, _ROWS_OF_DEVICE = 2**18, 2**25
_WIDENED = 2**22  # elements of the head's rows whose copy in float32 lies beside a tile


def loss(problem: Problem) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64; holds one tile of logits."""
    rows, n, n_valid = used_rows(problem)
    call = _Call(problem, Logits(Projection.of(problem)))
    if problem.memory_budget is None:
        C, classes = evaluation_tile(n, on_cpu=on_cpu(problem.hidden))
        if call.logits.products.operands != problem.hidden.dtype:
            classes = min(classes, max(_WIDENED // problem.hidden.shape[1], 1))
    else:
        plan = plan_tiles(sizes_of(problem, Outputs(), n), memory_budget=problem.memory_budget)
        C, classes, call.logits.plan = plan.tokens, plan.classes, plan
    # One tile is its own reference and has all labels: fewer steps, which are a small call's time.
    whole = classes >= len(problem.weight)
    chunks = chunks_of_rows(rows, C)
    totals = [_one_tile(call, x) if whole else _tile_by_tile(call, x, classes) for x in chunks]
    return _added(totals, problem), n_valid


def _added(totals: list[Tensor], problem: Problem) -> Tensor:
    """``()`` fp32 or fp64: the sum of float64 ``totals``."""
    dtype = ACC_DTYPE[problem.hidden.dtype]
    if len(totals) == 1:
        return totals[0].to(dtype)
    if not totals:
        return torch.zeros((), dtype=dtype, device=problem.hidden.device)
    return torch.stack(totals).sum().to(dtype)


def sums_smoothing(problem: Problem, wanted: Outputs) -> bool:
    """Whether exponentials are unrounded and in one chunk's memory, so that a share comes off."""
    exact = not Products.of(problem.hidden).narrow
    return exact and problem.softcap is None and problem.memory_budget is None


def loss_and_grads(task: Task, argmax: Tensor | None = None) -> Summed:
    """The sum and its wanted gradients; holds the exponentials of one chunk."""
    problem, wanted, *_ = task
    V, device = problem.weight.shape[0], problem.hidden.device
    rows, n, n_valid = used_rows(problem)
    logits = Logits(Projection.of(problem))
    stored = logits.products.operands
    narrow = stored != logits.products.acc
    dtypes = saved_grad_dtypes(problem)
    limited = problem.memory_budget is not None or problem.chunk_tokens is not None
    small = is_one_tile(n, V, stored.itemsize, on_cpu=device.type == "cpu")
    plan: Plan | None = None
    if small and not limited and not narrow:
        C, step, way = n, V, ONE_CHUNK
    else:
        call = sizes_of(problem, wanted, n, dtypes, logit=stored.itemsize)
        plan = choose_plan(
            call, chunk_tokens=problem.chunk_tokens, memory_budget=problem.memory_budget
        )
        C, step, way, logits.plan = min(plan.tokens, n), plan.classes, plan.name, plan
    # float16 has no room for exponentials relative to another logit than the largest, but for
    # probabilities: a device that multiplies in it takes the way that knows the log-sum-exp.
    if way == TILES or (narrow and stored == torch.float16):
        return loss_in_two_passes(token_stats, token_grads, problem, wanted, argmax)
    chunks = chunks_of_rows(rows, C)
    every_row = isinstance(rows, slice)
    grads = Gradients(
        problem, wanted, dtypes=dtypes, chunks=len(chunks), every_row=every_row,
        wide=way != FEW_CHUNKS,
    )  # fmt: skip
    factor = expected_upstream(problem, n_valid)
    of_all = _Call(problem, logits, grads, factor, argmax)
    if argmax is not None:
        argmax.fill_(-1)
    one_tile, exps = step >= V and not narrow, None
    if plan is not None and not one_tile:
        exps = allocate(plan, "logits of a chunk", stored, device)
    totals: list[Tensor] = []
    for chunk in chunks:
        if one_tile:
            totals.append(_one_tile(of_all, chunk, first=not totals))
        else:
            totals.append(_tile_by_tile(of_all, chunk, step, exps, first=not totals))
    return Summed(_added(totals, problem), n_valid, factor, *grads.cast_out())


class _Call(NamedTuple):
    """Inputs and buffers that the chunks of a call share."""

    problem: Problem
    logits: Logits
    grads: Gradients | None = None  # None: the losses alone
    factor: Tensor | None = None  # () the expected upstream gradient
    argmax: Tensor | None = None  # (N,) int64, to be filled

    def tokens(self, chunk: Rows) -> tuple[Tensor, Tensor]:
        """Hidden states ``(C, H)``, as products take them, and labels ``(C,)`` int64 of a chunk."""
        hidden, labels = self.problem.hidden, self.problem.labels
        if not isinstance(chunk, slice) or chunk.stop - chunk.start < len(labels):
            hidden, labels = hidden[chunk], labels[chunk]
        labels = labels if labels.dtype == torch.int64 else labels.long()
        return hidden.to(self.logits.products.operands), labels

    @property
    def smoothing(self) -> bool:
        """Whether the mean logit is needed, and every class's gradient gives away a share."""
        return self.grads is not None and self.problem.label_smoothing > 0

    @property
    def c(self) -> Tensor | None:
        """``(V,)`` weights of the classes in the mean logit."""
        c = self.problem.class_weight
        return None if c is None else c.to(self.logits.products.acc)

    def d_hidden(self, chunk: Rows, h: Tensor) -> Tensor | None:
        """Memory ``(C, H)`` for the gradient of a chunk's hidden states, if it is wanted."""
        if self.grads is None or self.grads.hidden is None:
            return None
        if isinstance(chunk, slice):
            whole = chunk.stop - chunk.start == len(self.grads.hidden)
            return self.grads.hidden if whole else self.grads.hidden[chunk]
        return torch.empty(h.shape, dtype=self.logits.products.acc, device=h.device)


class _Factors(NamedTuple):
    """A chunk's losses, and the numbers that turn its exponentials into the logits' gradient."""

    total: Tensor  # () float64
    exps: Tensor  # (C,) factors of the exponentials
    label: Tensor  # (C,) entries of the labels
    share: Tensor | None  # (C,) what every class gives away, times its weight

    @classmethod
    def of(
        cls,
        call: _Call,
        chunk: Rows,
        y: Tensor,  # (C,) in range
        nll: Tensor,  # (C,)
        lse: Tensor,  # (C,), read where the loss is not of nll alone
        zmean: Tensor | None,  # (C,) with label smoothing
        share: Tensor,  # (C,) exp(k - lse): a probability over its exponential
        less_one: Tensor,  # (C,) p - 1 of the label
        z_label: Tensor,  # (C,)
    ) -> _Factors:
        """From the statistics of the chunk's logits."""
        problem, factor = call.problem.rows(chunk), call.factor
        acc, head, c = call.logits.products.acc, call.logits.head, call.c
        assert factor is not None
        outer = factor if head.scale == 1 else head.scale * factor
        losses = token_losses(problem, y, nll, lse, zmean)
        by = slopes(problem, y, lse)
        slope_of_p = _times(outer, by.nll + by.lse)
        # The gradient of the label's raw product is `p - 1` where other classes have `p`.
        at_label = less_one * slope_of_p
        if not isinstance(by.lse, float) or by.lse:
            at_label = at_label + outer * by.lse
        given = None
        if call.smoothing:
            given = outer * by.zmean / len(head.weight)
            at_label = at_label - (given if c is None else given * c[y])
            given = given.to(acc).expand(len(y))
        if (slope := head.slope(z_label.double())) is not None:
            at_label = at_label * slope
        total = losses.sum(dtype=torch.float64)
        return cls(total, (share * slope_of_p).to(acc), at_label.to(acc), given)


def _times(factor: Tensor, x: Tensor | float) -> Tensor:
    return factor if isinstance(x, float) and x == 1 else factor * x


def _one_tile(call: _Call, chunk: Rows, *, first: bool = True) -> Tensor:
    """The sum of a chunk's losses, ``()`` float64; the gradients are added to the call's.

    All logits are in the cache. They become exponentials, then their own gradient, in place.
    """
    problem, logits, grads = call.problem, call.logits, call.grads
    V = len(problem.weight)
    h, y = call.tokens(chunk)
    z = logits.tile(h, 0, V)  # (V, C)
    zmean = column_sums(z, call.c) / V if call.smoothing else None
    slope = None if grads is None else logits.head.slope(z)
    # The tile's own maxima are the reference, the label among them: where it leaves the others more
    # than 87 nats behind, their exponentials are 0, as is a loss of exp(-87) in float32. A label of
    # +inf makes all NaN.
    if call.argmax is None:
        k = z.amax(0)
    else:
        k, call.argmax[chunk] = largest(z)
    z_label = take_labels(z, y)
    # At least 1 where the label is not the largest. With label smoothing in float64: what all
    # probabilities of a token err alike would be left over beside `s / V`.
    others = exp_(z.sub_(k)).sum(0, dtype=None if zmean is None else torch.float64)
    below = z_label - k
    more = below.expm1().add(others)  # the sum with the label's, less 1: exact where p -> 1
    nll = more.log1p().sub_(below)  # two numbers that are never negative
    if grads is None:
        return nll.double().sum()
    share = more.add_(1).reciprocal_()
    # Where the loss does not depend on it, only its dtype is asked: that of the slopes.
    lse = nll if problem.is_nll_only() else k - share.double().log()
    y = _in_range(y, V)
    less_one = others.mul_(share).neg_()
    factors = _Factors.of(call, chunk, y, nll, lse, zmean, share, less_one, z_label)
    g = z if slope is None else z.mul_(slope)
    _add_products(call, chunk, h, _logit_gradient(g, y, factors, call.c), first=first)
    return factors.total


def _tile_by_tile(
    call: _Call,
    chunk: Rows,
    step: int,  # classes of a tile
    exps: Tensor | None = None,  # memory for (V, C) exponentials; None: the losses alone
    *,
    first: bool = True,
) -> Tensor:
    """The sum of a chunk's losses, ``()`` float64; the gradients are added to the call's.

    Each tile of logits becomes exponentials, 0 at the labels, times the slopes of the logits, in
    ``exps``. A token's own factors reach the operands and results of the products that follow. Two
    waits for a device: whether references are 0, and whether they fit.
    """
    problem, logits, grads = call.problem, call.logits, call.grads
    products, head, V = logits.products, logits.head, len(problem.weight)
    operand, y = call.tokens(chunk)
    acc, c = products.acc, call.c
    if exps is not None:
        exps = exps.view(-1)[: V * len(y)].view(V, len(y))
    dh = call.d_hidden(chunk, operand)
    # On a CPU a tile and its rows of the head are in the cache. A device has one product for all
    # tiles; and with label smoothing exponentials become the gradient before they are multiplied.
    of_tile = None if products.narrow or call.smoothing else dh
    zsum = torch.zeros(len(y), dtype=torch.float64, device=y.device) if call.smoothing else None
    labels = TileLabels(y, V, step)

    def walk(k: Tensor, *, near: bool) -> TileStats:
        """All tiles, with exponentials relative to ``k (C,)``, which is 0 if ``near``."""
        stats = TileStats(labels, acc, k, near=near, argmax=call.argmax is not None)
        if zsum is not None:
            zsum.zero_()
        for begin, end in tiles(V, step):
            stored = None if exps is None else exps[begin:end]
            direct = stored is not None and stored.dtype == acc
            z = logits.tile(operand, begin, end, stored if direct else None)
            if zsum is not None:
                zsum.add_(column_sums(z, None if c is None else c[begin:end]))
            slope = None if stored is None else head.slope(z)
            stats.add(z, begin)
            if slope is not None:
                z.mul_(slope)
            if stored is not None and not direct:
                stored.copy_(z)
            if of_tile is not None:
                products(z.t(), logits.rows(begin, end, acc), of_tile, add=begin > 0)
        return stats

    k = sampled_reference(logits, operand, y)
    stats = walk(k, near=not labels.read(k.any()))
    if not stats.fit():
        stats = walk(k := exact_reference(logits, operand, labels), near=False)
    nll = stats.losses()
    if call.argmax is not None:
        call.argmax[chunk] = stats.likeliest()[0]
    if grads is None or exps is None:
        return nll.sum()
    lse, y = stats.lse(), _in_range(y, V)
    zmean = None if zsum is None else zsum / V
    share, less_one = (k - lse).exp_(), (-nll).expm1_()
    factors = _Factors.of(call, chunk, y, nll, lse, zmean, share, less_one, stats.z_label)
    h = operand.to(acc)
    if call.smoothing:
        g = _logit_gradient(exps, y, factors, c)
        _add_products(call, chunk, h, g, first=first, step=step)
        return factors.total
    if dh is not None and grads.hidden is not None:
        if products.narrow:
            products(exps.t(), problem.weight, dh)
        dh.mul_(factors.exps[:, None])
        dh.addcmul_(problem.weight[y].to(acc), factors.label[:, None])
        if not isinstance(chunk, slice):
            grads.hidden[chunk] = dh
    if grads.weight is not None:
        scaled = (h * factors.exps[:, None]).to(products.operands)
        rows = h * factors.label[:, None]
        _add_to_weight(products, exps, scaled, grads.weight, y, rows, first=first)
    if grads.bias is not None:
        for begin, end in tiles(V, step):
            grads.bias[begin:end] += torch.mv(exps[begin:end].to(acc), factors.exps)
        add_at(grads.bias, y, factors.label)
    return factors.total


def _in_range(y: Tensor, V: int) -> Tensor:
    """Labels that index within bounds: on a device a bad one has made its token NaN by now."""
    return y if on_cpu(y) else y.clamp(0, V - 1)


def _logit_gradient(
    exps: Tensor,  # (V, C)
    y: Tensor,  # (C,)
    factors: _Factors,
    c: Tensor | None,  # (V,)
) -> Tensor:
    """The gradient of the products with the head, in place of the exponentials."""
    g = exps.mul_(factors.exps)
    if factors.share is not None:
        g = g.sub_(factors.share) if c is None else g.addr_(c, factors.share, alpha=-1)
    return g.scatter_(0, y[None], factors.label[None])


def _add_products(
    call: _Call,
    chunk: Rows,
    h: Tensor,  # (C, H) in acc
    g: Tensor,  # (V, C) in acc, the gradient of the logits
    *,
    first: bool,  # chunk of the call
    step: int | None = None,  # rows of the head whose copies are held; all by default
) -> None:
    """Multiply by the head and the hidden states, into the call's gradients."""
    grads, products = call.grads, call.logits.products
    assert grads is not None
    dh = call.d_hidden(chunk, h)
    if dh is not None and grads.hidden is not None:
        begin = 0
        for part in (g,) if step is None else g.split(step):
            w = call.logits.rows(begin, begin + len(part), products.acc)
            products(part.t(), w, dh, add=begin > 0)
            begin += len(part)
        if not isinstance(chunk, slice):
            grads.hidden[chunk] = dh
    if grads.weight is not None:
        products(g, h, grads.weight, add=not first)
    if grads.bias is not None:
        grads.bias += g.sum(1)


def _add_to_weight(
    products: Products,
    exps: Tensor,  # (V, C)
    scaled: Tensor,  # (C, H)
    weight: Tensor,  # (V, H), to which is added
    y: Tensor,  # (C,) classes, in range
    rows: Tensor,  # (C, H) in acc, of the labels
    *,
    first: bool,  # nothing is in weight
) -> None:
    """``weight += exps @ scaled``, and ``weight[y] += rows``, rounded once.

    A weight gradient of two bytes would hold a rounded product, which ``rows`` may cancel almost
    completely. So the product's rows of these classes are computed again, in ``acc``.
    """
    if weight.dtype == rows.dtype:
        products(exps, scaled, weight, add=not first)
        add_at(weight, y, rows)
        return
    # Tokens of one class share a row of `total`. On a device nobody knows how many classes there
    # are, but that they are at most C: a wait would cost more than the rows that nobody reads.
    ordered, order = y.sort(stable=True)
    place = ordered.diff(prepend=ordered[:1]).ne(0).cumsum(0)  # (C,)
    n = int(place[-1]) + 1 if on_cpu(y) else len(y)
    classes = ordered.new_zeros(n).scatter_(0, place, ordered)
    total = rows.new_zeros(n, rows.shape[1])
    add_at(total, place, rows[order])
    if not first:
        total += weight[classes]
    products(exps, scaled, weight, add=not first)
    elements = _ROWS if on_cpu(y) else _ROWS_OF_DEVICE
    step = max(elements // max(scaled.shape), 1)
    for some, part in zip(classes.split(step), total.split(step), strict=True):
        products(exps[some], scaled, part, add=True)
    weight[ordered] = total.to(weight.dtype)[place]  # tokens of a class write the same
