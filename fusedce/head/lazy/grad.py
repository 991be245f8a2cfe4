"""Edges of the autograd graph around lazy logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Anchor(torch.autograd.Function):
    """The edge from lazy logits to what they are made of.

    Its backward runs where something below Python's overrides differentiates them (a user's
    ``autograd.Function``); the fused loss has edges of its own.
    """

    @staticmethod
    def forward(ctx: Any, logits: Any, *sources: Tensor) -> Any:
        ctx.kind, ctx.state, ctx.real = type(logits), logits._state, None
        ctx.set_materialize_grads(False)
        return ctx.kind(logits._state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[1:]
        if grad is None:
            return (None, *(None for _ in wanted))
        s = ctx.state
        real = ctx.kind(s).materialize() if ctx.real is None else ctx.real
        bias = () if s.bias is None else (s.bias,)
        sources = [x for x in (s.hidden, *bias, *s.head.trainable()) if x.requires_grad]
        grads = iter(torch.autograd.grad(real, sources, grad, retain_graph=True, allow_unused=True))
        return (None, *(next(grads) if want else None for want in wanted))


class Reveal(torch.autograd.Function):
    """Real logits ``real`` whose gradient goes where that of ``logits`` would."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, real: Tensor) -> Tensor:
        return real.view_as(real)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Gate(torch.autograd.Function):
    """``x`` itself; its backward also visits what ``gate`` came through, with no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return grad, None
