"""Choice of the way in which a loss is computed.

====================================  ===========================================================
plain, no gradient, no argmax         one pass over the logits, which stay in registers
a gradient of the sum                 chunks of logits, gradients taken in the forward pass
options or argmax without gradient    sum of the tokens' losses, from their statistics
entropy or log-sum-exp monitored      the same
inside torch.func                     the same: it alone allows a factor per sample
label smoothing of capped logits      the same: its gradient is no function of the exponentials
====================================  ===========================================================
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.autograd import class_logits, summed, token_ops
from fusedce.autograd.derivatives import refuse_forward_mode, transformed, wanted_gradients
from fusedce.backends.choose import resolve_backend
from fusedce.backends.gradients import call_of, check_budget
from fusedce.contract.objective import Stats, folded, with_expected_upstream
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import LossSum

NOTHING = Wanted()


class Monitored(NamedTuple):
    """Statistics asked for beside the loss, ``(N,)`` each, without gradient; else ``None``."""

    argmax: Tensor | None
    lse: Tensor | None = None
    entropy: Tensor | None = None


def loss_sum(problem: Problem, monitored: Wanted = NOTHING) -> tuple[LossSum, Monitored]:
    """Sum of the losses and number of valid tokens; and the monitored statistics."""
    problem = _prepared(problem)
    wanted = wanted_gradients(problem)
    one_pass = problem.plain() and not any(monitored)
    statistics = monitored.lse or monitored.entropy or transformed()
    if statistics or capped_smoothing(problem) or not (any(wanted) or one_pass):
        if monitored.argmax and any(wanted):  # which may be written into the labels' memory
            problem = problem.but(labels=problem.labels.clone())  # for backward
        losses, stats = token_ops.losses(problem, monitored)
        total = losses.sum(dtype=torch.float64).to(losses.dtype)
        values = Monitored(stats.argmax, stats.lse.detach(), stats.entropy.detach())
        return LossSum(total, stats.n_valid), values
    if any(wanted):
        problem = with_expected_upstream(problem)
    wanted = wanted.but(argmax=monitored.argmax)
    total, n_valid, argmax = summed.loss_sum(problem, wanted)
    return LossSum(total, n_valid), Monitored(argmax)


def sum_with_grads(problem: Problem) -> summed.SumWithGrads | None:
    """The sum with the gradients that are wanted; ``None`` where the forward pass has none."""
    wanted = wanted_gradients(problem)
    if transformed() or capped_smoothing(problem) or not any(wanted):
        return None
    return summed.with_grads(with_expected_upstream(_prepared(problem)), wanted)


def capped_smoothing(problem: Problem) -> bool:
    """Whether labels are smoothed and logits capped: then no chunk's exponentials suffice."""
    return problem.softcap is not None and problem.label_smoothing > 0


def token_losses(problem: Problem) -> Tensor:
    """``(N,)`` losses, each with an upstream gradient of its own."""
    return token_ops.losses(_prepared(problem), NOTHING)[0]


def token_stats(problem: Problem, wanted: Wanted) -> Stats:
    """Statistics of every token."""
    return token_ops.token_stats(_prepared(problem), wanted)


def class_stats(problem: Problem, classes: Tensor, wanted: Wanted) -> tuple[Tensor, Stats]:
    """``(N, K)`` log-probabilities of ``classes (N, K)``, 0 at ignored ones; tokens' statistics.

    The likeliest of a token's classes is its label.
    """
    if problem.ignore_index == torch.iinfo(classes.dtype).min:  # no class is ignored
        classes = classes.clamp(min=problem.ignore_index + 1)
    problem = _prepared(problem)
    z = class_logits.chosen_logits(problem, classes)
    if problem.memory_budget is not None:
        gradients = wanted_gradients(problem)
        beside = class_logits.bytes_beside(problem, classes.shape[1])
        if not torch.compiler.is_compiling():  # raises where it is too small, naming the whole
            call = call_of(problem, gradients, len(classes), triton=problem.backend == "triton")
            check_budget(problem, call._replace(fixed=beside))
        problem = problem.but(memory_budget=problem.memory_budget - beside)
    valid = problem.but(labels=classes).valid()
    best = class_logits.likeliest(z, valid)
    problem = problem.but(labels=classes.gather(1, best)[:, 0])
    z, stats = class_logits.with_stats(problem, classes, z, wanted)
    return class_logits.logprobs(z, best, stats.nll, valid), stats


def _prepared(problem: Problem) -> Problem:
    refuse_forward_mode(*problem)
    return folded(problem).but(backend=resolve_backend(problem.backend, problem.hidden))
