"""Choice of the way in which a loss is computed.

====================================  ===========================================================
plain, no gradient, no argmax         one pass over the logits, which stay in registers
a gradient of the sum                 chunks of logits, gradients taken in the forward pass
options or argmax without gradient    sum of the tokens' losses, from their statistics
entropy or log-sum-exp monitored      the same
label smoothing                       the same: rounded probabilities would lose it
inside torch.func                     the same: only this way takes a factor per sample
a sharded vocabulary                  the same
====================================  ===========================================================

Label smoothing subtracts ``s / V`` from every probability. If they are nearly equal, little is left
of them; had they been rounded to two bytes before, only rounding errors would be left.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedce.autograd import sums, tokens
from fusedce.backends import chosen
from fusedce.backends.choose import resolve_backend
from fusedce.contract.checks import transformed
from fusedce.contract.objective import Stats, folded, with_expected_upstream
from fusedce.contract.problem import Task, Wanted
from fusedce.contract.results import LossSum


def loss_sum(task: Task) -> tuple[LossSum, dict[str, Tensor]]:
    """Sum of the losses and number of valid tokens; and by name the statistics that are wanted.

    These are ``(N,)`` each, of `Stats`, without gradient.
    """
    task = _prepared(task)
    problem, monitored = task.problem, task.wanted
    wanted = Wanted.of(problem)
    if _by_tokens(task, train=any(wanted)):
        if monitored.argmax and any(wanted):  # which may be written into the labels' memory
            task = task.but(problem=problem.but(labels=problem.labels.clone()))  # for backward
        losses, stats = tokens.losses(task)
        names = [x for x in ("argmax", "lse", "entropy") if getattr(monitored, x)]
        values = {name: getattr(stats, name).detach() for name in names}
        total = losses.sum(dtype=torch.float64).to(losses.dtype)
        return LossSum(total, stats.n_valid), values
    if any(wanted) and task.shard is None:  # (ranks might expect different factors)
        task = task.but(problem=with_expected_upstream(problem))
    task = task.but(wanted=wanted.but(argmax=monitored.argmax))
    total, n_valid, argmax = sums.loss_sum(task)
    return LossSum(total, n_valid), {"argmax": argmax}


def _by_tokens(task: Task, *, train: bool) -> bool:
    """Whether the sum is computed from the tokens' losses, whose gradients come in backward."""
    problem, monitored, divergence, shard = task
    if transformed() or monitored.lse or monitored.entropy:
        return True
    if divergence is not None:
        return False
    if problem.label_smoothing or shard is not None:
        return True
    return not (train or (problem.plain() and not any(monitored)))


def token_losses(task: Task) -> Tensor:
    """``(N,)`` losses, each with an upstream gradient of its own."""
    return tokens.losses(_prepared(task))[0]


def token_stats(task: Task) -> tuple[Tensor, Stats]:
    """Log-probabilities of the labels, ``(N,)`` or ``(N, K)``, and statistics of every token.

    0 at ignored labels. The likeliest of several classes is the token's label.
    """
    task = _prepared(task)
    stats, z = tokens.token_stats(task)
    if task.problem.labels.dim() == 1:
        return -stats.nll, stats
    valid = task.problem.valid()
    return chosen.logprobs(z, chosen.likeliest(z.detach(), valid), stats.nll, valid), stats


def _prepared(task: Task) -> Task:
    _refuse_forward_mode(*task.problem)
    problem = task.problem if task.divergence is not None else folded(task.problem)
    backend = resolve_backend(problem.backend, problem.hidden)
    return task.but(problem=problem.but(backend=backend))


def _refuse_forward_mode(*inputs: object) -> None:
    """Raise RuntimeError if an input has a tangent, which the operators would drop."""
    if torch.compiler.is_compiling():
        return
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    jvp = any(t.key() == torch._C._functorch.TransformType.Jvp for t in transforms)
    if jvp or (
        forward_ad._current_level >= 0
        and any(
            isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
        )
    ):
        raise RuntimeError(
            "fusedce has no forward-mode derivative (jvp, jacfwd, hessian, or an input that is a "
            "dual tensor): use F.cross_entropy(F.linear(...)) for it"
        )
