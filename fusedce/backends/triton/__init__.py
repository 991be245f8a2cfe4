"""The Triton backend. Arguments are checked before they come here."""

from __future__ import annotations

import triton
from torch import Tensor

from fusedce.backends.triton import archs as configs
from fusedce.backends.triton.compact import on
from fusedce.backends.triton.forward import loss
from fusedce.backends.triton.training import loss_and_grads
from fusedce.kernels.scale import scale_kernel

__all__ = ["loss", "loss_and_grads", "scale_"]


def scale_(x: Tensor, g: Tensor) -> None:
    """``x *= g``; nothing is written where ``g`` is 1, which only the GPU needs to know."""
    if x.numel():
        with on(x.device):
            grid = (triton.cdiv(x.numel(), configs.SCALE_BLOCK),)
            scale_kernel[grid](x, g, x.numel(), BLOCK=configs.SCALE_BLOCK, num_warps=8)
