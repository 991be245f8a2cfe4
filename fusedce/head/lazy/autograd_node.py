"""The autograd node between a head and its lazy logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fusedce.head.lazy.grad_rules  # noqa: F401  # registers rules of lazy gradients
from fusedce.head.call import HeadCall
from fusedce.head.lazy.grad import LogitsGrad, check_not_batched
from fusedce.head.lazy.logits import LazyLogits
from fusedce.head.lazy.memory import Memory
from fusedce.head.lazy.ops import LazyLayout
from fusedce.head.lazy.tensor import real


class MakeLogits(torch.autograd.Function):
    """Lazy logits ``(..., V)`` of a call, as a function of hidden state and parameters."""

    @staticmethod
    def forward(ctx: Any, call: HeadCall, hidden: Tensor, *tensors: Tensor) -> LazyLogits:
        """``hidden (..., H)`` and the head's parameters to lazy logits ``(..., V)``."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(hidden, *tensors)
        shape = (*hidden.shape[:-1], call.V)
        return LazyLogits(Memory(call), (), LazyLayout(shape, hidden.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """The gradients that a lazy gradient carries, plus those of its dense part."""
        needed = ctx.needs_input_grad[1:]
        if grad is None:
            return (None, *(None for _ in needed))
        call: HeadCall = ctx.call
        parts: list[Sequence[Any]] = []
        if isinstance(grad, LogitsGrad):
            grad.sync()
            terms, dense = grad.terms, grad.dense
            if any(t.left or t.call is not call for t in terms):
                terms, dense = (), grad.materialize("backward of the head")
            parts = [[t.scaled(x) for x in t.input_grads] for t in terms]
        else:
            check_not_batched(grad)
            dense = real(grad, "backward of the head")
        if dense is not None:
            live = ctx.saved_tensors if torch.is_grad_enabled() else None
            parts.append(call.gradients(dense, needed, live))
        found: list[Any] = [None] * len(needed)
        for part in parts:
            for i, x in enumerate(part):
                if needed[i] and x is not None:
                    found[i] = x if found[i] is None else found[i] + x
        return None, *found


# This `apply` skips the checks for torch.func, whose transforms run the original head.
make_logits = super(torch.autograd.Function, MakeLogits).apply
