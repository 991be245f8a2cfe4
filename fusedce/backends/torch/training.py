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
float32 would have rounded most of the loss away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients, Summed, add_rows, by_class, call_of, waiting
from fusedce.backends.plan import TILES, tile_classes, tiles_of, way_of
from fusedce.backends.torch.logit_tiles import Logits, TileStats, chunks_of, references, tiles
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.stats_and_grads import token_grads, token_stats
from fusedce.backends.upstream import loss_in_two_passes
from fusedce.contract.labels import used_tokens
from fusedce.contract.objective import expected_upstream, slopes, token_losses
from fusedce.contract.problem import Problem, Projection, Task, Wanted

_ROWS = 2**18  # elements of the labels' rows that are computed again at a time
_WIDENED = 2**22  # elements of the head's rows whose copy in float32 lies beside a tile


def loss(problem: Problem) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64; holds one tile of logits."""
    used, n_valid = used_tokens(problem)
    rows = used.nonzero()[:, 0]
    logits = Logits(Projection.of(problem))
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
        total += _statistics(logits, h, y, step).losses().sum()
    return total.to(logits.head.acc), n_valid


def loss_and_grads(task: Task, argmax: Tensor | None = None) -> Summed:
    """The sum and its wanted gradients; holds the exponentials of one chunk."""
    problem, wanted, *_ = task
    V, H = problem.weight.shape
    device = problem.hidden.device
    used, n_valid = used_tokens(problem)
    rows = used.nonzero()[:, 0]
    logits = Logits(Projection.of(problem))
    head, products = logits.head, logits.products
    acc, stored = products.acc, products.gradients
    call = call_of(problem, wanted, len(rows), waiting(problem), logit=stored.itemsize)
    way = way_of(call, chunk_tokens=problem.chunk_tokens, memory_budget=problem.memory_budget)
    if way.name == TILES:
        return loss_in_two_passes(token_stats, token_grads, problem, wanted, argmax)
    step = logits.step(way)
    chunks = chunks_of(rows, way.tokens)
    grads = Gradients(problem, wanted, dtypes=waiting(problem), chunks=len(chunks))
    factor = expected_upstream(problem, n_valid)
    total = torch.zeros((), dtype=torch.float64, device=device)
    buffer = torch.empty(V * min(way.tokens, len(rows)), dtype=stored, device=device)
    if argmax is not None:
        argmax.fill_(-1)

    for number, chunk in enumerate(chunks):
        h = problem.hidden[chunk].to(acc)  # (C, H)
        C = len(chunk)
        y = problem.labels[chunk].long()
        dh = None if grads.hidden is None else torch.empty(C, H, dtype=acc, device=device)
        exps = buffer[: V * C].view(V, C)
        operand, likeliest = logits.operand(h), argmax is not None
        stats = _statistics(logits, operand, y, step, exps=exps, dh=dh, argmax=likeliest)
        nll, lse = stats.losses(), stats.lse()
        if argmax is not None:
            argmax[chunk] = stats.likeliest()[0]

        y = y.clamp(0, V - 1)  # a bad label (NaN by now) must not index out of bounds
        of_chunk = problem.rows(chunk)
        total += token_losses(of_chunk, y, nll, lse).sum()
        by = slopes(of_chunk, y, lse)
        outer = problem.logit_scale * factor
        # Gradient of the label's raw product: `p - 1` where the other classes have `p`.
        at_label = outer * (by.nll * torch.expm1(-nll) + by.lse * torch.exp(-nll))
        slope = head.slope(stats.z_label.double())
        at_label = (at_label if slope is None else at_label * slope).to(acc)  # (C,)
        assert stats.k is not None
        factors = (outer * (by.nll + by.lse) * (stats.k.double() - lse).exp_()).to(acc)  # (C,)
        if grads.hidden is not None and dh is not None:
            dh.mul_(factors[:, None])
            dh.addcmul_(problem.weight[y].to(acc), at_label[:, None])
            grads.hidden[chunk] = dh.to(grads.hidden.dtype)
        if grads.weight is not None:
            scaled = (h * factors[:, None]).to(stored)
            products(exps, scaled, grads.weight, add=number > 0)
            _add_labels(products, exps, scaled, grads.weight, y, h * at_label[:, None])
        if grads.bias is not None:
            for begin, end in tiles(V, step):
                grads.bias[begin:end] += torch.mv(exps[begin:end].to(acc), factors)
            add_rows(grads.bias, y, at_label)

    return Summed(total.to(acc), n_valid, factor, *grads.written())


def _statistics(
    logits: Logits,
    h: Tensor,  # (C, H), the operand of logits
    y: Tensor,  # (C,)
    step: int,
    *,
    exps: Tensor | None = None,  # (V, C)
    dh: Tensor | None = None,  # (C, H)
    argmax: bool = False,
) -> TileStats:
    """Walk over a chunk's logits, tile by tile.

    Where ``exps`` is given, fill it with their exponentials, times the slopes of the logits; and
    ``dh`` with the product of those and the head.
    """
    products = logits.products

    def fits(stats: TileStats, begin: int, end: int) -> bool:
        if exps is None:
            return stats.add(logits.tile(h, begin, end), begin)
        tile = exps[begin:end]
        in_place = tile if tile.dtype == products.acc else None
        z = logits.tile(h, begin, end, out=in_place)
        slope = logits.head.slope(z)
        fits = stats.add(z, begin)
        if slope is not None:
            z.mul_(slope)
        if in_place is None:
            tile.copy_(z)
        if dh is not None:
            products(tile.t(), logits.rows(begin, end, tile.dtype), dh, add=begin > 0)
        return fits

    for k in references(logits, h, y, step):
        stats = TileStats(y, products.acc, k, argmax=argmax)
        if all(fits(stats, begin, end) for begin, end in tiles(len(logits.head.weight), step)):
            break
    return stats


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
