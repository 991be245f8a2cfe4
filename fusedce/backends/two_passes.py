"""The sum of the losses and its gradients in two passes over the logits, for a small budget.

The first pass finds the statistics of every token, and so the losses; the second, by tiles of the
vocabulary, the gradients: what :func:`token_grads` of a backend does for upstream factors of each
token's own. Here those are the slopes of the objective, times the factor that is expected.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fusedce.backends.gradients import waiting
from fusedce.backends.protocol import Summed
from fusedce.backends.upstream import Upstreams, Values, upstream_of
from fusedce.contract.objective import Stats, expected_upstream, slopes, token_losses
from fusedce.contract.problem import Problem, Wanted


def loss_and_grads(
    token_stats: Callable[..., Stats],  # of a backend, as its `token_grads`
    token_grads: Callable[..., tuple[Tensor, Tensor, Tensor]],
    problem: Problem,
    wanted: Wanted,
    argmax: Tensor | None,
) -> Summed:
    """Compute loss and gradients as a backend's ``loss_and_grads`` does."""
    V = problem.weight.shape[0]
    stats = token_stats(problem, Wanted(lse=True, argmax=argmax is not None), argmax)
    y = problem.labels.long().clamp(0, V - 1)
    nll, lse = stats.nll.double(), stats.lse.double()
    used = problem.valid()
    if problem.token_weight is not None:  # (a bad label's loss is NaN)
        used = used & ((problem.token_weight != 0) | nll.isnan())
    # Positions left out may hold anything, and NaN times 0 is NaN.
    losses = token_losses(problem, y, nll, lse).masked_fill(~used, 0)
    factor = expected_upstream(problem, stats.n_valid)
    by, outer = slopes(problem, y, lse), factor.double().expand_as(nll)
    of_stats = Upstreams(outer * by.nll, outer * by.lse, None, None, None)
    upstream = upstream_of(problem, Values(nll, lse, nll[:0], nll[:0], nll[:0]), of_stats, V=V)
    grads = token_grads(problem, wanted, stats.lse, upstream, waiting(problem))
    total = losses.sum().to(stats.nll.dtype)
    return Summed(total, stats.n_valid, factor, *grads)
