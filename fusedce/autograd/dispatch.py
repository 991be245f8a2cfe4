"""Which way a loss is computed.

====================================  ===========================================================
plain, no gradient, no argmax         one pass over the logits, which stay in registers
a gradient of the sum                 chunks of logits, gradients taken in the forward pass
options or argmax without gradient    summed up from the statistics of the tokens
label smoothing of capped logits      the same: its gradient is no function of the exponentials
====================================  ===========================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.autograd import per_token, summed
from fusedce.autograd.derivatives import refuse_transforms, wanted_gradients
from fusedce.backends.choose import resolve_backend
from fusedce.contract.denominator import with_expected_upstream
from fusedce.contract.objective import Stats, folded
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import LossSum


def loss_sum(problem: Problem, argmax: Tensor | None = None) -> LossSum:
    """Sum of the losses and number of valid tokens; ``argmax (N,)`` int64 is filled."""
    problem = _prepared(problem)
    wanted = wanted_gradients(problem)
    capped_smoothing = problem.softcap is not None and problem.label_smoothing > 0
    one_pass = problem.plain() and argmax is None
    if capped_smoothing or not (any(wanted) or one_pass):
        losses, n_valid = per_token.losses(problem, argmax)
        return LossSum(losses.sum(dtype=torch.float64).to(losses.dtype), n_valid)
    return LossSum(*summed.loss_sum(with_expected_upstream(problem), wanted, argmax))


def token_losses(problem: Problem) -> Tensor:
    """``(N,)`` losses, each with an upstream gradient of its own."""
    return per_token.losses(_prepared(problem))[0]


def token_stats(problem: Problem, wanted: Wanted, argmax: Tensor | None = None) -> Stats:
    """Statistics of every token; ``argmax (N,)`` int64 is filled."""
    return per_token.token_stats(_prepared(problem), wanted, argmax)


def _prepared(problem: Problem) -> Problem:
    refuse_transforms(problem)
    return folded(problem).but(backend=resolve_backend(problem.backend, problem.hidden))
