"""Host side of the training pass of a small batch: three products and two kernels.

Below a thousand tokens the host decides the time, so it launches as little as possible and waits
for nothing: rows without a label take part, as zeros. The float32 logits of all tokens exist, and
the gradient of the logits is written over them.
"""

from __future__ import annotations

import torch

from ...contract.problem import Outputs, Problem
from ...kernels.small import small_finish_kernel, small_rows_kernel
from ..gradients import Summed
from ..plan import is_small, multiple_of_16, power_of_2
from .launch import (
    device_guard,
    launch_grid,
    raise_on_cpu,
)
from .products import product

_DTYPES = (torch.bfloat16, torch.float32)  # float16's range needs factors of the rows
_BLOCK_V, _BLOCK_H, _BLOCK_C, _WARPS = 2048, 1024, 16, 8


def fits(problem: Problem) -> bool:
    """Whether the sum of a problem is computed here: a small one, whose options are numbers."""
    hidden, weight = problem.hidden, problem.weight
    return (
        is_small(hidden.shape[0], weight.shape[0])
        and hidden.dtype in _DTYPES
        and problem.bias is None
        and problem.class_weight is None
        and problem.memory_budget is None
        and problem.chunk_tokens is None
        and hidden.stride(1) == 1
        and weight.stride(1) == 1
    )


def loss_and_grads(problem: Problem, wanted: Outputs) -> Summed:
    """The sum and its wanted gradients."""
    hidden, weight, labels = problem.hidden, problem.weight, problem.labels.contiguous()
    (N, H), V = hidden.shape, weight.shape[0]
    device, dtype = hidden.device, hidden.dtype
    width, multiply = multiple_of_16(V), product(device, dtype)
    token_weight = problem.token_weight
    with device_guard(device):
        logits = torch.empty(N, width, dtype=torch.float32, device=device)
        losses, label_grads = torch.empty(2, N, dtype=torch.float32, device=device)
        # Results of an operator share no memory.
        factor, loss_sum = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
        n_valid = torch.empty((), dtype=torch.int64, device=device)
        grads = logits if dtype == torch.float32 else logits.view(dtype)  # (N, 2 * width)
        multiply(hidden, weight.t(), out=logits if width == V else logits[:, :V])
        block_n = 128 if N <= 128 else 1024  # two sizes to compile, not seven
        used = torch.empty(N, H, dtype=dtype, device=device) if wanted.weight else None
        weights = None if token_weight is None else token_weight.float().contiguous()
        launch_grid(
            small_rows_kernel,
            (N,),
            hidden=hidden,
            weight=weight,
            used=used,
            logits=logits,
            grads=grads,
            labels=labels,
            token_weight=weights,
            upstream=problem.expected_upstream,
            losses=losses,
            label_grads=label_grads,
            n_valid=n_valid,
            factor=factor,
            N=N,
            H=H,
            V=V,
            width=width,
            stride_hn=hidden.stride(0),
            stride_wv=weight.stride(0),
            stride_gn=grads.stride(0),
            ignore_index=problem.ignore_index,
            scale=None if problem.logit_scale == 1 else problem.logit_scale,
            softcap=problem.softcap,
            smoothing=problem.label_smoothing or None,
            z_loss=problem.z_loss or None,
            BLOCK_N=block_n,
            BLOCK_V=min(power_of_2(width), _BLOCK_V),
            BLOCK_H=power_of_2(H),
            num_warps=_WARPS,
        )
        raise_on_cpu(n_valid, problem)
        g = grads[:, :V]
        d_hidden = d_weight = None
        if wanted.hidden:
            d_hidden = torch.empty(N, H, dtype=torch.float32, device=device)
            multiply(g, weight, out=d_hidden)
        if used is not None:
            d_weight = torch.empty(V, H, dtype=dtype, device=device)
            torch.mm(g.t(), used, out=d_weight)
        block_h = min(power_of_2(H), _BLOCK_H)
        launch_grid(
            small_finish_kernel,
            (N, -(-H // block_h)),
            d_hidden=d_hidden,
            d_weight=d_weight,
            used=used,
            weight=weight,
            labels=labels,
            token_weight=weights,
            label_grads=label_grads,
            losses=losses,
            loss_sum=loss_sum,
            N=N,
            H=H,
            V=V,
            ignore_index=problem.ignore_index,
            stride_wv=weight.stride(0),
            BLOCK_N=block_n,
            BLOCK_C=_BLOCK_C,
            BLOCK_H=block_h,
            num_warps=_WARPS,
        )
        found = (losses.new_empty(0) if x is None else x for x in (d_hidden, d_weight, None))
        return Summed(loss_sum, n_valid, factor, *found)
