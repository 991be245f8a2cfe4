"""Statistics of every token's logits, differentiable each with a gradient of its own.

What the backward pass of :mod:`fusedce.autograd.summed` gets for nothing, a gradient of the forward
pass, is of a sum with one upstream factor. Here each token has its own factors, which are known
only in backward: it computes the logits a second time, tile by tile, and stores none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.autograd import functional, token_ops
from fusedce.autograd.derivatives import detached, transformed, wanted_gradients
from fusedce.contract.objective import Stats, token_losses
from fusedce.contract.problem import Problem, Wanted


def losses(
    problem: Problem, wanted: Wanted, argmax_out: Tensor | None = None
) -> tuple[Tensor, Stats]:
    """``(N,)`` losses, fp32 or fp64, 0 at ignored positions; and what they are made of."""
    smoothing = problem.label_smoothing > 0
    lse = wanted.lse or not problem.of_nll_alone()
    stats = token_stats(problem, wanted.but(lse=lse, zmean=smoothing), argmax_out)
    y = problem.labels.long().clamp(0, problem.weight.shape[0] - 1)
    lost = token_losses(problem, y, stats.nll, stats.lse, stats.zmean if smoothing else None)
    # Weights of ignored positions, and of the class their label was clamped to, may be anything.
    return lost.masked_fill(~problem.valid(), 0), stats


def token_stats(problem: Problem, wanted: Wanted, argmax_out: Tensor | None = None) -> Stats:
    """One pass; nll, lse, entropy and zmean are differentiable in hidden, weight and bias.

    ``argmax_out (N,)``: to be filled, outside of transforms.
    """
    train = any(wanted_gradients(problem))
    if transformed():  # inside vmap a tensor does not know that a transform around wants it
        train = torch.is_grad_enabled()
    arguments = (*detached(problem), *wanted.but(lse=wanted.lse or train))
    with torch.no_grad():
        if argmax_out is None:
            stats = Stats(*torch.ops.fusedce.token_stats(*arguments))
        else:
            nll, lse, entropy, zmean, n_valid = torch.ops.fusedce.token_stats_into(
                *arguments, argmax_out
            )
            stats = Stats(nll, lse, entropy, zmean, n_valid, argmax_out)
    if not train:
        return stats
    values = token_ops.Values(stats.nll, stats.lse, stats.entropy, stats.zmean)
    attach = functional.TokenValues.apply if transformed() else torch.ops.fusedce.token_values
    nll, lse, entropy, zmean = attach(*problem, *values)
    return Stats(nll, lse, entropy, zmean, stats.n_valid, stats.argmax)
