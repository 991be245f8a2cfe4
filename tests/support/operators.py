"""``torch.library.opcheck`` of every operator that a problem passes through."""

import torch

from fusedce.autograd.per_token import Upstreams, Values
from fusedce.autograd.summed import Attached
from fusedce.contract.problem import Problem, Wanted


def opcheck_sum(problem, argmax=None):
    plain = _detached(problem)
    if argmax is None:
        argmax = torch.zeros(len(problem.labels), dtype=torch.int64)
    for wanted in (Wanted(), Wanted(hidden=True, weight=True)):
        torch.library.opcheck(torch.ops.fusedce.summed, (*plain, *wanted, argmax.clone()))
    total, _, factor, *grads = torch.ops.fusedce.summed(*plain, *wanted, None)
    leaves = [x.detach().requires_grad_() for x in (problem.hidden, problem.weight)]
    attached = Attached(total, factor, *leaves, problem.bias, *grads, problem.backend)
    torch.library.opcheck(torch.ops.fusedce.with_gradients, tuple(attached))
    torch.library.opcheck(torch.ops.fusedce.scale, (grads[0], factor, problem.backend))


def opcheck_tokens(problem):
    plain = _detached(problem)
    argmax = torch.zeros(len(problem.labels), dtype=torch.int64)
    wanted = Wanted(hidden=True, weight=True, bias=True, lse=True, entropy=True, zmean=True)
    torch.library.opcheck(torch.ops.fusedce.token_stats, (*plain, *wanted, argmax))
    values = Values(*torch.ops.fusedce.token_stats(*plain, *wanted, None)[:4])
    torch.library.opcheck(torch.ops.fusedce.token_values, (*problem, *values))
    arguments = (*plain, *wanted, *values, *Upstreams(*values))
    torch.library.opcheck(torch.ops.fusedce.token_grads, arguments)


def _detached(problem):
    return Problem(*(x.detach() if isinstance(x, torch.Tensor) else x for x in problem))
