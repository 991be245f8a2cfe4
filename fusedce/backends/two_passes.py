"""The sum of the losses and its gradients in two passes over the logits, for a small budget.

The first pass finds the statistics of every token, and so the losses; the second, by tiles of the
vocabulary, the gradients: what :func:`token_grads` of a backend does for upstream factors of each
token's own. Here those are the slopes of the objective, times the factor that is expected.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedce.backends.gradients import waiting
from fusedce.backends.protocol import Summed
from fusedce.contract.objective import Stats, Upstream, expected_upstream, slopes, token_losses
from fusedce.contract.problem import Problem, Wanted


def loss_and_grads(
    token_stats: Callable[..., Stats],  # of a backend, as its `token_grads`
    token_grads: Callable[..., tuple[Tensor, Tensor, Tensor]],
    problem: Problem,
    wanted: Wanted,
    argmax: Tensor | None,
) -> Summed:
    """Compute loss and gradients as a backend's ``loss_and_grads`` does."""
    V, smoothing = problem.weight.shape[0], problem.label_smoothing > 0
    statistics = Wanted(lse=True, zmean=smoothing, argmax=argmax is not None)
    stats = token_stats(problem, statistics, argmax)
    y = problem.labels.long().clamp(0, V - 1)
    zmean = stats.zmean.double() if smoothing else None
    factor = expected_upstream(problem, stats.n_valid)
    losses, upstream = losses_and_upstream(
        problem, y, stats.nll.double(), stats.lse.double(), zmean, factor, V
    )
    used = problem.valid()
    if problem.token_weight is not None:  # (a bad label's loss is NaN)
        used = used & ((problem.token_weight != 0) | stats.nll.isnan())
    # Positions left out may hold anything, and NaN times 0 is NaN.
    total = losses.masked_fill(~used, 0).sum().to(stats.nll.dtype)
    upstream = upstream._replace(used=used)
    grads = token_grads(problem, wanted, stats.lse, upstream, waiting(problem))
    return Summed(total, stats.n_valid, factor, *grads)


def losses_and_upstream(
    problem: Problem,
    y: Tensor,  # (n,) labels, in range, as all below
    nll: Tensor,  # float64
    lse: Tensor,  # float64
    zmean: Tensor | None,  # float64, with label smoothing
    factor: Tensor,  # () of the gradients
    V: int,  # classes
) -> tuple[Tensor, Upstream]:
    """``(n,)`` losses float64, and the factors of their gradients."""
    losses = token_losses(problem, y, nll, lse, zmean)
    by = slopes(problem, y, lse)
    others = -torch.expm1(-nll)
    outer, gamma = torch.zeros_like(nll) + factor, None
    at_label = by.lse * torch.exp(-nll) - by.nll * others
    if zmean is not None:
        gamma = outer * by.zmean / V
        c = 1.0 if problem.class_weight is None else problem.class_weight.double()[y]
        at_label = at_label + by.zmean * c / V
    used = torch.ones_like(nll, dtype=torch.bool)
    alpha = outer * (by.nll + by.lse)
    return losses, Upstream(alpha, None, gamma, outer * at_label, used, others)
