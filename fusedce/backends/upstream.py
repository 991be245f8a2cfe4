"""Turn gradients of token statistics into per-token factors of the logit gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract.labels import used_tokens
from ..contract.objective import LogitGrad, Stats, slopes, token_losses
from ..contract.problem import ACC_DTYPE, Outputs, Problem, Projection
from .gradients import Summed, expected_upstream, saved_grad_dtypes


class SavedStats(NamedTuple):
    """Statistics of the tokens that backward reads."""

    nll: Tensor  # (N,)
    lse: Tensor  # (N,)
    entropy: Tensor  # (N,), or (0,)
    zmean: Tensor  # (N,), or (0,)
    z: Tensor  # (N, K) logits of the classes asked for, or (0,)
    top: Tensor  # (N,) the largest logit, or (0,)


class StatGrads(NamedTuple):
    """Upstream gradients of the statistics that have one, where there are any."""

    nll: Tensor | None = None
    lse: Tensor | None = None
    entropy: Tensor | None = None
    zmean: Tensor | None = None
    z: Tensor | None = None


def upstream_of(
    problem: Problem,
    values: SavedStats,
    upstreams: StatGrads,
    *,
    V: int,  # all classes; a shard's weight holds only some of them
    classes: Tensor | None = None,  # (N, K) the classes of values.z; -1 for none
) -> LogitGrad:
    """Factors of the gradient of a row of logits, by

    ``d nll = p - onehot,  d lse = p,  d entropy = -p * (log p + entropy),  d zmean = c / V``.

    All factors of a token with a bad label are NaN. They are for ``p = exp(z - lse)`` with ``lse``
    rounded to the dtype of the logits, and undo that rounding.
    """
    # A statistic that was not computed is (0,), and so is a gradient that a compiler makes for it.
    upstreams = StatGrads(*(u if u is not None and len(u) else None for u in upstreams))
    nll = values.nll.double()
    p_label = torch.exp(-nll)
    alpha = torch.zeros_like(p_label)
    at_label = torch.zeros_like(p_label)
    used = torch.zeros_like(problem.labels, dtype=torch.bool)
    beta = gamma = None
    p_less_one = torch.expm1(-nll)  # without cancellation
    for u, at in ((upstreams.nll, p_less_one), (upstreams.lse, p_label)):
        if u is not None:
            alpha += u
            at_label += u * at
            used |= u != 0
    if upstreams.entropy is not None:
        entropy = values.entropy.double()
        beta = upstreams.entropy
        alpha -= beta * entropy
        # (0 at p = 0, where log p is -inf)
        surprise = p_label * (nll - entropy).masked_fill(p_label == 0, 0)
        at_label += beta * surprise
        used |= beta != 0
    if upstreams.zmean is not None:
        gamma = upstreams.zmean / V
        c: Tensor | float = 1.0
        if problem.class_weight is not None:
            c = problem.class_weight[problem.labels.long().clamp(0, V - 1)]
        at_label += gamma.double() * c
        used |= gamma != 0
    if problem.temperature is not None:
        # The factors become those of the undivided logits; unused rows may have any temperature.
        sharp = 1 / problem.temperature.double().masked_fill(~used, 1)
        alpha, at_label = alpha * sharp, at_label * sharp
        beta = None if beta is None else beta * sharp
        gamma = None if gamma is None else gamma * sharp
    at_classes = None
    if upstreams.z is None:  # the classes then have no entries of their own
        classes = None
    if upstreams.z is not None and classes is not None:
        head, none = Projection.of(problem), classes < 0
        t = torch.ones_like(values.z, dtype=torch.float64)
        if problem.temperature is not None:
            t = problem.temperature.double()[:, None].masked_fill(none, 1)
        at_classes = upstreams.z.double().masked_fill(none, 0) * head.scale / t
        slope = head.slope(values.z.masked_fill(none, 0) * t)
        at_classes = at_classes if slope is None else at_classes * slope
        used = used | (at_classes != 0).any(1)
    lse = values.lse.double()
    low = (lse - lse.to(ACC_DTYPE[problem.hidden.dtype])).masked_fill(lse.isinf(), 0)
    if beta is not None:
        alpha, beta = alpha + beta * low, beta * torch.exp(-low)
    alpha = alpha * torch.exp(-low) + 0 * at_label
    top = values.top if len(values.top) else None
    return LogitGrad(alpha, beta, gamma, at_label, used, classes, at_classes, top)


def loss_in_two_passes(
    token_stats: Callable[..., Stats],  # of a backend, as its `token_grads`
    token_grads: Callable[..., tuple[Tensor, Tensor, Tensor]],
    problem: Problem,
    wanted: Outputs,
    argmax: Tensor | None,
) -> Summed:
    """The sum of the losses and its gradients in two passes over the logits, for a small budget.

    The first pass finds the statistics of every token, and so the losses. The second computes the
    gradients by tiles of the vocabulary, with an upstream factor per token: the slope of its loss
    times the factor that is expected.
    """
    V = problem.weight.shape[0]
    stats = token_stats(problem, Outputs(lse=True, argmax=argmax is not None), argmax)
    y = problem.labels.long().clamp(0, V - 1)
    nll, lse = stats.nll.double(), stats.lse.double()
    used, _ = used_tokens(problem)
    # Positions left out may hold anything, and NaN times 0 is NaN.
    losses = token_losses(problem, y, nll, lse).masked_fill(~used, 0)
    factor = expected_upstream(problem, stats.n_valid)
    by, outer = slopes(problem, y, lse), factor.double().expand_as(nll)
    of_stats = StatGrads(nll=outer * by.nll, lse=outer * by.lse)
    upstream = upstream_of(problem, SavedStats(nll, lse, *[nll[:0]] * 4), of_stats, V=V)
    grads = token_grads(problem, wanted, stats.lse, upstream, saved_grad_dtypes(problem))
    total = losses.sum().to(stats.nll.dtype)
    return Summed(total, stats.n_valid, factor, *grads)
