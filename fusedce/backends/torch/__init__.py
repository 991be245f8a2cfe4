"""The chunked implementation in plain torch: any device, no kernels; the default on a CPU."""

import torch
from torch import Tensor

from fusedce.backends.torch.divergence_tiles import divergence_and_grads
from fusedce.backends.torch.stats_and_grads import room_for_logits, token_grads, token_stats
from fusedce.backends.torch.sum_grads import loss, loss_and_grads, sums_smoothing

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
_PART = 2**20  # elements whose float32 copy is held at a time


def scaled(grads: list[Tensor], factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Each of ``grads`` times ``factor ()`` in ``dtype``; overwrites them."""
    for grad in grads:
        _scale_(grad, factor)
    return [grad.to(dtype) for grad in grads]


def _scale_(x: Tensor, factor: Tensor) -> None:
    """``x *= factor`` for a 0-d ``factor``, multiplied in float32 or better, then rounded once.

    0 stays 0: without a valid token a user may divide by 0, and torch's gradients are 0 then.

    Torch converts a 0-d tensor to the dtype of ``x`` before the product: in bf16 that puts an
    error of up to 0.4% on every element, the same one on all.
    """
    on_cpu = factor.device.type == "cpu"
    if on_cpu and factor.item() == 1:
        return
    zeros = None if on_cpu and factor.isfinite() else x == 0
    factor = factor.to(x.device)
    if x.element_size() >= 4:
        x.mul_(factor)
    else:
        for part in x.view(-1).split(_PART) if x.is_contiguous() else (x,):
            part.copy_(part.float().mul_(factor))
    if zeros is not None:
        x.masked_fill_(zeros, 0)
