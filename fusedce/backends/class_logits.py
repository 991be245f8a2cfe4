"""Logits of a few chosen classes of every token, differentiable, and their gradients.

Their rows of the head are read one by one, for as many tokens at a time as fit a small budget:
nothing of the size ``(N, K, H)`` is held. The code is plain torch for every backend: it is
``K / V`` of the work of the product with the whole head.

Their entries of the gradient are added to those of the statistics before it is rounded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedce.backends.gradients import check_budget, sizes_of
from fusedce.backends.shards import all_reduce, sharded_sizes
from fusedce.contract.labels import used_tokens
from fusedce.contract.problem import Outputs, Problem, Projection, Shard, acc_dtype

_BUDGET = 64 * 2**20  # bytes that are held at a time, at most
_LEAST = 2**18  # bytes that are held at a time under the smallest budget


def likeliest(z: Tensor, valid: Tensor) -> Tensor:
    """``(N, 1)`` index of the largest valid logit in each row of ``z (N, K)``."""
    finite = z.clamp(min=torch.finfo(z.dtype).min)
    return finite.masked_fill(~valid, -math.inf).argmax(1, keepdim=True)


def logprobs(z: Tensor, best: Tensor, nll: Tensor, valid: Tensor) -> Tensor:
    """``(N, K)`` log-probabilities of the classes with logits ``z``, 0 where not valid.

    ``nll (N,)``, that of the class at ``best (N, 1)``, is exact near a probability of 1. The other
    classes, whose probability is 1/2 at most, follow from the differences of their logits to it.
    """
    z_best = z.gather(1, best)
    alike = (z == -math.inf) & (z_best == -math.inf)
    # -inf less -inf is 0 here, with the derivatives of any other difference.
    finite = _Finite.apply(z)
    gap = torch.where(alike, finite - finite.gather(1, best), z - z_best)
    gap = gap.scatter(1, best, 0)  # its gradient by z_best would cancel, and leave rounding
    return (gap - nll[:, None]).masked_fill(~valid, 0)


class _Finite(torch.autograd.Function):
    """The smallest number in the place of -inf, with a derivative of 1 everywhere."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return z.clamp(min=torch.finfo(z.dtype).min)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream


def one_class(problem: Problem, z: Tensor) -> Problem:
    """The problem with the likeliest of each token's classes as its label; ``z`` their logits."""
    best = likeliest(z, problem.valid())
    return problem.replace(labels=problem.labels.gather(1, best)[:, 0])


def subtract_fixed_bytes(problem: Problem, wanted: Outputs, shard: Shard | None) -> Problem:
    """The problem, its budget less what ``labels (N, K)`` and gathered tokens hold.

    Raises:
        ValueError: the budget is too small; the message, the same on all ranks, says the least.
    """
    several = problem.labels.dim() == 2
    if problem.memory_budget is None or not (several or shard):
        return problem
    n, triton = len(problem.labels), problem.by_triton()
    call = sizes_of(problem, wanted, n, triton=triton)
    if shard is not None:
        call = sharded_sizes(problem, shard, n)
    fixed = call.fixed
    if several:
        in_range, upstream = 3 * 8, 2 * 4  # classes, their order, entries; logits, their gradient
        fixed += problem.labels.numel() * (in_range + upstream) + _LEAST
    check_budget(problem, call._replace(fixed=fixed))
    return problem.replace(memory_budget=problem.memory_budget - fixed)


def chosen_logits(problem: Problem, classes: Tensor) -> Tensor:
    """``(N, K)`` fp32 or fp64 finished logits of ``classes (N, K)``; 0 at ignored entries."""
    head = Projection.of(problem)
    valid, y = in_range(problem, classes, problem.weight.shape[0])
    z = problem.hidden.new_zeros(classes.shape, dtype=head.acc)
    budget, (N, K) = problem.memory_budget, classes.shape
    # A quarter of the budget, which others use as well; rows are held as they are and in float32.
    held = _BUDGET if budget is None else max(min(budget // 4, _BUDGET), _LEAST)
    step = max(held // (K * problem.hidden.shape[1] * (4 + problem.hidden.element_size())), 1)
    for begin in range(0, N, step):
        rows = slice(begin, min(begin + step, N))
        # 0 where no entry counts, whatever the row holds
        h = problem.hidden[rows].to(head.acc).masked_fill(~valid[rows].any(1, keepdim=True), 0)
        # (A matrix product might round its operands, where the user allows that for float32.)
        z[rows] = problem.weight[y[rows]].to(head.acc).mul_(h[:, None]).sum(2)
    z = head.finished(z, y)
    if problem.temperature is not None:
        z = (z / problem.temperature[:, None]).to(head.acc)
    z.masked_fill_(y != classes, math.nan)  # out of range, on devices whose labels are not read
    return z.masked_fill_(~valid, 0)


def logits_of_classes(problem: Problem, shard: Shard | None) -> Tensor:
    """``(N, K)`` logits of the ``labels (N, K)``, of all ranks' classes where there is a shard.

    Collectives, of a shard: one all-reduce of a number a class.
    """
    if shard is None:
        return chosen_logits(problem, problem.labels)
    valid, classes = in_range(problem, problem.labels, shard.V)
    z = problem.hidden.new_zeros(classes.shape, dtype=acc_dtype(problem.hidden.dtype))
    if len(problem.weight):
        here = classes - shard.first
        here = here.masked_fill((here < 0) | (here >= len(problem.weight)) | ~valid, -100)
        z = chosen_logits(problem.replace(ignore_index=-100), here)
    all_reduce(z, shard.group)  # each logit comes from the rank that holds its row: exact
    return z.masked_fill_(valid & (classes != problem.labels), math.nan)


def in_range(problem: Problem, classes: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """``(N, K)`` bool: entries of ``classes`` that count; and the classes, clamped to ``[0, V)``.

    Raises:
        ValueError: a class is out of range (on a CPU; elsewhere it is clamped, and its logit NaN).
    """
    valid = problem.replace(labels=classes).valid()
    if classes.device.type == "cpu":
        used_tokens(problem.replace(labels=classes.reshape(-1), token_weight=None), V)
    return valid, classes.long().clamp(0, V - 1)
