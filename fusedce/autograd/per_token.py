"""Statistics of every token's logits, differentiable each with a gradient of its own.

What the backward pass of :mod:`fusedce.autograd.summed` gets for nothing, a gradient of the forward
pass, is of a sum with one upstream factor. Here each token has its own factors, which are known
only in backward: it computes the logits a second time, tile by tile, and stores none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.backends.choose import get_token_backend
from fusedce.contract.objective import Objective, Stats, Upstream, token_losses


def token_ce(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    backend: str,
    objective: Objective,
    *,
    want_argmax: bool = False,
) -> tuple[Tensor, Stats]:
    """``losses (N,)``, fp32 or fp64, 0 at ignored positions; and what they are made of."""
    objective = objective.folded(labels)
    stats = token_stats(
        hidden, weight, labels, bias, ignore_index, softcap, logit_scale, chunk_tokens, backend,
        class_weight=objective.class_weight if objective.label_smoothing else None,
        token_weight=objective.token_weight,
        want_argmax=want_argmax,
        want_zmean=objective.label_smoothing > 0,
    )  # fmt: skip
    y = labels.long().clamp(0, weight.shape[0] - 1)
    losses = token_losses(
        objective, y, stats.nll, stats.lse, stats.zmean if objective.label_smoothing else None
    )
    # Weights of ignored positions, and of the class their label was clamped to, may be anything.
    return losses.masked_fill(labels == ignore_index, 0), stats


def token_stats(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    backend: str,
    *,
    class_weight: Tensor | None = None,  # (V,) of zmean
    token_weight: Tensor | None = None,  # (N,): tokens of weight 0 are left out
    want_entropy: bool = False,
    want_argmax: bool = False,
    want_zmean: bool = False,
) -> Stats:
    """One pass; nll, lse, entropy and zmean are differentiable in hidden, weight and bias."""
    from fusedce.autograd.summed import refuse_transforms  # which sits on this module

    refuse_transforms(hidden, weight, bias)
    return Stats(
        *torch.ops.fusedce.token_stats(
            hidden, weight, labels, bias, class_weight, token_weight, ignore_index, softcap,
            logit_scale, chunk_tokens, backend, want_entropy, want_argmax, want_zmean,
        )
    )  # fmt: skip


@torch.library.custom_op(
    "fusedce::token_stats",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor? class_weight, "
    "Tensor? token_weight, int ignore_index, float? softcap, float logit_scale, "
    "int? chunk_tokens, str backend, bool want_entropy, bool want_argmax, bool want_zmean) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _token_stats(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    backend: str,
    want_entropy: bool,
    want_argmax: bool,
    want_zmean: bool,
) -> tuple[Tensor, ...]:
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return tuple(
            get_token_backend(backend).token_stats(
                hidden, weight, labels, bias, ignore_index, softcap, logit_scale, class_weight,
                token_weight, want_entropy, want_argmax, want_zmean,
            )
        )  # fmt: skip


@_token_stats.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    backend: str,
    want_entropy: bool,
    want_argmax: bool,
    want_zmean: bool,
) -> tuple[Tensor, ...]:
    N = len(labels)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    nll, lse, entropy, zmean = (
        hidden.new_empty((N if wanted else 0,), dtype=dtype)
        for wanted in (True, True, want_entropy, want_zmean)
    )
    argmax = labels.new_empty((N if want_argmax else 0,), dtype=torch.int64)
    return nll, lse, entropy, zmean, argmax, labels.new_empty((), dtype=torch.int64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, bias, class_weight, _, *ctx.options = inputs
    nll, lse, entropy, _, argmax, n_valid = output
    ctx.mark_non_differentiable(argmax, n_valid)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, labels, bias, class_weight, nll, lse, entropy)


def _backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    from fusedce.autograd.summed import refuse_second_derivatives

    nothing: list[Tensor | None] = [None] * (6 + len(ctx.options))
    wanted = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    if all(u is None for u in upstream[:4]) or not any(wanted):
        return tuple(nothing)
    refuse_second_derivatives()
    hidden, weight, labels, bias, class_weight, nll, lse, entropy = ctx.saved_tensors
    ignore_index, softcap, logit_scale, chunk_tokens, backend, *_ = ctx.options
    grads = torch.ops.fusedce.token_grads(
        hidden, weight, labels, bias, class_weight, nll, lse, entropy, *upstream[:4],
        ignore_index, softcap, logit_scale, chunk_tokens, backend, *wanted,
    )  # fmt: skip
    for position, grad, need in zip((0, 1, 3), grads, wanted, strict=True):
        if need:
            nothing[position] = grad
    return tuple(nothing)


_token_stats.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op(
    "fusedce::token_grads",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor? class_weight, "
    "Tensor nll, Tensor lse, Tensor entropy, Tensor? u_nll, Tensor? u_lse, Tensor? u_entropy, "
    "Tensor? u_zmean, int ignore_index, float? softcap, float logit_scale, int? chunk_tokens, "
    "str backend, bool grad_hidden, bool grad_weight, bool grad_bias) -> (Tensor, Tensor, Tensor)",
)
def _token_grads(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    nll: Tensor,
    lse: Tensor,
    entropy: Tensor,
    u_nll: Tensor | None,
    u_lse: Tensor | None,
    u_entropy: Tensor | None,
    u_zmean: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    backend: str,
    grad_hidden: bool,
    grad_weight: bool,
    grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = _empty(hidden, weight, bias, grad_hidden, grad_weight, grad_bias)
    upstream = _upstream(
        weight.shape[0], labels, class_weight, nll, lse, entropy, u_nll, u_lse, u_entropy, u_zmean
    )
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        get_token_backend(backend).token_grads(
            hidden, weight, labels, bias, ignore_index, softcap, logit_scale, class_weight,
            chunk_tokens, lse, upstream,
            *(g if need else None
              for g, need in zip(grads, (grad_hidden, grad_weight, grad_bias), strict=True)),
        )  # fmt: skip
    return grads


@_token_grads.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    nll: Tensor,
    lse: Tensor,
    entropy: Tensor,
    u_nll: Tensor | None,
    u_lse: Tensor | None,
    u_entropy: Tensor | None,
    u_zmean: Tensor | None,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    backend: str,
    grad_hidden: bool,
    grad_weight: bool,
    grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(hidden, weight, bias, grad_hidden, grad_weight, grad_bias)


def _empty(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The upstream factors are in already, so gradients are of their inputs' dtype."""
    d_hidden, d_weight, d_bias = (
        hidden.new_empty(x.shape if need and x is not None else (0,))
        for x, need in zip((hidden, weight, bias), needed, strict=True)
    )
    return d_hidden, d_weight, d_bias


def _upstream(
    V: int,
    labels: Tensor,  # (N,)
    class_weight: Tensor | None,  # (V,)
    nll: Tensor,  # (N,)
    lse: Tensor,  # (N,)
    entropy: Tensor,  # (N,), or (0,)
    u_nll: Tensor | None,  # (N,) upstream gradients
    u_lse: Tensor | None,
    u_entropy: Tensor | None,
    u_zmean: Tensor | None,
) -> Upstream:
    """Factors of the gradient of a row of logits, by

    ``d nll = p - onehot,  d lse = p,  d entropy = -p * (log p + entropy),  d zmean = c / V``.
    """
    p_label = torch.exp(-nll.double())
    alpha = torch.zeros_like(p_label)
    at_label = torch.zeros_like(p_label)
    used = torch.zeros_like(labels, dtype=torch.bool)
    beta = gamma = None
    if u_nll is not None:
        alpha += u_nll
        at_label += u_nll * torch.expm1(-nll.double())  # p - 1 without cancellation
        used |= u_nll != 0
    if u_lse is not None:
        alpha += u_lse
        at_label += u_lse * p_label
        used |= u_lse != 0
    if u_entropy is not None:
        beta = u_entropy
        alpha -= u_entropy * entropy.double()
        # (0 at p = 0, where log p is -inf)
        surprise = p_label * (nll.double() - entropy).masked_fill(p_label == 0, 0)
        at_label += u_entropy * surprise
        used |= u_entropy != 0
    if u_zmean is not None:
        gamma = u_zmean / V
        c = 1.0 if class_weight is None else class_weight[labels.long().clamp(0, V - 1)]
        at_label += gamma.double() * c
        used |= u_zmean != 0
    return Upstream(alpha, beta, gamma, at_label, used)
