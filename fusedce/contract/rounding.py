"""Dtype of logits and sums, and in-place scaling that does not round its factor."""

from __future__ import annotations

import torch
from torch import Tensor

_PART = 2**20  # elements whose float32 copy is held at a time


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of logits, losses and sums for inputs of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale_(x: Tensor, factor: Tensor) -> None:
    """``x *= factor`` for a 0-d ``factor``, multiplied in float32 or better, then rounded once.

    Torch converts a 0-d tensor to the dtype of ``x`` before the product: in bf16 that puts an
    error of up to 0.4% on every element, the same one on all.
    """
    if x.element_size() >= 4:
        x.mul_(factor.to(x.device))
        return
    factor = factor.to(x.device)
    parts = x.view(-1).split(_PART) if x.is_contiguous() else (x,)
    for part in parts:
        part.copy_(part.float().mul_(factor))


def scale_unless_one(x: Tensor, factor: Tensor) -> None:
    """:func:`scale_`, left alone where ``factor`` is 1 and reading it costs nothing."""
    if factor.device.type != "cpu" or factor.item() != 1:
        scale_(x, factor)
