"""The sum of the losses, with gradients taken in the forward pass.

The gradients of the *sum* are computed while a chunk of logits is at hand, so backward has nothing
left to do but to multiply them by the upstream gradient, in which the denominator arrives. That
factor is expected beforehand (:func:`fusedce.contract.objective.expected_upstream`) and folded in
before the gradients are rounded; backward multiplies by what it really is over what was expected.

What is kept from forward to backward is those gradients and nothing else: ``N * H`` numbers in
float32 and the head's ``V * H`` (``fusedce.backends.gradients.waiting`` says in which dtype), which
backward would allocate anyway, but from the end of the forward pass on. That saves the logits,
``N * V``, or computing them a second time: 2 of 8 ``N * V * H`` FLOPs, which
:mod:`fusedce.autograd.token_ops` pays and keeps ``(N,)`` numbers instead.

Two operators, so that ``torch.compile`` sees opaque nodes: one computes, the other attaches the
gradients to the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.autograd.derivatives import (
    batched,
    detached,
    keeps_saved_tensors,
    refuse_second_derivatives,
)
from fusedce.backends.choose import get_backend
from fusedce.backends.gradients import waiting
from fusedce.contract.problem import Problem, Wanted, records, schema_of
from fusedce.contract.rounding import acc_dtype


def loss_sum(
    problem: Problem, wanted: Wanted, argmax_out: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``loss_sum ()``, differentiable in the inputs whose gradient is wanted; ``n_valid ()``;

    the likeliest classes ``(N,)``, or ``(0,)``: ``argmax_out (N,)``, where that is to be filled.
    """
    arguments = (*detached(problem), *wanted)
    with torch.no_grad():
        if argmax_out is None:
            total, n_valid, argmax, factor, *grads = torch.ops.fusedce.summed(*arguments)
        else:
            argmax = argmax_out
            total, n_valid, factor, *grads = torch.ops.fusedce.summed_into(*arguments, argmax)
    if any(wanted.gradients()):
        total = with_gradients(total, factor, problem, grads)
    return total, n_valid, argmax


class SumWithGrads(NamedTuple):
    """A sum and its gradients, for somebody with a node of autograd of his own to keep them."""

    loss_sum: Tensor  # ()
    n_valid: Tensor  # ()
    saved: tuple[Tensor, ...]  # the gradients' factor (), then they; (0,) for one not wanted
    wanted: Wanted
    dtype: torch.dtype  # of the inputs
    backend: str
    ours: bool  # `saved` may be written into

    def gradients(self, saved: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Those of hidden state, weight and bias, within a backward pass; ``saved`` is used up.

        ``upstream ()``: what the gradient of ``loss_sum`` is.
        """
        wanted = self.wanted.gradients()
        return scaled(saved, upstream, wanted, self.dtype, self.backend, ours=self.ours)


def with_grads(problem: Problem, wanted: Wanted) -> SumWithGrads:
    with torch.no_grad():
        total, n_valid, _, *saved = torch.ops.fusedce.summed(*problem, *wanted)
    dtype = problem.hidden.dtype
    ours = not keeps_saved_tensors()
    return SumWithGrads(total, n_valid, tuple(saved), wanted, dtype, str(problem.backend), ours)


def with_gradients(total: Tensor, factor: Tensor, problem: Problem, grads: list[Tensor]) -> Tensor:
    """``total``, differentiable: ``grads`` hold ``factor`` times its gradients, or nothing."""
    d_hidden, d_weight, d_bias = grads
    attached = Attached(
        loss_sum=total,
        factor=factor,
        hidden=problem.hidden,
        weight=problem.weight,
        bias=problem.bias,
        d_hidden=d_hidden,
        d_weight=d_weight,
        d_bias=d_bias,
        backend=str(problem.backend),
    )
    result: Tensor = torch.ops.fusedce.with_gradients(*attached)
    return result


@torch.library.custom_op(
    "fusedce::summed",
    mutates_args=(),
    schema=schema_of(
        Problem, Wanted, returns="(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _summed(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _ = records(flat)
    labels = problem.labels
    argmax = labels.new_empty(len(labels) if wanted.argmax else 0, dtype=torch.int64)
    total, n_valid, *grads = _computed(problem, wanted, argmax if wanted.argmax else None)
    return total, n_valid, argmax, *grads


@_summed.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _ = records(flat)
    labels = problem.labels
    argmax = labels.new_empty(labels.shape if wanted.argmax else (0,), dtype=torch.int64)
    total, n_valid, *grads = _fake(problem, wanted)
    return total, n_valid, argmax, *grads


@torch.library.custom_op(
    "fusedce::summed_into",
    mutates_args=("argmax_out",),
    schema=schema_of(
        Problem,
        Wanted,
        more="Tensor(a!) argmax_out",
        returns="(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
)
def _summed_into(*flat: Any) -> tuple[Tensor, ...]:
    """The same with the likeliest classes where the caller wants them."""
    problem, wanted, (argmax_out,) = records(flat)
    return _computed(problem, wanted, argmax_out)


@_summed_into.register_fake
def _(*flat: Any) -> tuple[Tensor, ...]:
    problem, wanted, _ = records(flat)
    return _fake(problem, wanted)


def _computed(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> tuple[Tensor, ...]:
    """``loss_sum, n_valid``, the gradients' factor, three gradients; those (0,) without any."""
    backend = get_backend(problem.backend)
    # Autocast would reach the products inside, which are in the dtype they must be in already.
    with torch.autocast(problem.hidden.device.type, enabled=False):
        if any(wanted.gradients()):
            return tuple(backend.loss_and_grads(problem, wanted, argmax))
        total, n_valid = backend.loss(problem)
        return total, n_valid, *(total.new_empty(0) for _ in range(4))


def _fake(problem: Problem, wanted: Wanted) -> tuple[Tensor, ...]:
    dtype = acc_dtype(problem.hidden.dtype)
    total = problem.hidden.new_empty((), dtype=dtype)
    n_valid = problem.labels.new_empty((), dtype=torch.int64)
    if not any(wanted.gradients()):
        return total, n_valid, *(total.new_empty(0) for _ in range(4))
    inputs = (problem.hidden, problem.weight, problem.bias)
    grads = (
        total.new_empty(x.shape if want and x is not None else (0,), dtype=dtype)
        for x, want, dtype in zip(inputs, wanted.gradients(), waiting(problem), strict=True)
    )
    return total, n_valid, torch.empty_like(total), *grads


class Attached(NamedTuple):
    """A loss and its gradients: arguments of the operator that makes them one."""

    loss_sum: Tensor  # ()
    factor: Tensor  # (): what the gradients are multiplied by already
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    d_hidden: Tensor  # of the shape of hidden, or (0,); so the others
    d_weight: Tensor
    d_bias: Tensor
    backend: str


@torch.library.custom_op(
    "fusedce::with_gradients", mutates_args=(), schema=schema_of(Attached, returns="Tensor")
)
def _with_gradients(*flat: Any) -> Tensor:
    return Attached(*flat).loss_sum.clone()


@_with_gradients.register_fake
def _(*flat: Any) -> Tensor:
    return torch.empty_like(Attached(*flat).loss_sum)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    attached = Attached(*inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(attached.factor, attached.d_hidden, attached.d_weight, attached.d_bias)
    ctx.dtype, ctx.backend = attached.hidden.dtype, attached.backend
    ctx.ours = not keeps_saved_tensors()


def _backward(ctx: Any, upstream: Tensor | None) -> tuple[Any, ...]:
    nothing: Any = [None] * len(Attached._fields)
    if upstream is None:
        return tuple(nothing)
    refuse_second_derivatives()
    needed: Any = Attached(*ctx.needs_input_grad)
    wanted = needed.hidden, needed.weight, needed.bias
    hidden, weight, bias = scaled(
        ctx.saved_tensors, upstream, wanted, ctx.dtype, ctx.backend, ours=ctx.ours
    )
    return tuple(Attached(*nothing)._replace(hidden=hidden, weight=weight, bias=bias))


_with_gradients.register_autograd(_backward, setup_context=_setup_context)


def scaled(
    saved: Sequence[Tensor],
    upstream: Tensor,
    needed: Sequence[bool],
    dtype: torch.dtype,
    backend: str,
    *,
    ours: bool,  # the saved tensors are, and no user's
) -> list[Any]:
    """The gradients behind their factor, times ``upstream`` over what was expected of it."""
    factor, *grads = saved
    ratio = upstream / factor
    return [
        _scaled(grad, ratio, backend, ours=ours).to(dtype) if needs else None
        for grad, needs in zip(grads, needed, strict=True)
    ]


def _scaled(grad: Tensor, factor: Tensor, backend: str, *, ours: bool) -> Tensor:
    """``grad * factor``, in place where nobody will see ``grad`` again.

    Without ``retain_graph`` the saved gradient is ours to overwrite, which saves a second buffer
    of the weight's size. With it, the next backward must find the gradient as it is; and a
    compiler tracing us (with tensor subclasses) must see a pure function. So must a transform,
    which has a factor for each sample.
    """
    if batched(factor):
        return (grad.to(factor.dtype) * factor).to(grad.dtype)
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    if ours and type(grad) is Tensor and not keep:
        get_backend(backend).scale_(grad, factor)
        return grad
    return torch.ops.fusedce.scale(grad, factor, backend)


@torch.library.custom_op(
    "fusedce::scale", mutates_args=(), schema="(Tensor x, Tensor factor, str backend) -> Tensor"
)
def _scale(x: Tensor, factor: Tensor, backend: str) -> Tensor:
    """``x * factor`` with ``factor`` a 0-d tensor kept in its own, higher precision."""
    out = x.clone()
    get_backend(backend).scale_(out, factor)
    return out


@_scale.register_fake
def _(x: Tensor, factor: Tensor, backend: str) -> Tensor:
    return torch.empty_like(x)
