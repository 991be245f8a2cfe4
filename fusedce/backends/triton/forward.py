"""The forward-only pass: allocates and launches, and never waits for the GPU."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from fusedce.backends.triton import archs, tuning
from fusedce.backends.triton.archs import Blocks
from fusedce.backends.triton.compact import check_budget, compact, on, raise_on_cpu
from fusedce.backends.triton.operands import alignment, has_options, operands, with_unit_strides
from fusedce.contract.problem import Problem
from fusedce.kernels.forward import forward_kernel


def loss(
    problem: Problem,
    blocks: Blocks | None = None,
    lse: Tensor | None = None,  # (N,) fp32 to fill at valid rows
) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64."""
    check_budget(problem)
    problem = with_unit_strides(problem)
    unit = alignment(problem)
    blocks = _blocks(problem, unit) if blocks is None else blocks
    shared = operands(problem, blocks, unit)
    N, splits, device = shared["N"], shared["splits"], problem.hidden.device
    row_blocks = -(-N // blocks.BLOCK_N)
    tickets = torch.empty(1 + row_blocks, dtype=torch.int32, device=device)
    with on(device):
        packed = compact(problem, tickets)
        if N:
            forward_kernel[(row_blocks * splits,)](
                rows=packed.rows,
                count=packed.used,
                partials=torch.empty((2 * splits + 1) * N, dtype=torch.float32, device=device),
                block_losses=torch.empty(row_blocks, dtype=torch.float64, device=device),
                tickets=tickets,
                loss_sum=packed.loss_sum,
                lse=lse,
                **shared,
            )
    raise_on_cpu(packed.n_valid, problem)
    return packed.loss_sum, packed.n_valid


def _blocks(problem: Problem, unit: int) -> Blocks:
    device, dtype = problem.hidden.device, problem.hidden.dtype
    walks = archs.architecture(device).walks(dtype.itemsize)
    if unit == 1:
        return walks.unaligned
    options = has_options(problem)
    default = walks.forward_with_options if options else walks.forward
    if not tuning.enabled() or not walks.candidates:
        return default
    V, H = problem.weight.shape

    def milliseconds(blocks: Blocks) -> float:
        rng = torch.Generator(device).manual_seed(0)  # the user's own is left alone
        rows = torch.randn(tuning.ROWS, H, device=device, generator=rng).to(dtype)
        labels = torch.randint(V, (tuning.ROWS,), device=device, generator=rng)
        sample = problem.but(hidden=rows, labels=labels, ignore_index=-100, token_weight=None)
        call = functools.partial(loss, sample, blocks)
        with on(device):
            return float(triton.testing.do_bench(call, return_mode="median"))

    key = tuning.key_of(device, dtype, H, V, options)
    return tuning.choose(key, (default, *walks.candidates), milliseconds)
