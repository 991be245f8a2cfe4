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

from fusedce.backends.torch import training as chunked
from fusedce.backends.torch.tiles import Head, nan_at_inf
from fusedce.contract.objective import Stats, Upstream

_CHUNK = 1024  # tokens at a time


def token_stats(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    class_weight: Tensor | None,  # (V,) of zmean
    token_weight: Tensor | None,  # (N,): tokens of weight 0 are left out
    want_entropy: bool,
    want_argmax: bool,
    want_zmean: bool,
) -> Stats:
    """One pass over the logits; holds one tile of them."""
    N, V = len(labels), weight.shape[0]
    rows, n_valid = chunked.valid_rows(labels, V, ignore_index, token_weight)
    head = Head(weight, bias, softcap, logit_scale)

    def out(wanted: bool, dtype: torch.dtype = head.acc, fill: int = 0) -> Tensor:
        return torch.full((N if wanted else 0,), fill, dtype=dtype, device=hidden.device)

    stats = Stats(
        out(True), out(True), out(want_entropy), out(want_zmean),
        out(want_argmax, torch.int64, -1), n_valid,
    )  # fmt: skip
    c = None if class_weight is None else class_weight.to(head.acc)
    for chunk in chunked.parts(rows, _CHUNK):
        h = hidden[chunk].to(head.acc)  # (C, H)
        seen = _Seen(labels[chunk].long(), head.acc, moments=want_entropy or want_argmax)
        zmean = torch.zeros(len(chunk), dtype=torch.float64, device=hidden.device)
        for begin, end in head.tiles(len(chunk)):
            z = head.logits(h, begin, end)  # (v, C)
            if want_zmean:
                zmean += _column_sums(z, None if c is None else c[begin:end])
            seen.add(z, begin)
        nll, lse, entropy, best = seen.merged()
        stats.nll[chunk], stats.lse[chunk] = nll.to(head.acc), lse.to(head.acc)
        if want_entropy:
            stats.entropy[chunk] = entropy.to(head.acc)
        if want_zmean:
            stats.zmean[chunk] = (zmean / V).to(head.acc)
        if want_argmax:
            stats.argmax[chunk] = best
    return stats


def token_grads(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    class_weight: Tensor | None,  # (V,)
    chunk_tokens: int | None,
    lse: Tensor,  # (N,)
    upstream: Upstream,
    d_hidden: Tensor | None,  # (N, H) to fill
    d_weight: Tensor | None,  # (V, H) to fill
    d_bias: Tensor | None,  # (V,) to fill
) -> None:
    """Fill the gradients, from logits computed anew."""
    V, H = weight.shape
    device = hidden.device
    head = Head(weight, bias, softcap, logit_scale)
    acc = head.acc
    fast = hidden.dtype == torch.bfloat16 and chunked._fast_bf16(device)
    gemm = torch.bfloat16 if fast else acc
    used = (labels != ignore_index) & upstream.used
    rows = used.nonzero()[:, 0]
    d_weight_sum = d_weight
    if d_weight is not None and d_weight.dtype != acc:
        d_weight_sum = torch.empty(V, H, dtype=acc, device=device)
    d_bias_sum = None if d_bias is None else torch.zeros(V, dtype=acc, device=device)
    for grad in (d_hidden, d_weight_sum):
        if grad is not None:
            grad.zero_()
    c = None if class_weight is None else class_weight.to(acc)[:, None]

    # No chunk of logits is held, only one tile; what grows with a chunk is (C, H).
    size = chunk_tokens or (_CHUNK if device.type == "cpu" else 8 * _CHUNK)
    for chunk in chunked.parts(rows, size):
        h = hidden[chunk].to(acc)  # (C, H)
        h_gemm = h.to(gemm)
        y = labels[chunk].long()
        alpha, at_label = upstream.alpha[chunk].to(acc), upstream.at_label[chunk].to(acc)
        beta = None if upstream.beta is None else upstream.beta[chunk].to(acc)
        gamma = None if upstream.gamma is None else upstream.gamma[chunk].to(acc)
        lse_chunk = lse[chunk].to(acc)
        label_slope = torch.full_like(lse_chunk, logit_scale)
        dh = None if d_hidden is None else torch.zeros(len(chunk), H, dtype=acc, device=device)
        for begin, end in head.tiles(len(chunk)):
            z = head.logits(h, begin, end)  # (v, C)
            slope = None if softcap is None else 1 - (z / softcap).square_()
            log_p = z.sub_(lse_chunk)
            g = log_p.exp()
            if beta is not None:  # (p is 0 where log p is -inf)
                g.mul_(log_p.clamp_(min=torch.finfo(acc).min).mul_(-beta).add_(alpha))
            else:
                g.mul_(alpha)
            if gamma is not None:
                g.add_(gamma if c is None else gamma * c[begin:end])
            if slope is not None:
                g.mul_(slope)
            # The label's entry is not rounded to bf16 with the others: it is added below.
            local = y - begin
            inside = (local >= 0) & (local < len(g))
            local = local.clamp(0, len(g) - 1)[None]
            if slope is not None:
                at = slope.gather(0, local)[0] * logit_scale
                label_slope = torch.where(inside, at, label_slope)
            g.scatter_(0, local, g.gather(0, local).masked_fill_(inside, 0))
            tile = g.mul_(logit_scale).to(gemm)
            if dh is not None:
                dh.add_(torch.mm(tile.t(), weight[begin:end].to(gemm)))
            if d_weight_sum is not None:
                chunked.accumulate(d_weight_sum[begin:end], tile, h_gemm, first=False)
            if d_bias_sum is not None:
                d_bias_sum[begin:end] += g.sum(1)
        y = y.clamp(0, V - 1)
        coefficient = at_label * label_slope  # (C,)
        if dh is not None and d_hidden is not None:
            dh.addcmul_(weight[y].to(acc), coefficient[:, None])
            d_hidden[chunk] = dh.to(d_hidden.dtype)
        if d_weight_sum is not None:
            chunked.add_rows(d_weight_sum, y, h * coefficient[:, None])
        if d_bias_sum is not None:
            chunked.add_rows(d_bias_sum, y, coefficient)
    if d_weight is not None and d_weight_sum is not None and d_weight_sum is not d_weight:
        d_weight.copy_(d_weight_sum)
    if d_bias is not None and d_bias_sum is not None:
        d_bias.copy_(d_bias_sum)


class _Seen:
    """Of the logits but the label's, tile by tile: maximum ``k``, ``R`` and ``T`` below it."""

    def __init__(self, y: Tensor, acc: torch.dtype, *, moments: bool) -> None:
        self.y, self.moments = y, moments
        # NaN stays where no tile holds the label.
        self.z_label = torch.full((len(y),), math.nan, dtype=acc, device=y.device)
        self.parts: list[tuple[Tensor, ...]] = []  # (k, place, rest, below), (C,) each

    def add(self, z: Tensor, begin: int) -> None:
        """Take in a tile ``z (v, C)``, which is overwritten."""
        lowest = torch.finfo(z.dtype).min
        local = self.y - begin
        inside = (local >= 0) & (local < len(z))
        local = local.clamp(0, len(z) - 1)[None]
        at_label = z.gather(0, local)
        self.z_label = torch.where(inside, at_label[0], self.z_label)
        z.scatter_(0, local, at_label.masked_fill_(inside, -math.inf))
        if not self.moments:
            k = z.amax(0).clamp_(min=lowest)
            rest = z.sub_(k).exp_().sum(0)  # with the maximum's own 1
            self.parts.append((k, rest, rest, rest))
            return
        k, place = z.max(0)  # costs as much as three exponentials on a CPU
        k.clamp_(min=lowest)
        # Differences of -inf, the label's among them, have an exponential of 0; 0 * inf is NaN.
        below = z.sub_(k).clamp_(min=lowest)
        e = below.exp()
        e.scatter_(0, place[None], 0)
        rest = e.sum(0)
        below = e.mul_(below).sum(0).neg_()
        self.parts.append((k, place + begin, rest, below))

    def merged(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``nll, lse, entropy`` in float64 and ``argmax``, (C,) each, the label taken in."""
        k, place, rest, below = (torch.stack(x) for x in zip(*self.parts, strict=True))
        k, rest, below = k.double(), rest.double(), below.double()  # (tiles, C)
        top, best = k.max(0, keepdim=True)
        w = (k - top).exp_()
        z = self.z_label.double()
        place = place.gather(0, best)[0]
        if not self.moments:
            others = top[0] + (rest * w).sum(0).log()
            gap = others - z
            nll = torch.logaddexp(gap, torch.zeros_like(gap)) + nan_at_inf(z)
            return nll, torch.logaddexp(others, z), gap, place
        below = ((below + (1 + rest) * (top - k)) * w).sum(0)
        rest = (rest * w + w.scatter(0, best, 0)).sum(0)
        # The label is one more part: its maximum is its own logit, and nothing is below.
        gap = z - top[0]
        q = gap.abs().neg_().exp_()
        drop = torch.where(q == 0, 0.0, gap.abs() * q)
        label_wins = gap > 0
        below = torch.where(label_wins, below * q + (1 + rest) * drop, below + drop)
        rest = torch.where(label_wins, (1 + rest) * q, rest + q)
        log_sum = torch.log1p(rest)
        nll = gap.neg().clamp_(min=0) + log_sum + nan_at_inf(z)
        lse = torch.maximum(top[0], z) + log_sum
        entropy = log_sum + below / (1 + rest)
        return nll, lse, entropy, torch.where(label_wins, self.y, place)


def _column_sums(z: Tensor, c: Tensor | None) -> Tensor:
    """``sum_v c_v z_v (C,)`` float64 of a tile ``z (v, C)``; a class of weight 0 adds 0."""
    if c is None:
        return z.sum(0).double()
    return torch.mv(z.masked_fill((c == 0)[:, None], 0).t(), c).double()
