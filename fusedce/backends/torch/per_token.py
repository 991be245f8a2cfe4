"""The torch backend, token by token: statistics of the logits, and their gradients.

The gradients arrive with an upstream factor per token, known only in backward. There the logits
are computed a second time, tile by tile, with the log-sum-exp known from the forward pass.

The entropy is ``log S + T / S`` with ``S = sum exp(z - top)`` and ``T = sum exp(z - top) *
(top - z)``: two terms that are never negative. ``S = 1 + R``, where ``R`` leaves the largest logit
out; with ``log1p(R)`` nothing cancels where one class has nearly all the probability.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedce.backends.gradients import Dtypes, Gradients
from fusedce.backends.torch.products import add_product, gemm_dtype
from fusedce.backends.torch.rows import chunks_of, valid_rows
from fusedce.backends.torch.tiles import clear_labels, label_entry, nan_at_inf, tiles
from fusedce.contract.objective import Stats, Upstream
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.projection import Projection

_CHUNK = 1024  # tokens at a time


def token_stats(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Stats:
    """One pass over the logits; holds one tile of them."""
    N, V = len(problem.labels), problem.weight.shape[0]
    rows, n_valid = valid_rows(problem)
    head = Projection.of(problem)
    device = problem.hidden.device

    def out(wanted: bool) -> Tensor:
        return torch.zeros(N if wanted else 0, dtype=head.acc, device=device)

    stats = Stats(out(True), out(wanted.lse), out(wanted.entropy), out(wanted.zmean), n_valid)
    if argmax is not None:
        argmax.fill_(-1)
        stats = stats._replace(top=out(True))
    c = None if problem.class_weight is None else problem.class_weight.to(head.acc)
    moments = wanted.entropy or argmax is not None
    for chunk in chunks_of(rows, _CHUNK):
        h = problem.hidden[chunk].to(head.acc)  # (C, H)
        seen = _Seen(problem.labels[chunk].long(), head.acc, moments=moments)
        zmean = torch.zeros(len(chunk), dtype=torch.float64, device=device)
        temperature = None if problem.temperature is None else problem.temperature[chunk]
        for begin, end in tiles(head.weight, len(chunk)):
            z = head.logits(h, begin, end)  # (v, C)
            if temperature is not None:
                z.div_(temperature)
            if wanted.zmean:
                zmean += _column_sums(z, None if c is None else c[begin:end])
            seen.add(z, begin)
        nll, lse, entropy, best, top = seen.merged()
        stats.nll[chunk] = nll.to(head.acc)
        if wanted.lse:
            stats.lse[chunk] = lse.to(head.acc)
        if wanted.entropy:
            stats.entropy[chunk] = entropy.to(head.acc)
        if wanted.zmean:
            stats.zmean[chunk] = (zmean / V).to(head.acc)
        if argmax is not None and stats.top is not None:
            argmax[chunk], stats.top[chunk] = best, top.to(head.acc)
    return stats


def token_grads(
    problem: Problem,
    wanted: Wanted,
    lse: Tensor,  # (N,)
    upstream: Upstream,
    dtypes: Dtypes,
) -> tuple[Tensor, Tensor, Tensor]:
    """The wanted gradients, from logits computed anew."""
    V, H = problem.weight.shape
    device = problem.hidden.device
    head = Projection.of(problem)
    acc, scale = head.acc, problem.logit_scale
    gemm = gemm_dtype(problem.hidden)
    rows = (problem.valid() & upstream.used).nonzero()[:, 0]
    # No chunk of logits is held, only one tile; what grows with a chunk is (C, H).
    chunks = chunks_of(rows, problem.chunk_tokens or (1 if device.type == "cpu" else 8) * _CHUNK)
    grads = Gradients(problem, wanted, dtypes=dtypes, chunks=len(chunks), accumulate=True)
    c = None if problem.class_weight is None else problem.class_weight.to(acc)[:, None]

    for number, chunk in enumerate(chunks):
        h = problem.hidden[chunk].to(acc)  # (C, H)
        h_gemm = h.to(gemm)
        y = problem.labels[chunk].long()
        alpha, at_label = upstream.alpha[chunk].to(acc), upstream.at_label[chunk].to(acc)
        beta = None if upstream.beta is None else upstream.beta[chunk].to(acc)
        gamma = None if upstream.gamma is None else upstream.gamma[chunk].to(acc)
        lse_chunk = lse[chunk].to(acc)
        temperature = None if problem.temperature is None else problem.temperature[chunk]
        label_slope = torch.full_like(lse_chunk, scale)
        dh = None if grads.hidden is None else torch.zeros(len(chunk), H, dtype=acc, device=device)
        for begin, end in tiles(head.weight, len(chunk)):
            z = head.logits(h, begin, end)  # (v, C)
            slope = head.slope(z)
            if temperature is not None:
                z.div_(temperature)
            log_p = z.sub_(lse_chunk)
            g = log_p.exp()
            if beta is not None:  # (p is 0 where log p is -inf)
                g.mul_(log_p.clamp_(min=torch.finfo(acc).min).mul_(-beta).add_(alpha))
            else:
                g.mul_(alpha)
            if gamma is not None:
                g.add_(gamma if c is None else gamma * c[begin:end])
            # The label's entry is not rounded to bf16 with the others: it is added below.
            at, inside = label_entry(y, begin, len(g))
            if slope is not None:
                g.mul_(slope)
                label_slope = torch.where(inside, slope.gather(0, at)[0] * scale, label_slope)
            clear_labels(g, at, inside)
            tile = g.mul_(scale).to(gemm)
            if dh is not None:
                dh.add_(torch.mm(tile.t(), problem.weight[begin:end].to(gemm)))
            if grads.weight is not None:
                add_product(grads.weight[begin:end], tile, h_gemm, first=number == 0)
            if grads.bias is not None:
                grads.bias[begin:end] += g.sum(1)
        y = y.clamp(0, V - 1)
        coefficient = at_label * label_slope  # (C,)
        if grads.hidden is not None and dh is not None:
            dh.addcmul_(problem.weight[y].to(acc), coefficient[:, None])
            grads.hidden[chunk] = dh.to(dtypes.hidden)
        grads.add_rows(y, h, coefficient)
    return grads.written()


class _Seen:
    """Of the logits but the label's, tile by tile: maximum ``k``, ``R`` and ``T`` moment it."""

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
        """``nll, lse, entropy, argmax, top``, (C,) float64 but argmax, the label taken in."""
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
        moment = ((moment + (1 + others) * (top - k)) * w).sum(0)
        others = (others * w + w.scatter(0, winner, 0)).sum(0)
        # The label is one more tile: its maximum is its own logit, and its moment 0.
        gap = z - top[0]
        q = gap.abs().neg_().exp_()
        drop = torch.where(q == 0, 0.0, gap.abs() * q)
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
