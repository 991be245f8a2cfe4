"""The sum of the losses, with gradients taken in the forward pass.

The gradients of the *sum* are computed while a chunk of logits is at hand, so backward has nothing
left to do but to multiply them by the upstream gradient, in which the denominator arrives. That
factor is expected beforehand (:func:`fusedce.backends.gradients.expected_upstream`) and multiplied
in before the gradients are rounded; backward multiplies by the real factor over the expected one.

Those gradients alone are kept from forward to backward: ``N * H`` numbers in float32 and the head's
``V * H`` in its own dtype (:func:`fusedce.backends.gradients.saved_grad_dtypes`). So gradients
exist from the end of the forward pass on, that of bfloat16 hidden states in twice its bytes. That
saves the logits, ``N * V``, or computing them a second time: 2 of 8 ``N * V * H`` FLOPs, which
:mod:`fusedce.autograd.tokens` pays, and keeps ``(N,)`` numbers instead.

One ``torch.autograd.Function`` serves everywhere: eager code calls it, and it is the Autograd
kernel of the operator that compilers, modes and tensor subclasses see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ..backends.choose import get_backend
from ..backends.gradients import Gradients, saved_grad_dtypes
from ..contract.problem import ACC_DTYPE, Problem, Task, schema_of
from . import NAMESPACE, OPERATORS

Computed = tuple[Any, ...]
"""``loss_sum, n_valid``, argmax or None; with gradients their factor and these, (0,) for none."""


def loss_sum(task: Task) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``loss_sum ()``, ``n_valid ()`` and the likeliest classes ``(N,)`` int64.

    The sum is differentiable in the inputs whose gradient is wanted. The classes are something else
    where ``wanted`` does not name them.
    """
    problem, wanted, *_ = task
    if not in_eager_mode(problem):
        found = OPERATORS.sum(*task.flat())
    elif wanted.hidden or wanted.weight or wanted.bias:  # (Dynamo before 2.9 cannot trace `any`)
        found = _Sum.apply(problem.hidden, problem.weight, problem.bias, task, compute)
    else:
        found = compute(task)
    total, n_valid, argmax, *_ = found
    return total, n_valid, argmax


def in_eager_mode(problem: Problem) -> bool:
    """Whether nobody looks at operators: no compiler, mode or subclass of tensors.

    Then the functions behind them are called directly. The dispatcher takes longer than they do: it
    fills in defaults in a time that is quadratic in the number of arguments.
    """
    given = problem.hidden, problem.weight, problem.labels, problem.bias, problem.token_weight
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
        and _PLAIN.issuperset(map(type, given))
    )


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


class _Sum(torch.autograd.Function):
    """The sum, differentiable in hidden, weight and bias."""

    @staticmethod
    def forward(  # (a setup_context of its own would cost 50 us of `inspect`)
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        task: Task,
        run: Callable[[Task], Computed],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        total, n_valid, argmax, *saved = run(task)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in (n_valid, argmax) if x is not None))
        ctx.save_for_backward(*saved)
        ctx.wanted, ctx.dtype = task.wanted.gradients(), hidden.dtype
        ctx.backend, ctx.ours = str(task.problem.backend), not keeps_saved_tensors()
        return total, n_valid, argmax

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: None) -> tuple[Any, ...]:
        """Multiply the saved gradients by ``upstream () / expected factor``."""
        if upstream is None:
            return None, None, None, None, None
        check_upstream(upstream)
        factor, *grads = ctx.saved_tensors
        kept = [grad for grad, wants in zip(grads, ctx.wanted, strict=True) if wants]
        made = iter(_scaled(kept, upstream / factor, ctx.dtype, ctx.backend, ours=ctx.ours))
        return *(next(made) if wants else None for wants in ctx.wanted), None, None


def compute(task: Task) -> Computed:
    """The sum, and the gradients that are wanted."""
    problem, wanted, divergence, _ = task
    labels, backend = problem.labels, get_backend(problem.backend)
    argmax = None
    if wanted.argmax:
        argmax = torch.empty(labels.shape, dtype=torch.int64, device=labels.device)
    casts = torch._C._is_any_autocast_enabled()
    # It would reach the products inside, which are in the dtype they must be in already.
    with torch.autocast(labels.device.type, enabled=False) if casts else nullcontext():
        if divergence is not None:
            losses, n_valid, *grads = backend.divergence_and_grads(task)
            total = losses.sum(dtype=torch.float64).to(losses.dtype)
        elif wanted.hidden or wanted.weight or wanted.bias:
            total, n_valid, *grads = backend.loss_and_grads(task, argmax)
        else:
            total, n_valid = backend.loss(problem)
            grads = []
    return total, n_valid, argmax, *grads


# ---- the operator --------------------------------------------------------------------------------

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_SCHEMA = schema_of("(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)", *Task.records())
_LIBRARY.define(f"sum{_SCHEMA}", tags=torch.Tag.pt2_compliant_tag)


def _summed(*flat: Any) -> Computed:
    total, n_valid, argmax, *grads = compute(Task.of(flat)[0])
    argmax = n_valid.new_empty(0) if argmax is None else argmax
    # Small ones may share memory, as an operator's results must not.
    total, *grads = (x.clone() if x.numel() < 2 else x for x in (total, *grads))
    return total, n_valid, argmax, *(grads or (total.new_empty(0) for _ in range(4)))


def _with_autograd(*flat: Any) -> Computed:
    """The operator where gradients may be recorded; the caller gets none that are kept."""
    task: Task = Task.of(flat)[0]
    if not (torch.is_grad_enabled() and any(task.wanted.gradients())):
        return _below_autograd(task)
    problem = task.problem
    found = _Sum.apply(problem.hidden, problem.weight, problem.bias, task, _below_autograd)
    return *found, *(found[0].detach().new_empty(0) for _ in range(4))


def _below_autograd(task: Task) -> Computed:
    with torch._C._AutoDispatchBelowAutograd():
        return tuple(OPERATORS.sum(*task.flat()))


@torch.library.register_fake(f"{NAMESPACE}::sum", lib=_LIBRARY)
def _(*flat: Any) -> Computed:
    problem, wanted, divergence, _ = Task.of(flat)[0]
    labels = problem.labels
    total = problem.hidden.new_empty((), dtype=ACC_DTYPE[problem.hidden.dtype])
    n_valid = labels.new_empty((), dtype=torch.int64)
    argmax = labels.new_empty(labels.shape if wanted.argmax else (0,), dtype=torch.int64)
    if divergence is None and not any(wanted.gradients()):
        return total, n_valid, argmax, *(total.new_empty(0) for _ in range(4))
    grads = Gradients(problem, wanted, dtypes=saved_grad_dtypes(problem), chunks=1).cast_out()
    return total, n_valid, argmax, torch.empty_like(total), *grads


_LIBRARY.impl("sum", _disable_dynamo(_summed), "CompositeExplicitAutograd")
_LIBRARY.impl("sum", _disable_dynamo(_with_autograd), "Autograd")


def keeps_saved_tensors() -> bool:
    """Whether tensors saved for backward now go to a user's ``saved_tensors_hooks``.

    Backward then gets what the hooks return, which may be the user's tensors: it must not write
    into them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _scaled(
    grads: list[Tensor], factor: Tensor, dtype: torch.dtype, backend: str, *, ours: bool
) -> list[Tensor]:
    """``grad * factor`` in ``dtype`` for each of ``grads``, in place where they are not read again.

    Without ``retain_graph`` the saved gradients may be overwritten, which saves a second buffer of
    the weight's size. With it, the next backward must find the gradients as they are; and a
    compiler that traces this function (with tensor subclasses) must see a pure function.
    """
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    if ours and not keep and all(type(grad) is Tensor for grad in grads):
        return get_backend(backend).scaled(grads, factor, dtype)
    # Not the 0 of a factor of inf, without a valid token: 0 * inf.
    return [(grad.to(factor.dtype) * factor).masked_fill(grad == 0, 0).to(dtype) for grad in grads]


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
