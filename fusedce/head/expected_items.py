"""The ``num_items_in_batch`` of a model's call, by which its loss will be divided.

Models of transformers add their cross-entropies up and divide the sum by this number. Knowing it
beforehand saves a rounding, and a wrong expectation costs one: the number of one call is therefore
kept until the next (:mod:`fusedce.contract.denominator`).
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
    """Hook before a model's forward: keep its ``num_items_in_batch``."""
    if torch.compiler.is_compiling():
        return
    items = kwargs.get("num_items_in_batch")
    number = isinstance(items, (int, float)) and items > 0
    tensor = isinstance(items, Tensor) and items.numel() == 1
    _items.set(items if number or tensor else None)


def expected_factor() -> Tensor | float | None:
    """Expected factor of a sum of losses: 1 / items as a number or ``()``, or ``None``."""
    items = _items.get()
    if isinstance(items, Tensor):
        return items.detach().reshape(()).double().clamp(min=1).reciprocal()
    return None if items is None else 1 / items
