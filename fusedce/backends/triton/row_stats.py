"""The Triton backend, token by token: statistics in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends.triton import archs
from fusedce.backends.triton.compact import check_budget, compact, on, raise_on_cpu
from fusedce.backends.triton.operands import alignment, has_options, operands, with_unit_strides
from fusedce.contract.objective import Stats
from fusedce.contract.problem import Problem, Wanted
from fusedce.kernels.stats import merge_stats_kernel, stats_kernel


def token_stats(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Stats:
    """One pass over the logits, which stay in registers; never waits for the GPU."""
    check_budget(problem)
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
