"""``torch.library.opcheck`` of every operator that a problem passes through."""

import torch

from fusedce.autograd.summed import Attached
from fusedce.autograd.token_ops import Upstreams, Values
from fusedce.contract.problem import Problem, Wanted


def opcheck_sum(problem):
    plain = _detached(problem)
    for wanted in (Wanted(), Wanted(hidden=True, weight=True, argmax=True)):
        torch.library.opcheck(torch.ops.fusedce.summed, (*plain, *wanted))
    total, _, _, factor, *grads = torch.ops.fusedce.summed(*plain, *wanted)
    leaves = [x.detach().requires_grad_() for x in (problem.hidden, problem.weight)]
    attached = Attached(total, factor, *leaves, problem.bias, *grads, problem.backend)
    torch.library.opcheck(torch.ops.fusedce.with_gradients, tuple(attached))
    torch.library.opcheck(torch.ops.fusedce.scale, (grads[0], factor, problem.backend))


def opcheck_tokens(problem):
    plain = _detached(problem)
    wanted = Wanted(*[True] * len(Wanted._fields))
    torch.library.opcheck(torch.ops.fusedce.token_stats, (*plain, *wanted))
    values = Values(*torch.ops.fusedce.token_stats(*plain, *wanted)[:4])
    torch.library.opcheck(torch.ops.fusedce.token_values, (*problem, *values))
    arguments = (*plain, *wanted, *values, *Upstreams(*values))
    torch.library.opcheck(torch.ops.fusedce.token_grads, arguments)


def _detached(problem):
    return Problem(*(x.detach() if isinstance(x, torch.Tensor) else x for x in problem))
