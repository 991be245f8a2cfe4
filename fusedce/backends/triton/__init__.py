"""The Triton backend. Problems are checked before they come here.

It launches the kernels of ``fusedce/kernels/``, which import nothing but triton:

* ``compact``: finds the valid rows of a batch, on the device.
* ``tile``: a tile of logits, and the pointwise steps on it.
* ``walk``: logits tile by tile, and what is made of each tile: loss, statistics, or exponentials.
* ``softmax_grad``: exponentials, losses and row factors of a chunk of logits; or the gradient of a
  tile of logits, whose tokens have upstream factors of their own.
* ``input_grads``: adds the labels' entries, which the GEMMs leave out, to the gradients.
* ``small``: losses and gradients of a small call, whose logits are all there at once.
* ``divergence_rows``: divergence of a student from a teacher, and the student's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract.problem import Outputs, Problem, Task
from ...kernels.input_grads import scale_kernel
from ..gradients import Summed
from . import archs, divergence_chunks, small_sums, sum_grads
from .forward import loss, token_stats
from .launch import device_guard, launch_grid
from .vocab_tiles import token_grads

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


SCALE_BLOCK = 8192  # numbers that a program multiplies at a time
_NO_GRADS = dict.fromkeys(f"{name}{i}" for i in range(3) for name in ("x", "out", "n"))


def loss_and_grads(task: Task, argmax: Tensor | None = None) -> Summed:
    """The sum and its wanted gradients."""
    assert task.shard is None, "sums over shards go by their tokens"
    if argmax is None and small_sums.fits(task.problem):
        return small_sums.loss_and_grads(task.problem, task.wanted)
    return sum_grads.loss_and_grads(task.problem, task.wanted, argmax)


def divergence_and_grads(task: Task) -> Summed:
    """Each token's divergence, and the wanted gradients of their sum."""
    assert task.divergence is not None
    assert task.shard is None, "sharded divergences are the torch backend's"
    return divergence_chunks.divergence_and_grads(task.problem, task.divergence, task.wanted)


def sums_smoothing(problem: Problem, wanted: Outputs) -> bool:
    """A small batch alone: a chunk's exponentials have two bytes, from which no share comes off."""
    return small_sums.fits(problem) and not wanted.argmax


def room_for_logits(problem: Problem) -> None:
    """Never: the logits stay in registers."""


def scaled(grads: list[Tensor], factor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Each of ``grads`` times ``factor ()`` in ``dtype``, in one launch.

    Those that have the dtype are overwritten, unless the factor is 1, which only the GPU needs to
    know.
    """
    made = [x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in grads]
    most = max(x.numel() for x in grads)
    if most:
        arguments: dict[str, Any] = {}
        for i, (x, out) in enumerate(zip(grads, made, strict=True)):
            arguments |= {f"x{i}": x, f"out{i}": None if out is x else out, f"n{i}": x.numel()}
        with device_guard(factor.device):
            # 8 programs of 8 warps fill a multiprocessor of 64 warps (6 fill one of 48).
            programs = min(-(-most // SCALE_BLOCK), 8 * archs.processors(factor.device))
            launch_grid(
                scale_kernel,
                (programs,),
                **(_NO_GRADS | arguments),
                g=factor,
                BLOCK=SCALE_BLOCK,
                num_warps=8,
            )
    return made
