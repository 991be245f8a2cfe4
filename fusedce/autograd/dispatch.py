"""Choice of the way in which a loss is computed.

====================================  ===========================================================
plain, no gradient, no argmax         one pass over tiles of logits, which are not kept
a gradient of the sum                 chunks of logits, gradients taken in the forward pass
a divergence                          the same, with a gradient or without
options or argmax without gradient    sum of the tokens' losses, from their statistics
entropy or log-sum-exp monitored      the same
label smoothing                       the same, unless exponentials are held in float32
statistics that ranks merge           the same
====================================  ===========================================================

Label smoothing subtracts ``s / V`` from every probability. If they are nearly equal, little is left
of them; had they been rounded to two bytes before, as the Triton backend holds them, only rounding
errors would be left. The torch backend holds float32, and subtracts in place.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import class_logits
from ..backends.choose import get_backend, resolve_backend
from ..contract.objective import Stats, fold_class_weight
from ..contract.problem import Divergence, Outputs, Problem, Task
from ..contract.results import LossSum
from . import sums, tokens
from .tokens import StatsOf


def loss_sum(task: Task, stats_of: StatsOf | None = None) -> tuple[LossSum, dict[str, Tensor]]:
    """Sum of the losses and number of valid tokens; and by name the statistics that are wanted.

    These are ``(N,)`` each, of `Stats`, without gradient. ``stats_of`` computes them where they are
    merged over ranks.
    """
    problem, monitored = _prepared(task.problem), task.wanted
    wanted = Outputs.of(problem)
    train = wanted.hidden or wanted.weight or wanted.bias
    if stats_of is not None or _by_tokens(problem, monitored, task.divergence, train=train):
        if monitored.argmax and train:  # which may be written into the labels' memory
            problem = problem.replace(labels=problem.labels.clone())  # for backward
        losses, stats = tokens.losses(task.replace(problem=problem), stats_of)
        names = [x for x in ("argmax", "lse", "entropy") if getattr(monitored, x)]
        values = {name: getattr(stats, name).detach() for name in names}
        total = losses.sum(dtype=torch.float64).to(losses.dtype)
        return LossSum(total, stats.n_valid), values
    if monitored.argmax:
        wanted = wanted.replace(argmax=True)
    total, n_valid, argmax = sums.loss_sum(Task(problem, wanted, task.divergence, task.shard))
    return LossSum(total, n_valid), {} if argmax is None else {"argmax": argmax}


def _by_tokens(
    problem: Problem, monitored: Outputs, divergence: Divergence | None, *, train: bool
) -> bool:
    """Whether the sum is computed from the tokens' losses, whose gradients come in backward."""
    if monitored.lse or monitored.entropy:
        return True
    if divergence is not None:
        return False
    if problem.label_smoothing:
        return not (train and get_backend(problem.backend).sums_smoothing(problem, monitored))
    return not (train or (problem.is_plain_ce() and not any(monitored)))


def token_losses(task: Task, stats_of: StatsOf | None = None) -> Tensor:
    """``(N,)`` losses, each with an upstream gradient of its own."""
    return tokens.losses(task.replace(problem=_prepared(task.problem)), stats_of)[0]


def token_stats(task: Task, stats_of: StatsOf | None = None) -> tuple[Tensor, Stats]:
    """Log-probabilities of the labels, ``(N,)`` or ``(N, K)``, and statistics of every token.

    0 at ignored labels. The likeliest of several classes is the token's label.
    """
    task = task.replace(problem=_prepared(task.problem))
    stats, z = (stats_of or tokens.token_stats)(task)
    if task.problem.labels.dim() == 1:
        return -stats.nll, stats
    valid = task.problem.valid()
    best = class_logits.likeliest(z.detach(), valid)
    return class_logits.logprobs(z, best, stats.nll, valid), stats


def _prepared(problem: Problem) -> Problem:
    """The problem with a backend, and with class weights as the tokens' where that is the same."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        _refuse_forward_mode(problem)
    if problem.class_weight is not None:
        problem = fold_class_weight(problem)
    backend = resolve_backend(problem.backend, problem.hidden)
    return problem if backend == problem.backend else problem.replace(backend=backend)


def _refuse_forward_mode(problem: Problem) -> None:
    """Raise RuntimeError if an input has a tangent, which the operators would drop."""
    if any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in problem
    ):
        raise RuntimeError(
            "fusedce has no forward-mode derivative (an input is a dual tensor): use "
            "F.cross_entropy(F.linear(hidden, weight, bias), labels) for it"
        )
