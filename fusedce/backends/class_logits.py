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

from ..contract.labels import used_tokens
from ..contract.problem import Outputs, Problem, Projection
from .gradients import check_budget, sizes_of

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

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clamp(min=torch.finfo(z.dtype).min)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return upstream


def one_class(problem: Problem, z: Tensor) -> Problem:
    """The problem with the likeliest of each token's classes as its label; ``z`` their logits."""
    best = likeliest(z, problem.valid())
    return problem.replace(labels=problem.labels.gather(1, best)[:, 0])


def held_bytes(labels: Tensor) -> int:
    """Bytes that are held for ``labels (N, K)`` beside everything else; 0 for ``(N,)``."""
    if labels.dim() == 1:
        return 0
    in_range, upstream = 3 * 8, 2 * 4  # classes, their order, entries; logits, their gradient
    return labels.numel() * (in_range + upstream) + _LEAST


def subtract_fixed_bytes(problem: Problem, wanted: Outputs) -> Problem:
    """The problem, its budget less what ``labels (N, K)`` hold.

    Raises:
        ValueError: the budget is too small; the message says the least.
    """
    if problem.memory_budget is None or problem.labels.dim() == 1:
        return problem
    call = sizes_of(problem, wanted, len(problem.labels), triton=problem.by_triton())
    fixed = held_bytes(problem.labels)
    check_budget(problem, call._replace(fixed=fixed))
    return problem.replace(memory_budget=problem.memory_budget - fixed)


def chosen_logits(problem: Problem, classes: Tensor) -> Tensor:
    """``(N, K)`` fp32 or fp64 finished logits of ``classes (N, K)``; 0 at ignored entries."""
    head = Projection.of(problem)
    z = problem.hidden.new_zeros(classes.shape, dtype=head.acc)
    if not problem.weight.shape[0]:  # of a rank without classes
        return z
    valid, y = in_range(problem, classes, problem.weight.shape[0])
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


def in_range(problem: Problem, classes: Tensor, V: int) -> tuple[Tensor, Tensor]:
    """``(N, K)`` bool: entries of ``classes`` that count; and the classes, clamped to ``[0, V)``.

    Raises:
        ValueError: a class is out of range (on a CPU; elsewhere it is clamped, and its logit NaN).
    """
    valid = problem.replace(labels=classes).valid()
    if classes.device.type == "cpu":
        used_tokens(problem.replace(labels=classes.reshape(-1), token_weight=None), V)
    return valid, classes.long().clamp(0, V - 1)
