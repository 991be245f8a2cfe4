"""The Triton backend. Problems are checked before they come here."""

from __future__ import annotations

from torch import Tensor

from fusedce.backends.gradients import Summed
from fusedce.backends.triton import archs, divergence_chunks, small_sums, sum_grads
from fusedce.backends.triton.forward import loss, token_stats
from fusedce.backends.triton.launch import device_guard, launch_grid
from fusedce.backends.triton.vocab_tiles import token_grads
from fusedce.contract.problem import Outputs, Problem, Task
from fusedce.kernels.input_grads import scale_kernel

__all__ = [
    "divergence_and_grads",
    "loss",
    "loss_and_grads",
    "room_for_logits",
    "scale_",
    "sums_smoothing",
    "token_grads",
    "token_stats",
]


SCALE_BLOCK = 8192  # numbers that a program multiplies at a time


def loss_and_grads(task: Task, argmax: Tensor | None = None) -> Summed:
    """The sum and its wanted gradients."""
    assert task.shard is None, "sums over shards go by their tokens"
    problem = task.problem
    # A small call that is smoothed comes here whatever it asks for, and chunks know no smoothing.
    if small_sums.fits(problem) and (argmax is None or problem.label_smoothing):
        found = small_sums.loss_and_grads(problem, task.wanted)
        if argmax is not None:  # last, as it may have the labels' memory
            token_stats(problem, Outputs(), argmax)
        return found
    return sum_grads.loss_and_grads(task.problem, task.wanted, argmax)


def divergence_and_grads(task: Task) -> Summed:
    """Each token's divergence, and the wanted gradients of their sum."""
    assert task.divergence is not None
    assert task.shard is None, "sharded divergences are the torch backend's"
    return divergence_chunks.divergence_and_grads(task.problem, task.divergence, task.wanted)


def sums_smoothing(problem: Problem) -> bool:
    """A small batch alone: a chunk's exponentials have two bytes, from which no share comes off."""
    return small_sums.fits(problem)


def room_for_logits(problem: Problem) -> None:
    """Never: the logits stay in registers."""


def scale_(x: Tensor, factor: Tensor) -> None:
    """``x *= factor``, 0 stays 0; nothing is written for 1, which only the GPU needs to know."""
    if x.numel():
        with device_guard(x.device):
            # 8 programs of 8 warps fill a multiprocessor of 64 warps (6 fill one of 48).
            programs = min(-(-x.numel() // SCALE_BLOCK), 8 * archs.processors(x.device))
            launch_grid(
                scale_kernel,
                (programs,),
                x=x,
                g=factor,
                n=x.numel(),
                BLOCK=SCALE_BLOCK,
                num_warps=8,
            )
