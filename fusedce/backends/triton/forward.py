"""Host side of the forward-only passes: the plain loss, and statistics token by token.

They allocate and launch, and never wait for the GPU. The logits stay in registers.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from fusedce.backends.gradients import call_of, check_budget
from fusedce.backends.triton import archs, tuning
from fusedce.backends.triton.archs import Blocks
from fusedce.backends.triton.launch import (
    alignment,
    compact,
    has_options,
    on,
    operands,
    raise_on_cpu,
    with_unit_strides,
)
from fusedce.contract.objective import Stats
from fusedce.contract.problem import Problem, Wanted
from fusedce.kernels.forward import forward_kernel
from fusedce.kernels.stats import merge_stats_kernel, stats_kernel


def loss(
    problem: Problem,
    blocks: Blocks | None = None,
    lse: Tensor | None = None,  # (N,) fp32 to fill at valid rows
) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64."""
    check_budget(problem, call_of(problem, Wanted(), len(problem.labels), triton=True))
    problem = with_unit_strides(problem)
    unit = alignment(problem)
    blocks = _blocks(problem, unit) if blocks is None else blocks
    shared = operands(problem, blocks, unit)
    N, splits, device = shared["N"], shared["splits"], problem.hidden.device
    row_blocks = -(-N // blocks.BLOCK_N)
    tickets = torch.empty(1 + row_blocks, dtype=torch.int32, device=device)
    with on(device):
        packed = compact(problem.but(labels=problem.labels.contiguous()), tickets)
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
    V, H = problem.weight.shape
    default = archs.forward_blocks(walks, H, options)
    if not tuning.enabled() or not walks.candidates:
        return default

    def milliseconds(blocks: Blocks) -> float:
        rng = torch.Generator(device).manual_seed(0)  # the user's own is left alone
        rows = torch.randn(tuning.ROWS, H, dtype=torch.float32, device=device, generator=rng)
        labels = torch.randint(V, (tuning.ROWS,), device=device, generator=rng)
        sample = problem.but(
            hidden=rows.to(dtype), labels=labels, ignore_index=-100, token_weight=None
        )
        call = functools.partial(loss, sample, blocks)
        with on(device):
            return float(triton.testing.do_bench(call, return_mode="median"))

    key = tuning.key_of(device, dtype, H, V, options)
    return tuning.choose(key, (default, *walks.candidates), milliseconds)


def token_stats(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Stats:
    """Statistics in one pass over the logits, which stay in registers; never waits for the GPU."""
    check_budget(problem, call_of(problem, wanted, len(problem.labels), triton=True))
    problem = with_unit_strides(problem)
    N, device = len(problem.hidden), problem.hidden.device
    arch = archs.architecture(device)
    walks = arch.walks(problem.hidden.element_size())
    blocks = walks.stats_with_options if has_options(problem) or wanted.zmean else walks.stats
    unit = alignment(problem)
    if unit == 1:
        blocks = walks.unaligned
    shared = operands(problem, blocks, unit)
    splits = shared["splits"]
    class_weight = problem.class_weight
    if class_weight is not None:
        class_weight = class_weight.float().contiguous() if wanted.zmean else None

    temperature = problem.temperature
    if temperature is not None:
        temperature = temperature.float().contiguous()

    def zeros(wanted: bool) -> Tensor:
        return torch.zeros(N if wanted else 0, dtype=torch.float32, device=device)

    nll, lse, entropy, zmean = (zeros(x) for x in (True, wanted.lse, wanted.entropy, wanted.zmean))
    if argmax is not None:
        argmax.fill_(-1)
    best = top = None
    if argmax is not None:
        top = zeros(True)
        best = torch.empty(splits, N, dtype=torch.int32, device=device)
    planes = iter(
        torch.empty(
            2 + wanted.entropy + wanted.zmean, splits, N, dtype=torch.float32, device=device
        ).unbind()
    )
    partials = {
        "maxima": next(planes),
        "sums": next(planes),
        "moments": next(planes) if wanted.entropy else None,
        "zsums": next(planes) if wanted.zmean else None,
        "best": best,
        "z_labels": torch.empty(N, dtype=torch.float32, device=device),
    }
    with on(device):
        packed = compact(problem)
        if N:
            stats_kernel[(-(-N // blocks.BLOCK_N) * splits,)](
                class_weight=class_weight,
                temperature=temperature,
                rows=packed.rows,
                count=packed.used,
                **partials,
                **shared,
            )
            merge_stats_kernel[(-(-N // arch.merge_block_n),)](
                labels=problem.labels,
                rows=packed.rows,
                count=packed.used,
                nll=nll,
                lse=lse if wanted.lse else None,
                entropy=entropy,
                zmean=zmean,
                argmax=argmax,
                highest=top,
                N=N,
                V=shared["V"],
                splits=splits,
                BLOCK_N=arch.merge_block_n,
                num_warps=4,
                **partials,
            )
    raise_on_cpu(packed.n_valid, problem)
    return Stats(nll, lse, entropy, zmean, packed.n_valid, top=top)
