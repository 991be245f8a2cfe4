"""Gradients of a window: their sizes, and the one correction by ``finish``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fusedce.contract.groups import local_of

STREAMED = 1024  # the denominator of streaming losses, a power of two: it rounds nothing
LISTENERS: list[Callable[[float], object]] = []
"""Called with the factor of each correction of gradients, by tools."""


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """``p.grad *= factor`` in place; each product is rounded once, the factor never."""
    for listener in LISTENERS:
        listener(factor)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in parameters:
        grad = local_of(p.grad)
        grad = grad._values() if grad.is_sparse else grad
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in groups.items():
        if device.type == "cuda":
            torch._foreach_mul_(grads, factor)
        else:  # on a CPU that rounds the factor to the gradients' dtype
            for grad in grads:
                grad.mul_(factor)


def norms_of(parameters: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """``()`` for each gradient, the sum of absolute values; by default in its own dtype."""
    grads = [local_of(p.grad) for p in parameters]
    grads = [grad._values() if grad.is_sparse else grad for grad in grads]
    return list(torch._foreach_norm(grads, 1, dtype)) if grads else []
