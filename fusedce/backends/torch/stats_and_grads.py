"""The torch backend, token by token: statistics of the logits, and their gradients.

The gradients arrive with upstream factors of each token's own, known only after the log-sum-exp.
So the logits are computed a second time, with the log-sum-exp known, by *tiles of the vocabulary*:
a tile of logits becomes its own gradient in place, and one product of it with the hidden states is
all there is of these rows of the weight gradient, which are rounded once. Parts of ``d_hidden`` are
added up in float32 or better. Inside a tile, work goes by blocks of tokens.

The entropy is ``log S + T / S`` with ``S = sum exp(z - top)`` and ``T = sum exp(z - top) *
(top - z)``: two terms that are never negative. ``S = 1 + R``, where ``R`` leaves the largest logit
out; with ``log1p(R)`` nothing cancels where one class has nearly all the probability.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.gradients import Dtypes, Gradients, call_of, check_budget
from fusedce.backends.plan import tiles_of
from fusedce.backends.torch.logit_tiles import (
    Logits,
    clear_labels,
    label_entry,
    nan_at_inf,
    tiles,
)
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import Rows, blocks_of, valid_rows
from fusedce.contract.objective import Stats, Upstream
from fusedce.contract.problem import Problem, Projection, Wanted

_LOWEST = -1e4  # nats: a probability of 0, in float64 too


def token_stats(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Stats:
    """One pass over the logits; holds one tile of them."""
    N, V = len(problem.labels), problem.weight.shape[0]
    rows, n_valid = valid_rows(problem)
    head = Projection.of(problem)
    logits = Logits(head, Products.of(problem.hidden))
    device = problem.hidden.device

    def out(wanted: bool) -> Tensor:
        return torch.zeros(N if wanted else 0, dtype=head.acc, device=device)

    stats = Stats(out(True), out(wanted.lse), out(wanted.entropy), out(wanted.zmean), n_valid)
    if argmax is not None:
        argmax.fill_(-1)
        stats = stats._replace(top=out(True))
    c = None if problem.class_weight is None else problem.class_weight.to(head.acc)
    moments = wanted.entropy or argmax is not None
    check_budget(problem, call_of(problem, wanted, len(rows)))
    way = tiles_of(call_of(problem, Wanted(), len(rows)), memory_budget=problem.memory_budget)
    for block in blocks_of(rows, way.tokens):
        h = logits.operand(problem.hidden[block])  # (R, H)
        seen = _Seen(problem.labels[block].long(), head.acc, moments=moments)
        zmean = torch.zeros(len(h), dtype=torch.float64, device=device)
        temperature = None if problem.temperature is None else problem.temperature[block]
        for begin, end in tiles(V, way.classes):
            z = logits.tile(h, begin, end)  # (v, R)
            if temperature is not None:
                z.div_(temperature)
            if wanted.zmean:
                zmean += _column_sums(z, None if c is None else c[begin:end])
            seen.add(z, begin)
        nll, lse, entropy, best, top = seen.merged()
        stats.nll[block] = nll.to(head.acc)
        if wanted.lse:
            stats.lse[block] = lse.to(head.acc)
        if wanted.entropy:
            stats.entropy[block] = entropy.to(head.acc)
        if wanted.zmean:
            stats.zmean[block] = (zmean / V).to(head.acc)
        if argmax is not None and stats.top is not None:
            argmax[block], stats.top[block] = best, top.to(head.acc)
    return stats


def token_grads(
    problem: Problem,
    wanted: Wanted,
    lse: Tensor,  # (N,)
    upstream: Upstream,
    dtypes: Dtypes,
) -> tuple[Tensor, Tensor, Tensor]:
    """The wanted gradients, from logits computed anew; holds one tile of them."""
    V, H = problem.weight.shape
    products = Products.of(problem.hidden)
    logits = Logits(Projection.of(problem), products)
    acc, gemm = products.acc, products.gradients
    rows = (problem.valid() & upstream.used).nonzero()[:, 0]
    way = tiles_of(
        call_of(problem, wanted, len(rows), dtypes),
        chunk_tokens=problem.chunk_tokens,
        memory_budget=problem.memory_budget,
    )
    grads = Gradients(problem, wanted, dtypes=dtypes, chunks=len(rows), by_tiles=True)
    blocks = [_Block.of(problem, b, lse, upstream) for b in blocks_of(rows, way.tokens)]
    sums = None  # (T, H), of a tile's rows of the weight gradient
    if grads.weight is not None and grads.weight.dtype != acc and blocks:
        sums = torch.empty(way.classes, H, dtype=acc, device=grads.weight.device)
    for begin, end in tiles(V, way.classes if blocks else V):
        of_tile = None if grads.weight is None else grads.weight[begin:end]
        d_weight = of_tile if sums is None else sums[: end - begin]
        for number, block in enumerate(blocks):
            hidden = problem.hidden[block.rows]  # (R, H)
            h = logits.operand(hidden)
            g = _gradient(problem, logits, block, h, begin, end)  # (v, R)
            if grads.bias is not None:
                grads.bias[begin:end] += g.sum(1)
            g = g.to(gemm)
            if grads.hidden is not None:
                w = logits.rows(begin, end, gemm)
                _add_to_rows(products, grads.hidden, block.rows, g, w)
            if d_weight is not None:
                products(g, hidden.to(gemm), d_weight, add=number > 0)
        if of_tile is not None and d_weight is not None and d_weight is not of_tile:
            of_tile.copy_(d_weight)  # rounded once
    return grads.written()


class _Block(NamedTuple):
    """A block of tokens: where they are, and the factors of their gradient, (R,) each."""

    rows: Rows
    y: Tensor  # labels; those of no row have no entry
    lse: Tensor
    alpha: Tensor  # as in Upstream, in the dtype of logits
    beta: Tensor | None
    gamma: Tensor | None
    at_label: Tensor
    temperature: Tensor | None
    classes: Tensor | None  # (K, R) further classes, -1 for none
    at_classes: Tensor | None  # (K, R) more of their gradient, by their products

    @classmethod
    def of(cls, problem: Problem, rows: Rows, lse: Tensor, upstream: Upstream) -> _Block:
        """``rows`` that repeat the one before them (see `blocks_of`) have factors of 0."""
        head = Projection.of(problem)
        again = None
        if isinstance(rows, Tensor):
            again = torch.zeros_like(rows, dtype=torch.bool)
            again[1:] = rows[1:] == rows[:-1]

        def factor(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            x = x[rows].t().to(head.acc)
            return x if again is None else x.masked_fill_(again, 0)

        temperature = problem.temperature
        classes = upstream.classes
        return cls(
            rows,
            problem.labels[rows].long(),
            lse[rows].to(head.acc),
            factor(upstream.alpha),  # type: ignore[arg-type]
            factor(upstream.beta),
            factor(upstream.gamma),
            factor(upstream.at_label),  # type: ignore[arg-type]
            None if temperature is None else temperature[rows],
            None if classes is None else classes[rows].t(),
            factor(upstream.at_classes),
        )


def _gradient(
    problem: Problem, logits: Logits, block: _Block, h: Tensor, begin: int, end: int
) -> Tensor:
    """``(v, R)``: derivative by the products of hidden states and classes ``begin`` to ``end``."""
    head = logits.head
    z = logits.tile(h, begin, end)
    slope = head.slope(z)
    if block.temperature is not None:
        z.div_(block.temperature)
    log_p = z.sub_(block.lse)
    if block.beta is None:
        g = log_p.exp_().mul_(block.alpha)
    else:  # (p is 0 where log p is so low, and 0 times any number is 0)
        g = log_p.exp()
        g.mul_(log_p.clamp_(min=_LOWEST).mul_(-block.beta).add_(block.alpha))
    if block.gamma is not None:
        if problem.class_weight is None:
            g.add_(block.gamma)
        else:
            g.addr_(problem.class_weight[begin:end].to(g.dtype), block.gamma)
    at, inside = label_entry(block.y, begin, len(g))
    g.scatter_(0, at, torch.where(inside, block.at_label, g.gather(0, at)[0])[None])
    if slope is not None:
        g.mul_(slope)
    if head.scale != 1.0:
        g.mul_(head.scale)
    _add_classes(block, g, begin)
    return g


def _add_classes(block: _Block, g: Tensor, begin: int) -> None:
    """Add the entries of further classes to a tile."""
    if block.classes is None or block.at_classes is None:
        return
    at, inside = label_entry(block.classes, begin, len(g))
    entries = block.at_classes.masked_fill(~inside, 0)
    # A class may stand twice in a token's labels. Elsewhere than on a CPU one operation would add
    # the two in any order.
    step = len(at) if g.device.type == "cpu" else 1
    for some, x in zip(at.split(step), entries.split(step), strict=True):
        g.scatter_add_(0, some, x)


def _add_to_rows(products: Products, total: Tensor, rows: Rows, tile: Tensor, w: Tensor) -> None:
    """``total[rows] += tile.T @ w``."""
    if isinstance(rows, Tensor):
        added = torch.empty(len(rows), w.shape[1], dtype=total.dtype, device=total.device)
        total.index_add_(0, rows, products(tile.t(), w, added))
    else:
        products(tile.t(), w, total[rows], add=True)


class _Seen:
    """Sums over the logits without the label's, one set for each tile.

    ``k`` is the tile's maximum. With ``moments``, ``others`` is the sum of ``exp(z - k)`` without
    the maximum's own 1 and ``moment`` that of ``exp(z - k) * (k - z)``: ``R`` and ``T`` of the
    module's first lines. Otherwise ``others`` holds the maximum's 1 too, and ``moment`` is unused.
    """

    def __init__(self, y: Tensor, acc: torch.dtype, *, moments: bool) -> None:
        self.y, self.moments = y, moments
        # NaN stays where no tile holds the label.
        self.z_label = torch.full((len(y),), math.nan, dtype=acc, device=y.device)
        self.seen: list[tuple[Tensor, ...]] = []  # (k, best, others, moment), (C,) each

    def add(self, z: Tensor, begin: int) -> None:
        """Take in a tile ``z (v, C)``, which is overwritten."""
        lowest = torch.finfo(z.dtype).min
        at, inside = label_entry(self.y, begin, len(z))
        self.z_label = torch.where(inside, z.gather(0, at)[0], self.z_label)
        clear_labels(z, at, inside, -math.inf)
        if not self.moments:
            k = z.amax(0).clamp_(min=lowest)
            others = z.sub_(k).exp_().sum(0)  # with the maximum's own 1
            self.seen.append((k, others, others, others))
            return
        k, best = z.max(0)  # costs as much as three exponentials on a CPU
        k.clamp_(min=lowest)
        # Differences of -inf, the label's among them, have an exponential of 0; 0 * inf is NaN.
        moment = z.sub_(k).clamp_(min=lowest)
        e = moment.exp()
        e.scatter_(0, best[None], 0)
        others = e.sum(0)
        moment = e.mul_(moment).sum(0).neg_()
        self.seen.append((k, best + begin, others, moment))

    def merged(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """``nll, lse, entropy, argmax, top`` of all logits, (C,) float64 but argmax int64.

        Without ``moments``, entropy and argmax hold no meaning, and the loss takes the shorter
        formula ``log(1 + exp(log_others - z))``. It equals the one below, which gets it from the
        sums that the entropy needs.
        """
        k, best, others, moment = (torch.stack(x) for x in zip(*self.seen, strict=True))
        k, others, moment = k.double(), others.double(), moment.double()  # (tiles, C)
        top, winner = k.max(0, keepdim=True)
        w = (k - top).exp_()
        z = self.z_label.double()
        best = best.gather(0, winner)[0]
        if not self.moments:
            log_others = top[0] + (others * w).sum(0).log()
            gap = log_others - z
            nll = torch.logaddexp(gap, torch.zeros_like(gap)) + nan_at_inf(z)
            return nll, torch.logaddexp(log_others, z), gap, best, top[0]
        # Merge the tiles: sums relative to k become sums relative to top. The maximum of the
        # winning tile is left out of `others`; those of the other tiles belong to it.
        moment = ((moment + (1 + others) * (top - k)) * w).sum(0)
        others = (others * w + w.scatter(0, winner, 0)).sum(0)
        # Merge the label in the same way, as a tile of one logit: its k is z, its sums are 0. The
        # lower of z and top adds q to `others` and q * |z - top| to `moment`.
        gap = z - top[0]
        q = gap.abs().neg_().exp_()
        drop = torch.where(q == 0, 0.0, gap.abs() * q)  # 0 and not NaN for a logit of -inf
        label_wins = gap > 0
        moment = torch.where(label_wins, moment * q + (1 + others) * drop, moment + drop)
        others = torch.where(label_wins, (1 + others) * q, others + q)
        log_sum = torch.log1p(others)
        nll = gap.neg().clamp_(min=0) + log_sum + nan_at_inf(z)
        highest = torch.maximum(top[0], z)
        entropy = log_sum + moment / (1 + others)
        return nll, highest + log_sum, entropy, torch.where(label_wins, self.y, best), highest


def _column_sums(z: Tensor, c: Tensor | None) -> Tensor:
    """``sum_v c_v z_v (C,)`` float64 of a tile ``z (v, C)``; a class of weight 0 adds 0."""
    if c is None:
        return z.sum(0).double()
    return torch.mv(z.masked_fill((c == 0)[:, None], 0).t(), c).double()
