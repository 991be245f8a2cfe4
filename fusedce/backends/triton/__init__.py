"""The Triton backend. Problems are checked before they come here."""

from __future__ import annotations

from torch import Tensor

from fusedce.backends.triton import archs
from fusedce.backends.triton.divergence import divergence_and_grads
from fusedce.backends.triton.forward import loss, token_stats
from fusedce.backends.triton.launch import on, run
from fusedce.backends.triton.training import loss_and_grads
from fusedce.backends.triton.vocab_tiles import token_grads
from fusedce.kernels.input_grads import scale_kernel

__all__ = [
    "divergence_and_grads",
    "loss",
    "loss_and_grads",
    "scale_",
    "token_grads",
    "token_stats",
]


def scale_(x: Tensor, factor: Tensor) -> None:
    """``x *= factor``; nothing is written where it is 1, which only the GPU needs to know."""
    if x.numel():
        with on(x.device):
            block = archs.architecture(x.device).scale_block
            # 8 programs of 8 warps fill a multiprocessor.
            programs = min(-(-x.numel() // block), 8 * archs.processors(x.device))
            run(scale_kernel, (programs,), x=x, g=factor, n=x.numel(), BLOCK=block, num_warps=8)
