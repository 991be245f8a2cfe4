"""The sum of the losses where every rank holds some rows of the vocabulary."""

from __future__ import annotations

import torch

from fusedce.autograd.derivatives import detached, wanted_gradients
from fusedce.autograd.summed import with_gradients
from fusedce.backends.sharded.tiles import Shard, loss_and_grads
from fusedce.contract.problem import Problem
from fusedce.contract.results import LossSum


def loss_sum(problem: Problem, shard: Shard) -> LossSum:
    """Equal on all ranks; every rank receives the gradients of what it holds."""
    wanted = wanted_gradients(problem)
    device = problem.hidden.device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        total, n_valid, factor, *grads = loss_and_grads(detached(problem), shard, wanted)
    if not any(wanted.gradients()):
        return LossSum(total, n_valid)
    return LossSum(with_gradients(total, factor, problem, grads), n_valid)
