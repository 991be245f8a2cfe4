"""What a model was told that its loss is divided by, for its head to know beforehand.

Models of transformers take ``num_items_in_batch``, add their cross-entropies up and divide by it.
Whoever expects another number loses nothing but a rounding (:mod:`fusedce.contract.denominator`):
so that of the last call stays until the next.
"""

from __future__ import annotations

import contextvars
from typing import Any

import torch
from torch import Tensor, nn

_items: contextvars.ContextVar[Tensor | float | None] = contextvars.ContextVar(
    "fusedce_num_items_in_batch", default=None
)


def note_items(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A hook before a model's forward."""
    if torch.compiler.is_compiling():
        return
    items = kwargs.get("num_items_in_batch")
    number = isinstance(items, (int, float)) and items > 0
    tensor = isinstance(items, Tensor) and items.numel() == 1
    _items.set(items if number or tensor else None)


def expected_of_sum() -> Tensor | float | None:
    """What a sum of losses will be multiplied by, if the model was told; ``()`` or a number."""
    items = _items.get()
    if isinstance(items, Tensor):
        return items.detach().reshape(()).double().clamp(min=1).reciprocal()
    return None if items is None else 1 / items
