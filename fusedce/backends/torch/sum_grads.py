"""The torch backend: the sum of the losses, and its gradients.

Work goes by *chunks* of valid tokens and, inside a chunk, by *tiles* of the vocabulary. A tile of
logits is stored vocabulary-major, ``(v, C)``: both GEMMs that follow then read it along its fast
dimension, and the first writes it faster too (6 to 12% less time for the three on a CPU).

One exponential per logit, ``e = exp(z - k)``, with a reference ``k (C,)`` that all tiles of a chunk
share (:func:`references`). Once the log-sum-exp is known, ``p = e * exp(k - lse)`` differs
from ``e`` by one factor per token, which is applied to the small ``(C, H)`` operand or result of
each GEMM instead of to the exponentials. So d_hidden is added up in float32 while a tile and its
rows of the head are at hand, and d_weight is one product for all tiles.

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

from fusedce.backends.gradients import (
    Gradients,
    Summed,
    add_rows,
    by_class,
    saved_grad_dtypes,
    sizes_of,
)
from fusedce.backends.plan import TILES, choose_plan, evaluation_tile, is_one_tile, plan_tiles
from fusedce.backends.torch.logit_tiles import (
    Logits,
    TileStats,
    chunks_of_rows,
    column_sums,
    exp_,
    largest,
    references,
    take_labels,
    tiles,
)
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.stats_and_grads import token_grads, token_stats
from fusedce.backends.upstream import loss_in_two_passes
from fusedce.contract.labels import used_rows
from fusedce.contract.objective import expected_upstream, slopes, token_losses
from fusedce.contract.problem import Outputs, Problem, Projection, Task, acc_dtype

_ROWS = 2**18  # elements of the labels' rows that are computed again at a time
_WIDENED = 2**22  # elements of the head's rows whose copy in float32 lies beside a tile


def loss(problem: Problem) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64; holds one tile of logits."""
    rows, n, n_valid = used_rows(problem)
    logits = Logits(Projection.of(problem))
    if problem.memory_budget is None:
        C, classes = evaluation_tile(n, on_cpu=problem.hidden.device.type == "cpu")
        if logits.products.logits != problem.hidden.dtype:
            classes = min(classes, max(_WIDENED // problem.hidden.shape[1], 1))
    else:
        plan = plan_tiles(sizes_of(problem, Outputs(), n), memory_budget=problem.memory_budget)
        C, classes = plan.tokens, plan.classes
    step = logits.step(C, classes)
    totals = []
    for chunk in chunks_of_rows(rows, C):
        h, y = _tokens(problem, chunk)
        totals.append(_walk(logits, logits.operand(h), y, step).nll.double().sum())
    return _added(totals, problem), n_valid


def _tokens(problem: Problem, chunk: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Hidden states ``(C, H)`` and labels ``(C,)`` int64 of a chunk."""
    hidden, labels = problem.hidden, problem.labels
    if not isinstance(chunk, slice) or chunk.stop - chunk.start < len(labels):
        hidden, labels = hidden[chunk], labels[chunk]
    return hidden, labels if labels.dtype == torch.int64 else labels.long()


def _added(totals: list[Tensor], problem: Problem) -> Tensor:
    """``()`` fp32 or fp64: the sum of float64 ``totals``."""
    dtype = acc_dtype(problem.hidden.dtype)
    if len(totals) == 1:
        return totals[0].to(dtype)
    if not totals:
        return torch.zeros((), dtype=dtype, device=problem.hidden.device)
    return torch.stack(totals).sum().to(dtype)


def sums_smoothing(problem: Problem, wanted: Outputs) -> bool:
    """Whether exponentials are unrounded and in one chunk's memory, so that a share comes off."""
    products = Products.of(problem.hidden)
    exact = products.gradients == products.acc
    return exact and problem.softcap is None and problem.memory_budget is None


def loss_and_grads(task: Task, argmax: Tensor | None = None) -> Summed:
    """The sum and its wanted gradients; holds the exponentials of one chunk."""
    problem, wanted, *_ = task
    V = problem.weight.shape[0]
    device = problem.hidden.device
    rows, n, n_valid = used_rows(problem)
    logits = Logits(Projection.of(problem))
    head, products = logits.head, logits.products
    acc, stored = products.acc, products.gradients
    dtypes = saved_grad_dtypes(problem)
    limited = problem.memory_budget is not None or problem.chunk_tokens is not None
    if not limited and is_one_tile(n, V, stored.itemsize, on_cpu=device.type == "cpu"):
        C, step = n, V
    else:
        call = sizes_of(problem, wanted, n, dtypes, logit=stored.itemsize)
        plan = choose_plan(
            call, chunk_tokens=problem.chunk_tokens, memory_budget=problem.memory_budget
        )
        if plan.name == TILES:
            return loss_in_two_passes(token_stats, token_grads, problem, wanted, argmax)
        C, step = min(plan.tokens, n), logits.step(plan.tokens, plan.classes)
    chunks = chunks_of_rows(rows, C)
    every_row = isinstance(rows, slice)
    grads = Gradients(problem, wanted, dtypes=dtypes, chunks=len(chunks), every_row=every_row)
    factor = expected_upstream(problem, n_valid)
    outer = factor if problem.logit_scale == 1 else problem.logit_scale * factor
    smoothing = problem.label_smoothing
    # Exponentials become the gradient of the logits in their place: with label smoothing, and where
    # all of them are in the cache. Else what is a token's own is applied to the smaller operands.
    in_place = stored == acc and (smoothing > 0 or step >= V)
    totals = []
    buffer = None  # (a single tile has memory of its own)
    if step < V or not in_place:
        buffer = torch.empty(V, C, dtype=stored, device=device)
    c = problem.class_weight.to(acc) if smoothing and problem.class_weight is not None else None
    if argmax is not None:
        argmax.fill_(-1)

    for number, chunk in enumerate(chunks):
        h, y = _tokens(problem, chunk)
        h = h if h.dtype == acc else h.to(acc)  # (C, H)
        exps = buffer
        if exps is not None and len(h) < C:
            exps = exps.view(-1)[: V * len(h)].view(V, len(h))
        dh = None
        if grads.hidden is not None:
            whole = len(chunks) == 1 and every_row and grads.hidden.dtype == acc
            dh = grads.hidden if whole else torch.empty(h.shape, dtype=acc, device=device)
        found = _walk(
            logits, logits.operand(h), y, step, train=True, exps=exps, dh=None if in_place else dh,
            argmax=argmax is not None, zmean=smoothing > 0, c=c,
        )  # fmt: skip
        nll = found.nll
        # Where the loss does not depend on it, only its dtype is asked: that of the slopes.
        lse = nll if problem.is_nll_only() else found.lse()
        if argmax is not None and found.argmax is not None:
            argmax[chunk] = found.argmax

        if device.type != "cpu":  # a bad label, which has NaN by now, must not index out of bounds
            y = y.clamp(0, V - 1)
        of_chunk = problem.rows(chunk)
        losses = token_losses(of_chunk, y, nll, lse, found.zmean)
        totals.append(losses.sum(dtype=torch.float64))
        by = slopes(of_chunk, y, lse)
        assert found.share is not None
        assert found.less_one is not None
        slope_of_p = _times(outer, by.nll + by.lse)
        # These turn exponentials into probabilities, times the slope of the loss.
        factors = (found.share * slope_of_p).to(acc)  # (C,)
        # Gradient of the label's raw product: `p - 1` where the other classes have `p`.
        at_label = found.less_one * slope_of_p
        if not isinstance(by.lse, float) or by.lse:
            at_label = at_label + outer * by.lse
        if smoothing:  # what every class gives away, (C,), times its weight
            share = outer * by.zmean / V
            at_label = at_label - (share if c is None else share * c[y])
        if (slope := head.slope(found.z_label.double())) is not None:
            at_label = at_label * slope
        at_label = at_label.to(acc)  # (C,)

        if in_place:
            g = found.exps.mul_(factors)
            if smoothing:
                share = share.to(acc).expand(len(h))
                g = g.sub_(share) if c is None else g.addr_(c, share, alpha=-1)
            g.scatter_(0, y[None], at_label[None])
            if dh is not None:
                for begin, end in tiles(V, step):
                    products(g[begin:end].t(), logits.rows(begin, end, acc), dh, add=begin > 0)
            if grads.weight is not None:
                products(g, h, grads.weight, add=number > 0)
            if grads.bias is not None:
                grads.bias += g.sum(1)
        else:
            if dh is not None:
                dh.mul_(factors[:, None])
                dh.addcmul_(problem.weight[y].to(acc), at_label[:, None])
            if grads.weight is not None:
                scaled = (h * factors[:, None]).to(stored)
                products(found.exps, scaled, grads.weight, add=number > 0)
                _add_labels(products, found.exps, scaled, grads.weight, y, h * at_label[:, None])
            if grads.bias is not None:
                for begin, end in tiles(V, step):
                    grads.bias[begin:end] += torch.mv(found.exps[begin:end].to(acc), factors)
                add_rows(grads.bias, y, at_label)
        if dh is not None and grads.hidden is not None and not whole:
            grads.hidden[chunk] = dh.to(grads.hidden.dtype)

    return Summed(_added(totals, problem), n_valid, factor, *grads.cast_out())


def _times(factor: Tensor, x: Tensor | float) -> Tensor:
    return factor if isinstance(x, float) and x == 1 else factor * x


class _Found(NamedTuple):
    """Statistics of a chunk's logits, and what its exponentials are relative to.

    Factors of the gradient, ``share`` and ``less_one``, are those of training only.
    """

    nll: Tensor  # (C,)
    share: Tensor | None  # (C,) exp(k - lse): a probability over its exponential
    less_one: Tensor | None  # (C,) p - 1 of the label
    z_label: Tensor  # (C,)
    exps: Tensor  # (V, C) exponentials, 0 at the labels, times the slopes; or scratch
    k: Tensor  # (C,) the exponentials are exp(z - k)
    argmax: Tensor | None  # (C,) int64
    zmean: Tensor | None  # (C,) float64: sum_v c_v z_v / V
    of_tiles: Tensor | None = None  # (C,) float64: the log-sum-exp, of several tiles

    def lse(self) -> Tensor:
        """``(C,)`` float64: the log-sum-exp of all logits."""
        if self.of_tiles is not None:  # (a label far above k has a share of 0)
            return self.of_tiles
        assert self.share is not None
        return self.k - self.share.double().log()


def _walk(
    logits: Logits,
    h: Tensor,  # (C, H), the operand of logits
    y: Tensor,  # (C,)
    step: int,
    *,
    train: bool = False,
    exps: Tensor | None = None,  # (V, C)
    dh: Tensor | None = None,  # (C, H)
    argmax: bool = False,
    zmean: bool = False,
    c: Tensor | None = None,  # (V,) weights of the mean logit
) -> _Found:
    """Walk over a chunk's logits, tile by tile.

    To train, fill ``exps`` with their exponentials, 0 at the labels, times the slopes of the
    logits, and ``dh`` with the product of those and the head. A single tile needs no ``exps``.
    """
    head, V, acc = logits.head, logits.head.weight.shape[0], logits.products.acc
    zsum = torch.zeros(len(y), dtype=torch.float64, device=y.device) if zmean else None

    def tile(begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Logits of a tile, in ``exps`` if that has their dtype; and their slopes."""
        direct = exps is not None and exps.dtype == acc
        z = logits.tile(h, begin, end, out=exps[begin:end] if direct and exps is not None else None)
        if zsum is not None:
            zsum.add_(column_sums(z, None if c is None else c[begin:end]))
        return z, head.slope(z) if train else None

    def store(z: Tensor, slope: Tensor | None, begin: int) -> None:
        """Put a tile's exponentials into ``exps``, and their product with the head into ``dh``."""
        if slope is not None:
            z.mul_(slope)
        if exps is not None and exps.dtype != acc:
            z = exps[begin : begin + len(z)].copy_(z)
        if dh is not None:
            w = logits.rows(begin, begin + len(z), z.dtype)
            logits.products(z.t(), w, dh, add=begin > 0)

    likeliest = of_tiles = share = less_one = None
    if step >= V:
        z, slope = tile(0, V)
        # A single tile's own maxima are the reference, the label among them: where it leaves the
        # others more than 87 nats behind, their exponentials are 0, as is a loss of exp(-87) in
        # float32. A label of +inf makes all NaN.
        k, likeliest = largest(z) if argmax else (z.amax(0), None)
        z_label = take_labels(z, y)
        # At least 1 where the label is not the largest. With label smoothing in float64: what all
        # probabilities of a token err alike would be left over beside `s / V`.
        others = exp_(z.sub_(k)).sum(0, dtype=torch.float64 if zmean else None)
        below = z_label - k
        more = below.expm1().add(others)  # the sum with the label's, less 1: exact where p -> 1
        nll = more.log1p().sub_(below)  # two numbers that are never negative
        if train:
            share = more.add_(1).reciprocal_()
            less_one = others.mul_(share).neg_()
            store(z, slope, 0)
    else:
        for k in references(logits, h, y, step):
            stats, fits = TileStats(y, acc, k, argmax=argmax), True
            if zsum is not None:
                zsum.zero_()
            for begin, end in tiles(V, step):
                z, slope = tile(begin, end)
                fits = stats.add(z, begin)
                if not fits:
                    break
                store(z, slope, begin)
            if fits:
                break
        nll, z_label = stats.losses(), stats.z_label
        if train:
            of_tiles = stats.lse()
            share, less_one = (k - of_tiles).exp_(), (-nll).expm1_()
        likeliest = stats.likeliest()[0] if argmax else None
    of_zmean = None if zsum is None else zsum / V
    made = z if exps is None else exps
    return _Found(nll, share, less_one, z_label, made, k, likeliest, of_zmean, of_tiles)


def _add_labels(
    products: Products,
    exps: Tensor,  # (V, C)
    scaled: Tensor,  # (C, H)
    weight: Tensor,  # (V, H), holds exps @ scaled
    y: Tensor,  # (C,) classes, in range
    rows: Tensor,  # (C, H) in acc
) -> None:
    """``weight[y] += rows``, rounded once.

    A weight gradient of two bytes holds a rounded product, which ``rows`` may cancel almost
    completely. So the product's rows of these classes are computed again, a few at a time.
    """
    if weight.dtype == rows.dtype:
        add_rows(weight, y, rows)
        return
    classes, total = by_class(y, rows)
    step = max(_ROWS // max(scaled.shape), 1)
    for some, part in zip(classes.split(step), total.split(step), strict=True):
        products(exps[some], scaled, part, add=True)
    weight[classes] = total.to(weight.dtype)
