"""The torch backend: the sum of the losses, and its gradients.

Work goes by *chunks* of valid tokens and, inside a chunk, by *tiles* of the vocabulary. A tile of
logits is stored vocabulary-major, ``(v, C)``: both GEMMs that follow then read it along its fast
dimension, and the first writes it faster too (6 to 12% less time for the three on a CPU).

One exponential per logit. A tile keeps ``e = exp(z - k)`` with its own maximum ``k (C,)``; once
the log-sum-exp is known, ``p = e * exp(k - lse)`` differs from ``e`` by one factor per token and
tile, which is applied to the small ``(C, H)`` operand of each GEMM instead of to the big tile.

The label's own entry leaves the tile (``e = 0``), and the sums with it. With ``L`` the log-sum-exp
of the *other* logits, the loss is ``log(1 + exp(L - z_label))`` and the label's gradient, added as
a rank-one term, ``p - 1 = expm1(-loss)``: nothing cancels at p -> 1, where ``1 + (1 - p)`` in
float32 would have rounded most of the loss away. Where exponentials are rounded to bfloat16, the
largest of the others leaves its tile, too, if its probability is `APART` or more: alone in its
size, it has no neighbours to average its rounding with.

Label smoothing takes ``s / V`` from every probability. Where those are nearly even little is left,
and of probabilities rounded to bfloat16 nothing but their errors. So the exponentials of a chunk
then wait in float32, and what is rounded is the difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends import two_passes
from fusedce.backends.gradients import Gradients, call_of, waiting
from fusedce.backends.mean_logit import MeanLogit
from fusedce.backends.plan import TILES, tiles_of, way_of
from fusedce.backends.protocol import Summed
from fusedce.backends.torch.per_token import token_grads, token_stats
from fusedce.backends.torch.products import add_product, gemm_dtype
from fusedce.backends.torch.rows import chunks_of, valid_rows
from fusedce.backends.torch.tiles import TileStats, clear_labels, label_entry, tiles
from fusedce.contract.objective import Slopes, expected_upstream, slopes, token_losses
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.projection import Projection

APART = 0.125  # a probability


def loss(problem: Problem) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64; holds one tile of logits."""
    rows, n_valid = valid_rows(problem)
    head = Projection.of(problem)
    total = torch.zeros((), dtype=torch.float64, device=problem.hidden.device)
    V = len(problem.weight)
    way = tiles_of(call_of(problem, Wanted(), len(rows)), memory_budget=problem.memory_budget)
    for chunk in chunks_of(rows, way.tokens):
        h = problem.hidden[chunk].to(head.acc)  # (C, H)
        stats = TileStats(problem.labels[chunk].long(), head.acc)
        for begin, end in tiles(V, way.classes):
            stats.add(head.logits(h, begin, end), begin)
        total += stats.losses().sum()
    return total.to(head.acc), n_valid


def loss_and_grads(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Summed:
    """The sum and its wanted gradients; holds the exponentials of one chunk."""
    V, H = problem.weight.shape
    device = problem.hidden.device
    rows, n_valid = valid_rows(problem)
    head = Projection.of(problem)
    acc = head.acc
    gemm = gemm_dtype(problem.hidden)
    stored = acc if problem.label_smoothing else gemm
    call = call_of(problem, wanted, len(rows), waiting(problem), logit=stored.itemsize)
    way = way_of(call, chunk_tokens=problem.chunk_tokens, memory_budget=problem.memory_budget)
    if way.name == TILES:
        return two_passes.loss_and_grads(token_stats, token_grads, problem, wanted, argmax)
    step = way.classes
    chunks = chunks_of(rows, way.tokens)
    grads = Gradients(problem, wanted, dtypes=waiting(problem), chunks=len(chunks))
    factor = expected_upstream(problem, n_valid)
    total = torch.zeros((), dtype=torch.float64, device=device)
    mean = MeanLogit(problem) if problem.label_smoothing else None
    buffer = torch.empty(V * min(way.tokens, len(rows)), dtype=stored, device=device)
    if argmax is not None:
        argmax.fill_(-1)

    for number, chunk in enumerate(chunks):
        h = problem.hidden[chunk].to(acc)  # (C, H)
        C = len(chunk)
        exps = buffer[: V * C].view(V, C)
        labels = problem.labels[chunk].long()
        stats = _exponentials(head, h, labels, exps, step, argmax is not None)
        nll, lse = stats.losses(), stats.lse()
        if argmax is not None:
            argmax[chunk] = stats.argmax()

        y = stats.y.clamp(0, V - 1)  # a bad label (NaN by now) must not index out of bounds
        of_chunk = problem.rows(chunk)
        total += token_losses(of_chunk, y, nll, lse, None if mean is None else mean.of(h)).sum()
        by = slopes(of_chunk, y, lse)
        outer = problem.logit_scale * factor
        at_label = outer * _label_gradient(problem, by, y, nll, head.slope(stats.z_label.double()))
        at_label = at_label.to(acc)  # (C,)
        of_p = outer * (by.nll + by.lse)  # () or (C,)
        factors = (stats.factors(lse) * of_p).to(acc)  # (tiles, C)
        tokens, classes, p = _largest(head, stats, lse, exps, step)
        apart = (p * of_p.expand(C)[tokens]).to(acc)
        shift = None if mean is None else outer * by.zmean / V  # () or (C,)

        dh = None if grads.hidden is None else torch.zeros(C, H, dtype=acc, device=device)
        for (begin, end), of_tile in zip(tiles(V, step), factors, strict=True):
            tile, row_factors = exps[begin:end], of_tile[:, None]  # (v, C), (C, 1)
            if shift is not None:
                tile = _smoothed(problem, tile, of_tile, shift, stats.y, begin).to(gemm)
                row_factors = torch.ones_like(row_factors)
            if dh is not None:
                w = problem.weight[begin:end].to(gemm)
                dh.addcmul_(torch.mm(tile.t(), w).to(acc), row_factors)
            if grads.weight is not None:
                scaled = (h * row_factors).to(gemm)
                add_product(grads.weight[begin:end], tile, scaled, first=number == 0)
            if grads.bias is not None:
                grads.bias[begin:end] += torch.mv(tile.to(acc), row_factors[:, 0])

        if grads.hidden is not None and dh is not None:
            dh.addcmul_(problem.weight[y].to(acc), at_label[:, None])
            dh[tokens] += problem.weight[classes].to(acc) * apart[:, None]
            grads.hidden[chunk] = dh.to(grads.hidden.dtype)
        if len(tokens):  # one sum with the labels', so that it is rounded once
            y, h, at_label = (
                torch.cat(x) for x in ((y, classes), (h, h[tokens]), (at_label, apart))
            )
        grads.add_rows(y, h, at_label)

    return Summed(total.to(acc), n_valid, factor, *grads.written())


def _exponentials(
    head: Projection,
    h: Tensor,  # (C, H)
    y: Tensor,  # (C,)
    exps: Tensor,  # (V, C) to fill with exponentials times the slope of their logits
    step: int,  # classes of a tile
    argmax: bool,
) -> TileStats:
    stats = TileStats(y, head.acc, argmax=argmax)
    for begin, end in tiles(len(exps), step):
        in_place = exps[begin:end] if exps.dtype == head.acc else None
        z = head.logits(h, begin, end, out=in_place)
        slope = head.slope(z)
        stats.add(z, begin)  # z becomes exp(z - k)
        if slope is not None:
            z.mul_(slope)
        if in_place is None:
            exps[begin:end] = z
    return stats


def _largest(
    head: Projection,
    stats: TileStats,
    lse: Tensor,  # (C,) float64
    exps: Tensor,  # (V, C), in which they become 0
    step: int,  # classes of a tile
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, classes, and probability times slope in float64, of entries that go apart.

    There are none where nothing is rounded. An entry is looked for by what was stored of it: of two
    that are alike, either will do.
    """
    top, tile = torch.stack(stats.maxima).max(0)
    p = (top.double() - lse).exp_()
    slope = head.slope(top)
    slope = torch.ones_like(top) if slope is None else slope
    stored = slope.to(exps.dtype)
    largest = (p >= APART) & (exps.dtype != head.acc)
    tokens = largest.nonzero()[:, 0]
    found = [(tokens[:0], tokens[:0])]
    for number, (begin, end) in enumerate(tiles(len(exps), step)):
        here = tokens[tile[tokens] == number]
        if len(here):
            alike = exps[begin:end].index_select(1, here) == stored[here]
            known = alike.any(0)
            found.append((here[known], begin + alike.int().argmax(0)[known]))
    tokens, classes = (torch.cat(x) for x in zip(*found, strict=True))
    exps[classes, tokens] = 0
    return tokens, classes, p[tokens] * slope[tokens]


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
    shift: Tensor | float,  # () or (C,)
    y: Tensor,  # (C,)
    begin: int,
) -> Tensor:
    """``exps * factors + class_weight * shift``, and 0 at the labels."""
    g = exps.mul_(factors)
    shift = torch.as_tensor(shift, dtype=g.dtype, device=g.device).expand(g.shape[1])
    if problem.class_weight is None:
        g.add_(shift)
    else:
        g.addr_(problem.class_weight[begin : begin + len(g)].to(g.dtype), shift)
    clear_labels(g, *label_entry(y, begin, len(g)))
    return g
