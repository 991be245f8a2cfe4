"""Operators of divergences: their sum with its gradients, and token by token.

The gradients of the sum are computed in the forward pass, as in :mod:`fusedce.autograd.summed`.
The factors of tokens are known in backward alone, which computes the sum weighted by them: its
gradients are the wanted ones. Tokens whose factor is 0 are left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.autograd import summed
from fusedce.autograd.derivatives import (
    detached,
    needed_gradients,
    refuse_forward_mode,
    refuse_second_derivatives,
    transformed,
    wanted_gradients,
)
from fusedce.backends.choose import get_backend, resolve_backend
from fusedce.contract.divergence import Divergence
from fusedce.contract.objective import with_expected_upstream
from fusedce.contract.problem import Problem, Wanted, schema_of
from fusedce.contract.results import LossSum
from fusedce.contract.rounding import acc_dtype

_RETURNS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def loss_sum(problem: Problem, divergence: Divergence) -> LossSum:
    """Sum of the tokens' losses, differentiable in the student, and number of valid tokens."""
    problem = _prepared(problem)
    wanted = wanted_gradients(problem)
    if any(wanted):
        problem = with_expected_upstream(problem)
    with torch.no_grad():
        losses, n_valid, factor, *grads = torch.ops.fusedce.divergence(
            *detached(problem), *wanted, *divergence
        )
        total = losses.sum(dtype=torch.float64).to(losses.dtype)
    if any(wanted):
        total = summed.with_gradients(total, factor, problem, grads)
    return LossSum(total, n_valid)


def token_losses(problem: Problem, divergence: Divergence) -> Tensor:
    """``(N,)`` losses, 0 at ignored positions, each with an upstream gradient of its own."""
    losses: Tensor = torch.ops.fusedce.token_divergences(*_prepared(problem), *divergence)
    return losses


def _prepared(problem: Problem) -> Problem:
    refuse_forward_mode(*problem)
    if transformed():
        raise RuntimeError(
            "fused_kl, and fused_cross_entropy of class probabilities, cannot be transformed by "
            "torch.func (vmap, grad): call them and backward() outside of the transform"
        )
    return problem.but(backend=resolve_backend(problem.backend, problem.hidden))


def _records(flat: Any) -> tuple[Problem, Wanted, Divergence]:
    problem = len(Problem._fields)
    wanted = problem + len(Wanted._fields)
    return Problem(*flat[:problem]), Wanted(*flat[problem:wanted]), Divergence(*flat[wanted:])


@torch.library.custom_op(
    "fusedce::divergence",
    mutates_args=(),
    schema=schema_of(Problem, Wanted, Divergence, returns=_RETURNS),
)
def _divergence(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, divergence = _records(flat)
    with torch.autocast(problem.hidden.device.type, enabled=False):
        found = get_backend(problem.backend).divergence_and_grads(problem, divergence, wanted)
    return tuple(found)


@_divergence.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _ = _records(flat)
    acc = acc_dtype(problem.hidden.dtype)
    losses = problem.hidden.new_empty(problem.labels.shape, dtype=acc)
    n_valid = problem.labels.new_empty((), dtype=torch.int64)
    return losses, n_valid, losses.new_empty(()), *summed.fake_grads(problem, wanted)


@torch.library.custom_op(
    "fusedce::token_divergences",
    mutates_args=(),
    schema=schema_of(Problem, Divergence, returns="Tensor"),
)
def _token_divergences(*flat: Any) -> Tensor:
    end = len(Problem._fields)
    losses: Tensor = _divergence(*flat[:end], *Wanted(), *flat[end:])[0]
    return losses


@_token_divergences.register_fake
def _(*flat: Any) -> Tensor:
    problem = Problem(*flat[: len(Problem._fields)])
    acc = acc_dtype(problem.hidden.dtype)
    return problem.hidden.new_empty(problem.labels.shape, dtype=acc)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.wanted = needed_gradients(ctx, Problem)
    at = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.at = at
    ctx.options = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.save_for_backward(*(inputs[i] for i in at))


def _backward(ctx: Any, upstream: Tensor | None) -> tuple[Any, ...]:
    nothing: list[Any] = [None] * len(ctx.options)
    if upstream is None:
        return tuple(nothing)
    refuse_second_derivatives()
    flat = list(ctx.options)
    for i, x in zip(ctx.at, ctx.saved_tensors, strict=True):
        flat[i] = x
    end = len(Problem._fields)
    problem = Problem(*flat[:end])
    # The upstream gradient of an ignored position may be anything, NaN too.
    upstream = upstream.masked_fill(~problem.valid(), 0)
    weight = upstream if problem.token_weight is None else upstream * problem.token_weight
    problem = problem.but(
        token_weight=weight, expected_upstream=torch.ones_like(upstream[:0].sum())
    )
    _, _, _, *grads = torch.ops.fusedce.divergence(*problem, *ctx.wanted, *flat[end:])
    for name, grad in zip(("hidden", "weight", "bias"), grads, strict=True):
        if getattr(ctx.wanted, name):
            nothing[Problem._fields.index(name)] = grad.to(problem.hidden.dtype)
    return tuple(nothing)


_token_divergences.register_autograd(_backward, setup_context=_setup_context)
