"""The chunked implementation in plain torch: any device, no kernels; the default on a CPU."""

import math

import torch
from torch import Tensor

from .divergence_tiles import divergence_and_grads
from .products import on_cpu
from .stats_and_grads import room_for_logits, token_grads, token_stats
from .sum_grads import loss, loss_and_grads, sums_smoothing

__all__ = [
    "divergence_and_grads",
    "loss",
    "loss_and_grads",
    "room_for_logits",
    "scaled",
    "sums_smoothing",
    "token_grads",
    "token_stats",
]
_PART, _PART_OF_DEVICE = 2**20, 2**26  # elements that are multiplied at a time


def scaled(grads: list[Tensor], factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Each of ``grads`` times ``factor ()`` in ``dtype``; overwrites them.

    Products are of float32 or better, and rounded once. 0 stays 0: without a valid token a user may
    divide by 0, and torch's gradients are 0 then.
    """
    # Read on a device, too: a wait takes less time than a factor of 1 multiplied into (V, H).
    value = factor.item()
    if value != 1:
        for grad in grads:
            _multiply(grad, factor, finite=math.isfinite(value))
    return [grad.to(dtype) for grad in grads]


def _multiply(x: Tensor, factor: Tensor, *, finite: bool) -> None:
    """``x *= factor``, 0 stays 0.

    Torch converts a 0-d tensor to the dtype of ``x`` before the product: in bf16 that puts an
    error of up to 0.4% on every element, the same one on all.
    """
    factor = factor.to(x.device)
    size = _PART if on_cpu(x) else _PART_OF_DEVICE
    for part in x.view(-1).split(size) if x.is_contiguous() else (x,):
        zeros = None if finite else part == 0
        if x.element_size() >= 4:
            part.mul_(factor)
        elif on_cpu(x):
            part.copy_(part.float().mul_(factor))
        else:  # one kernel, which rounds the product of float32 (on a CPU it makes copies)
            torch.mul(part, factor.view(1).float(), out=part)
        if zeros is not None:
            part.masked_fill_(zeros, 0)
