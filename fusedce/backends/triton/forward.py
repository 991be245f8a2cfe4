"""Host side of the forward-only passes: the plain loss, and statistics token by token.

They allocate and launch, and never wait for the GPU. The logits stay in registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract.objective import Stats
from ...contract.problem import Outputs, Problem
from ...kernels.walk import STATISTICS, SUMS, merge_stats_kernel
from ..gradients import check_budget, sizes_of
from . import archs
from .archs import Blocks, vocabulary_splits
from .launch import (
    compact,
    device_guard,
    has_options,
    launch_grid,
    raise_on_cpu,
    walk,
)

_MERGED = 128  # rows whose splits a program merges


def loss(
    problem: Problem,
    blocks: Blocks | None = None,
    lse: Tensor | None = None,  # (N,) fp32 to fill at valid rows
) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64."""
    if torch.version.hip:  # a barrier there orders no stores of other waves, as a ticket needs
        stats = token_stats(problem, Outputs(), None)
        return stats.nll.sum(dtype=torch.float64).float(), stats.n_valid
    check_budget(problem, sizes_of(problem, Outputs(), len(problem.labels), triton=True))
    problem = problem.replace(labels=problem.labels.contiguous())
    N, device = len(problem.hidden), problem.hidden.device
    if blocks is None:
        walks = archs.architecture(device).walks(problem.hidden.element_size())
        blocks = walks.forward_with_options if has_options(problem) else walks.forward
    _, splits = vocabulary_splits(len(problem.weight), blocks)
    row_blocks = -(-N // blocks.BLOCK_N)
    tickets = torch.empty(1 + row_blocks, dtype=torch.int32, device=device)
    with device_guard(device):
        packed = compact(problem, tickets)
        if N:
            partials = torch.empty(2 * splits + 1, N, dtype=torch.float32, device=device)
            walk(
                problem,
                blocks,
                SUMS,
                rows=packed.rows,
                count=packed.used,
                maxima=partials,
                sums=partials[splits:],
                z_label=partials[-1],
                block_losses=torch.empty(row_blocks, dtype=torch.float64, device=device),
                tickets=tickets,
                loss_sum=packed.loss_sum,
                lse=lse,
            )
    raise_on_cpu(packed.n_valid, problem)
    return packed.loss_sum, packed.n_valid


def token_stats(
    problem: Problem,
    wanted: Outputs,
    argmax: Tensor | None,
    kept: Tensor | None = None,
    *,
    every_row: bool = False,  # all rows are known to count: TMA reads them one after another
) -> Stats:
    """Statistics in one pass over the logits, which stay in registers; never waits for the GPU."""
    assert kept is None
    check_budget(problem, sizes_of(problem, wanted, len(problem.labels), triton=True))
    problem = problem.replace(labels=problem.labels.contiguous())
    N, device = len(problem.hidden), problem.hidden.device
    walks = archs.architecture(device).walks(problem.hidden.element_size())
    if has_options(problem) or wanted.zmean:
        blocks = walks.stats_with_options
    elif wanted.entropy or argmax is not None:
        blocks = walks.stats
    else:  # the registers of a loss
        blocks = walks.forward
    _, splits = vocabulary_splits(len(problem.weight), blocks)

    def zeros(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(N if wanted else 0, dtype=dtype, device=device)

    def plane(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(splits, N, dtype=dtype, device=device) if wanted else None

    def row(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.float().contiguous()

    nll, entropy, zmean = (zeros(x) for x in (True, wanted.entropy, wanted.zmean))
    lse = zeros(wanted.lse, torch.float64)
    top = zeros(wanted.lse or argmax is not None)
    if argmax is not None:
        argmax.fill_(-1)
    partials: dict[str, Any] = {
        "maxima": plane(True),
        "sums": plane(True),
        "moments": plane(wanted.entropy),
        "zsums": plane(wanted.zmean),
        "best": plane(argmax is not None, torch.int32),
    }
    z_labels = torch.empty(N, dtype=torch.float32, device=device)
    with device_guard(device):
        packed = compact(problem)
        if N:
            walk(
                problem,
                blocks,
                STATISTICS,
                class_weight=row(problem.class_weight) if wanted.zmean else None,
                temperature=row(problem.temperature),
                rows=None if every_row else packed.rows,
                count=packed.used,
                z_label=z_labels,
                **partials,
            )
            launch_grid(
                merge_stats_kernel,
                (-(-N // _MERGED),),
                z_labels=z_labels,
                labels=problem.labels,
                rows=packed.rows,
                count=packed.used,
                nll=nll,
                lse=lse if wanted.lse else None,
                entropy=entropy,
                zmean=zmean,
                argmax=argmax,
                highest=top if len(top) else None,
                N=N,
                V=len(problem.weight),
                splits=splits,
                BLOCK_N=_MERGED,
                num_warps=4,
                **partials,
            )
    raise_on_cpu(packed.n_valid, problem)
    return Stats(nll, lse, entropy, zmean, packed.n_valid, top=top)
