"""The sum of the losses where every rank holds some rows of the vocabulary."""

from __future__ import annotations

from types import ModuleType

import torch

from fusedce.autograd import sharded_tokens
from fusedce.autograd.derivatives import detached, refuse_forward_mode, wanted_gradients
from fusedce.autograd.dispatch import capped_smoothing
from fusedce.autograd.summed import with_gradients
from fusedce.backends.plan import TILES, way_of
from fusedce.backends.sharded import tiles
from fusedce.backends.sharded.exchange import Shard, sharded_call
from fusedce.contract.objective import weights_and_count
from fusedce.contract.problem import Problem
from fusedce.contract.results import LossSum


def loss_sum(problem: Problem, shard: Shard) -> LossSum:
    """Equal on all ranks; every rank receives the gradients of what it holds."""
    refuse_forward_mode(problem)
    wanted = wanted_gradients(problem)
    budget, triton = problem.memory_budget, problem.backend == "triton"
    if triton and capped_smoothing(problem):
        return _by_tiles(problem, shard)
    if budget is not None:
        N = len(problem.labels) if shard.tokens is None else len(shard.tokens) * max(shard.tokens)
        if way_of(sharded_call(problem, shard, N), memory_budget=budget).name == TILES:
            return _by_tiles(problem, shard)
    backend = _triton() if triton else tiles
    device = problem.hidden.device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        if triton and not any(wanted.gradients()):
            return LossSum(*backend.loss(detached(problem), shard))
        total, n_valid, factor, *grads = backend.loss_and_grads(detached(problem), shard, wanted)
    if not any(wanted.gradients()):
        return LossSum(total, n_valid)
    return LossSum(with_gradients(total, factor, problem, grads), n_valid)


def _triton() -> ModuleType:
    """The path by Triton's kernels, imported at its first use."""
    from fusedce.backends.triton import sharded

    return sharded


def _by_tiles(problem: Problem, shard: Shard) -> LossSum:
    """From the losses of the tokens, whose gradients are made in backward."""
    losses = sharded_tokens.losses(problem, shard)
    count = weights_and_count(problem.but(class_weight=None))[1]
    mine = torch.stack([losses.sum(dtype=torch.float64), count])
    total, n_valid = sharded_tokens.total(mine, shard).unbind()
    return LossSum(total.to(losses.dtype), n_valid.detach().long())
