"""The sum of the losses, with gradients taken in the forward pass.

The gradients of the *sum* are computed while a chunk of logits is at hand, so backward has nothing
left to do but to multiply them by the upstream gradient, in which the denominator arrives. That
factor is expected beforehand (:func:`fusedce.contract.objective.expected_upstream`) and multiplied
in before the gradients are rounded; backward multiplies by the real factor over the expected one.

Those gradients alone are kept from forward to backward: ``N * H`` numbers in float32 and the head's
``V * H`` in its own dtype (:func:`fusedce.backends.gradients.saved_grad_dtypes`). So gradients
exist from the end of the forward pass on, that of bfloat16 hidden states in twice its bytes. That
saves the logits, ``N * V``, or computing them a second time: 2 of 8 ``N * V * H`` FLOPs, which
:mod:`fusedce.autograd.tokens` pays, and keeps ``(N,)`` numbers instead.

Eager code runs one ``torch.autograd.Function``. Compilers, modes and tensor subclasses see two
operators instead, opaque nodes: one computes, the other attaches the gradients to the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.backends.choose import get_backend
from fusedce.backends.gradients import Gradients, saved_grad_dtypes
from fusedce.contract.problem import (
    Outputs,
    Problem,
    Task,
    acc_dtype,
    schema_of,
)

Computed = tuple[Any, ...]
"""``loss_sum, n_valid``, argmax or None; with gradients their factor and these, (0,) for none."""


def loss_sum(task: Task) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``loss_sum ()``, ``n_valid ()`` and the likeliest classes ``(N,)`` int64.

    The sum is differentiable in the inputs whose gradient is wanted. The classes are something else
    where ``wanted`` does not name them.
    """
    problem = task.problem
    train = task.wanted.hidden or task.wanted.weight or task.wanted.bias  # (Dynamo before 2.9)
    if in_eager_mode(problem):
        if train:
            found: tuple[Tensor, Tensor, Tensor | None] = _Sum.apply(
                problem.hidden, problem.weight, problem.bias, task
            )
            return found
        total, n_valid, argmax, *_ = compute(task)
        return total, n_valid, argmax
    with torch.no_grad():
        total, n_valid, argmax, factor, *grads = torch.ops.fusedce.sum(*task.flat())
    if train:
        attached: tuple[Any, ...] = (total, factor, problem.hidden, problem.weight, problem.bias)
        total = torch.ops.fusedce.attach(*attached, *grads, problem.backend)
    return total, n_valid, argmax


def in_eager_mode(problem: Problem) -> bool:
    """Whether nobody looks at operators: no compiler, mode or subclass of tensors.

    Then the functions behind them are called directly. The dispatcher takes longer than they do: it
    fills in defaults in a time that is quadratic in the number of arguments.
    """
    hidden, weight, labels, bias, token_weight, *_ = problem
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
        and {type(hidden), type(weight), type(labels), type(bias), type(token_weight)} <= _PLAIN
    )


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


class _Sum(torch.autograd.Function):
    """The sum in eager mode."""

    @staticmethod
    def forward(  # (a setup_context of its own would cost 50 us of `inspect`)
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: Task
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        total, n_valid, argmax, *saved = compute(task)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in (n_valid, argmax) if x is not None))
        ctx.save_for_backward(*saved)
        ours, backend = not keeps_saved_tensors(), str(task.problem.backend)
        ctx.finish = Finish(task.wanted, hidden.dtype, backend, ours)
        return total, n_valid, argmax

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Any, ...]:
        if upstream is None:
            return None, None, None, None
        check_upstream(upstream)
        return (*ctx.finish.gradients(ctx.saved_tensors, upstream), None)


class Finish(NamedTuple):
    """How backward turns saved gradients into those of the inputs."""

    wanted: Outputs
    dtype: torch.dtype  # of the inputs
    backend: str
    ours: bool  # the saved tensors cannot be a user's, so they may be written into

    def gradients(self, saved: Sequence[Tensor], upstream: Tensor) -> list[Any]:
        """Multiply the saved gradients by ``upstream () / expected factor``; may overwrite them.

        Returns the gradients of hidden, weight and bias, ``None`` where not wanted.
        """
        factor, *grads = saved
        ratio = upstream / factor
        return [
            _scaled(grad, ratio, self.backend, ours=self.ours).to(self.dtype) if wants else None
            for grad, wants in zip(grads, self.wanted[:3], strict=True)
        ]


def compute(task: Task) -> Computed:
    """The sum, and the gradients that are wanted."""
    if torch._C._is_any_autocast_enabled():
        # It would reach the products inside, which are in the dtype they must be in already.
        with torch.autocast(task.problem.hidden.device.type, enabled=False):
            return _compute(task)
    return _compute(task)


def _compute(task: Task) -> Computed:
    problem, wanted, divergence, _ = task
    labels, backend = problem.labels, get_backend(problem.backend)
    argmax = None
    if wanted.argmax:
        argmax = torch.empty(labels.shape, dtype=torch.int64, device=labels.device)
    if divergence is not None:
        losses, n_valid, *grads = backend.divergence_and_grads(task)
        total = losses.sum(dtype=torch.float64).to(losses.dtype)
    elif wanted.hidden or wanted.weight or wanted.bias:
        total, n_valid, *grads = backend.loss_and_grads(task, argmax)
    else:
        total, n_valid = backend.loss(problem)
        grads = []
    return total, n_valid, argmax, *grads


@torch.library.custom_op(
    "fusedce::sum",
    mutates_args=(),
    schema=schema_of("(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", *Task.records()),
)
def _summed(*flat: Any) -> Computed:
    total, n_valid, argmax, *grads = compute(Task.of(flat)[0])
    argmax = n_valid.new_empty(0) if argmax is None else argmax
    return total, n_valid, argmax, *(grads or (total.new_empty(0) for _ in range(4)))


@_summed.register_fake
def _(*flat: Any) -> Computed:
    problem, wanted, divergence, _ = Task.of(flat)[0]
    labels = problem.labels
    total = problem.hidden.new_empty((), dtype=acc_dtype(problem.hidden.dtype))
    n_valid = labels.new_empty((), dtype=torch.int64)
    argmax = labels.new_empty(labels.shape if wanted.argmax else (0,), dtype=torch.int64)
    if divergence is None and not any(wanted.gradients()):
        return total, n_valid, argmax, *(total.new_empty(0) for _ in range(4))
    grads = Gradients(problem, wanted, dtypes=saved_grad_dtypes(problem), chunks=1).cast_out()
    return total, n_valid, argmax, torch.empty_like(total), *grads


class Attached(NamedTuple):
    """A loss and its gradients: arguments of the operator that puts them into one graph."""

    loss_sum: Tensor  # ()
    factor: Tensor  # (): the gradients are multiplied by it already
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    d_hidden: Tensor  # of the shape of hidden, or (0,); so the others
    d_weight: Tensor
    d_bias: Tensor
    backend: str


@torch.library.custom_op("fusedce::attach", mutates_args=(), schema=schema_of("Tensor", Attached))
def _with_gradients(*flat: Any) -> Tensor:
    return Attached(*flat).loss_sum.clone()


@_with_gradients.register_fake
def _(*flat: Any) -> Tensor:
    return torch.empty_like(Attached(*flat).loss_sum)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    attached = Attached(*inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(attached.factor, attached.d_hidden, attached.d_weight, attached.d_bias)
    ctx.wanted, ctx.dtype = needed_gradients(ctx, Attached), attached.hidden.dtype
    ctx.backend, ctx.ours = attached.backend, not keeps_saved_tensors()


def _backward(ctx: Any, upstream: Tensor | None) -> tuple[Any, ...]:
    nothing: Any = [None] * len(Attached._fields)
    if upstream is None:
        return tuple(nothing)
    check_upstream(upstream)
    factor, *grads = ctx.saved_tensors
    given: list[Any] = [
        _scaled(grad, upstream / factor, ctx.backend, ours=ctx.ours).to(ctx.dtype)
        if wants
        else None
        for grad, wants in zip(grads, ctx.wanted.gradients(), strict=True)
    ]
    hidden, weight, bias = given
    return tuple(Attached(*nothing)._replace(hidden=hidden, weight=weight, bias=bias))


_with_gradients.register_autograd(_backward, setup_context=_setup_context)


def keeps_saved_tensors() -> bool:
    """Whether tensors saved for backward now go to a user's ``saved_tensors_hooks``.

    Backward then gets what the hooks return, which may be the user's tensors: it must not write
    into them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _scaled(grad: Tensor, factor: Tensor, backend: str, *, ours: bool) -> Tensor:
    """``grad * factor``, in place where ``grad`` is not read again.

    Without ``retain_graph`` the saved gradient may be overwritten, which saves a second buffer of
    the weight's size. With it, the next backward must find the gradient as it is; and a compiler
    that traces this function (with tensor subclasses) must see a pure function.
    """
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    if not ours or type(grad) is not Tensor or keep:
        product = (grad.to(factor.dtype) * factor).to(grad.dtype)
        return product.masked_fill(grad == 0, 0)  # of a factor of inf, without a valid token
    get_backend(backend).scale_(grad, factor)
    return grad


# ---- of both kinds of operators ------------------------------------------------------------------


def needed_gradients(ctx: Any, record: Any) -> Outputs:
    """Gradients that the graph will ask of an operator; to be asked in its ``setup_context``.

    ``record`` is the tuple of the operator's first arguments. Later is too late: while a custom
    operator's backward pass runs, torch 2.13 shortens ``ctx.needs_input_grad`` for all threads.
    """
    needed = record(*ctx.needs_input_grad[: len(record._fields)])
    return Outputs(hidden=needed.hidden, weight=needed.weight, bias=bool(needed.bias))


def check_upstream(*upstream: Tensor | None) -> None:
    """Raise RuntimeError where backward is itself recorded, or takes a batch of gradients."""
    given = [u for u in upstream if u is not None]
    if not given or torch.compiler.is_compiling():
        return
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fused_ce: the gradient of the loss is not differentiable (create_graph=True was "
            "given): its formula is written by hand. Use F.cross_entropy(F.linear(hidden, weight, "
            "bias), labels) for second derivatives"
        )
    of_func = torch._C._functorch
    if any(of_func.is_legacy_batchedtensor(u) or of_func.is_batchedtensor(u) for u in given):
        raise RuntimeError(
            "fused_ce: a loss takes one gradient at a time, not a batch of them "
            "(is_grads_batched=True, vectorize=True, or vmap around autograd.grad): call "
            "torch.autograd.grad(..., retain_graph=True) for each, or use "
            "F.cross_entropy(F.linear(hidden, weight, bias), labels)"
        )
