"""The operator and its gradient.

The gradients of the *sum* are computed in the forward pass, while a chunk of logits is at hand,
so backward has nothing left to do but to multiply them by the upstream gradient (in which the
denominator arrives). One ``torch.library`` operator holds the whole host loop, so
``torch.compile`` sees a single opaque node.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedce.autograd.per_token import token_ce
from fusedce.backends.choose import get_backend, resolve_backend
from fusedce.contract.objective import PLAIN, Objective


def linear_ce(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    backend: str,
    objective: Objective = PLAIN,
    argmax: Tensor | None = None,  # (N,) int64 to fill
) -> tuple[Tensor, Tensor]:
    """``(loss_sum, n_valid)``; computes the gradients of those inputs that require one.

    Two ways lead there. The plain one takes the gradients in the forward pass. What needs more
    than that is summed up from the statistics of the tokens: options without gradients, and label
    smoothing of soft-capped logits, whose gradient is no outer product.
    """
    refuse_transforms(hidden, weight, bias)
    grad = torch.is_grad_enabled()
    train = grad and any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    objective = objective.folded(labels)
    by_token = softcap is not None and objective.label_smoothing > 0
    if by_token or (not train and not (objective.plain and argmax is None)):
        losses, stats = token_ce(
            hidden, weight, labels, bias, ignore_index, softcap, logit_scale, chunk_tokens,
            backend, objective, want_argmax=argmax is not None,
        )  # fmt: skip
        if argmax is not None:
            argmax.copy_(stats.argmax)
        return losses.sum(dtype=torch.float64).to(losses.dtype), stats.n_valid
    out = torch.ops.fusedce.linear_ce(
        hidden,
        weight,
        labels,
        bias,
        ignore_index,
        softcap,
        logit_scale,
        chunk_tokens,
        backend,
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad,
        *objective,
        argmax is not None,
    )
    if argmax is not None:
        argmax.copy_(out[5])
    return out[0], out[1]


def grad_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a gradient waits for its upstream factor.

    The unscaled gradient of a sum can leave float16's range although the scaled one fits it, so
    float16 waits in float32. The other dtypes have the range of float32 or more.
    """
    return torch.float32 if dtype == torch.float16 else dtype


@torch.library.custom_op(
    "fusedce::linear_ce",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, int ignore_index, "
    "float? softcap, float logit_scale, int? chunk_tokens, str backend, bool grad_hidden, "
    "bool grad_weight, bool grad_bias, float label_smoothing=0., float z_loss=0., "
    "Tensor? token_weight=None, Tensor? class_weight=None, bool want_argmax=False) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _linear_ce(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    backend: str,
    grad_hidden: bool,
    grad_weight: bool,
    grad_bias: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    want_argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    run = get_backend(backend)
    # Autocast would reach the products inside, which are in the dtype they must be in already.
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        if not (grad_hidden or grad_weight or grad_bias):
            loss_sum, n_valid, _ = run.loss(
                hidden, weight, labels, bias, ignore_index, softcap, logit_scale
            )
            return (loss_sum, n_valid, *_nothing(hidden))
        d_hidden, d_weight, d_bias = _empty_grads(
            hidden, weight, bias, grad_hidden, grad_weight, grad_bias
        )
        argmax = labels.new_full((len(labels) if want_argmax else 0,), -1, dtype=torch.int64)
        loss_sum, n_valid = run.loss_and_grads(
            hidden,
            weight,
            labels,
            bias,
            ignore_index,
            softcap,
            logit_scale,
            chunk_tokens,
            d_hidden if grad_hidden else None,
            d_weight if grad_weight else None,
            d_bias if grad_bias else None,
            Objective(label_smoothing, z_loss, token_weight, class_weight),
            argmax if want_argmax else None,
        )
        return loss_sum, n_valid, d_hidden, d_weight, d_bias, argmax


def _nothing(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x.new_empty(0), x.new_empty(0), x.new_empty(0), x.new_empty(0)


def _empty_grads(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = grad_dtype(hidden.dtype)
    d_hidden, d_weight, d_bias = (
        torch.empty(x.shape if need and x is not None else (0,), dtype=dtype, device=hidden.device)
        for x, need in zip((hidden, weight, bias), needed, strict=True)
    )
    return d_hidden, d_weight, d_bias


@_linear_ce.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    backend: str,
    grad_hidden: bool,
    grad_weight: bool,
    grad_bias: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    want_argmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    loss_sum = hidden.new_empty((), dtype=dtype)
    n_valid = labels.new_empty((), dtype=torch.int64)
    if not (grad_hidden or grad_weight or grad_bias):
        return (loss_sum, n_valid, *_nothing(hidden))
    grads = _empty_grads(hidden, weight, bias, grad_hidden, grad_weight, grad_bias)
    argmax = labels.new_empty((len(labels) if want_argmax else 0,), dtype=torch.int64)
    return loss_sum, n_valid, *grads, argmax


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, n_valid, *grads, argmax = output
    ctx.mark_non_differentiable(n_valid, *grads, argmax)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*grads)
    ctx.needed = inputs[9:12]
    ctx.dtype = inputs[0].dtype


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    result: list[Tensor | None] = [None] * 17
    if grad_loss is None:
        return tuple(result)
    refuse_second_derivatives()
    for position, grad, needed in zip((0, 1, 3), ctx.saved_tensors, ctx.needed, strict=True):
        if needed:
            result[position] = _scaled(grad, grad_loss).to(ctx.dtype)
    return tuple(result)


def refuse_transforms(*inputs: Tensor | None) -> None:
    """Raise RuntimeError for derivatives that would be missing or wrong without a word."""
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError(
            "fusedce works with autograd (backward, torch.autograd.grad), not inside transforms of "
            "torch.func (grad, jvp, vmap): use F.cross_entropy(F.linear(...)) there"
        )
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    ):
        raise RuntimeError(
            "fusedce has no forward-mode derivative (an input is a dual tensor): use "
            "F.cross_entropy(F.linear(...)) for it"
        )


def refuse_second_derivatives() -> None:
    """Raise RuntimeError where a backward pass is itself recorded."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "fused_ce: the gradient of the loss is not differentiable (create_graph=True was "
            "given): its formula is written by hand. Use F.cross_entropy(F.linear(...)) for "
            "second derivatives."
        )


def _scaled(grad: Tensor, g: Tensor) -> Tensor:
    """``grad * g``, in place where nobody will see the unscaled gradient again.

    Without ``retain_graph`` the saved gradient is ours to overwrite, which saves a second buffer
    of the weight's size. With it, the next backward must find the gradient as it is; and a
    compiler tracing us (with tensor subclasses) must see a pure function.
    """
    if type(grad) is Tensor and not torch._C._autograd._get_current_graph_task_keep_graph():
        _scale_backend(grad).scale_(grad, g)
        return grad
    return torch.ops.fusedce.scale(grad, g)


_linear_ce.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("fusedce::scale", mutates_args=())
def _scale(x: Tensor, g: Tensor) -> Tensor:
    """``x * g`` with ``g`` a 0-d tensor kept in its own, higher precision."""
    out = x.clone()
    _scale_backend(x).scale_(out, g)
    return out


@_scale.register_fake
def _(x: Tensor, g: Tensor) -> Tensor:
    return torch.empty_like(x)


def _scale_backend(x: Tensor) -> ModuleType:
    return get_backend(resolve_backend(None, x))
