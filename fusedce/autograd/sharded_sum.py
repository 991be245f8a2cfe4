"""The sum of the losses on a sharded vocabulary, with its gradients as a node of autograd."""

from __future__ import annotations

from types import ModuleType

import torch

from fusedce.autograd import sharded_stats
from fusedce.autograd.derivatives import detached, refuse_forward_mode, wanted_gradients
from fusedce.autograd.dispatch import NOTHING, Monitored, capped_smoothing
from fusedce.autograd.summed import with_gradients
from fusedce.backends.plan import TILES, way_of
from fusedce.backends.sharded.exchange import Shard, sharded_call
from fusedce.backends.torch import sharded_sum as torch_sharded
from fusedce.contract.objective import weights_and_count
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import LossSum


def loss_sum(
    problem: Problem, shard: Shard, monitored: Wanted = NOTHING
) -> tuple[LossSum, Monitored]:
    """The sum in nats and the number of valid tokens, equal on all ranks; what is monitored.

    Every rank receives the gradients of its own inputs. The monitored statistics are those of this
    rank's tokens.
    """
    refuse_forward_mode(*problem)
    wanted = wanted_gradients(problem)
    if _from_tokens(problem, shard, monitored, train=any(wanted.gradients())):
        return _sum_of_losses(problem, shard, monitored)
    device = problem.hidden.device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if problem.backend != "triton":
            made, argmax = torch_sharded.loss_and_grads(detached(problem), shard, wanted), None
        else:
            backend = _triton()
            if not any(wanted.gradients()):
                return LossSum(*backend.loss(detached(problem), shard)), Monitored(None)
            n = len(problem.labels)
            argmax = torch.empty(n, dtype=torch.int64, device=device) if monitored.argmax else None
            made = backend.loss_and_grads(detached(problem), shard, wanted, argmax)
    total, n_valid, factor, *grads = made
    if any(wanted.gradients()):
        total = with_gradients(total, factor, problem, grads)
    return LossSum(total, n_valid), Monitored(argmax)


def _from_tokens(problem: Problem, shard: Shard, monitored: Wanted, *, train: bool) -> bool:
    """Whether the sum is computed from the tokens' losses, whose gradients come in backward."""
    triton, budget = problem.backend == "triton", problem.memory_budget
    if monitored.lse or monitored.entropy or (monitored.argmax and not (triton and train)):
        return True
    if triton and capped_smoothing(problem):
        return True
    if budget is None:
        return False
    N = len(problem.labels) if shard.tokens is None else len(shard.tokens) * max(shard.tokens)
    return way_of(sharded_call(problem, shard, N), memory_budget=budget).name == TILES


def _triton() -> ModuleType:
    """The module of the Triton path, imported at its first use."""
    from fusedce.backends.triton import sharded_sum

    return sharded_sum


def _sum_of_losses(problem: Problem, shard: Shard, monitored: Wanted) -> tuple[LossSum, Monitored]:
    losses, values = sharded_stats.losses(problem, shard, monitored)
    count = weights_and_count(problem.but(class_weight=None))[1]
    mine = torch.stack([losses.sum(dtype=torch.float64), count])
    total, n_valid = sharded_stats.total(mine, shard).unbind()
    return LossSum(total.to(losses.dtype), n_valid.detach().long()), values
