"""The one node of autograd between a head and its lazy logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.head.call import HeadCall
from fusedce.head.lazy.grad import LogitsGrad, real
from fusedce.head.lazy.logits import LazyLogits, Memory
from fusedce.head.lazy.ops import Layout


class MakeLogits(torch.autograd.Function):
    """``(..., V)`` of a call of the head; the graph leads to all that it was made of."""

    @staticmethod
    def forward(ctx: Any, call: HeadCall, hidden: Tensor, *tensors: Tensor) -> LazyLogits:
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(hidden, *tensors)
        shape = (*hidden.shape[:-1], call.V)
        return LazyLogits(Memory(call), (), Layout(shape, hidden.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        needed = ctx.needs_input_grad[1:]
        if grad is None:
            return (None, *(None for _ in needed))
        call: HeadCall = ctx.call
        parts: list[list[Any]] = []
        if isinstance(grad, LogitsGrad):
            grad.sync()
            terms, dense = grad.terms, grad.dense
            if any(t.left or t.call is not call for t in terms):
                terms, dense = (), grad.look("backward of the head")
            for t in terms:
                parts.append([t.scaled(x) for x in t.comes_to])
        else:
            dense = real(grad, "backward of the head")
        if dense is not None:
            live = ctx.saved_tensors if torch.is_grad_enabled() else None
            parts.append(call.gradients(dense, needed, live))
        found = []
        for i, need in enumerate(needed):
            grads = [p[i] for p in parts if need and p[i] is not None]
            found.append(sum(grads[1:], grads[0]) if grads else None)
        return (None, *found)
