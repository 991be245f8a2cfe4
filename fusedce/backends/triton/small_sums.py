"""The training pass of a small batch: three products and two kernels; the host never waits.

Float32 logits of all tokens exist: at most MOST bytes. Rows without a label take part, as zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends.gradients import Summed, saved_grad_dtypes
from fusedce.backends.plan import multiple_of_16
from fusedce.backends.triton.launch import device_guard, launch_grid, power_of_2, raise_on_cpu
from fusedce.backends.triton.products import product
from fusedce.contract.problem import Outputs, Problem
from fusedce.kernels.small import small_finish_kernel, small_rows_kernel

ROWS, MOST = 1024, 128 * 2**20


def on_gpu(device: torch.device) -> bool:
    return True


def fits(problem: Problem, wanted: Outputs, argmax: Tensor | None) -> bool:
    hidden, weight = problem.hidden, problem.weight
    N = hidden.shape[0]
    return (
        0 < N <= ROWS
        and N * weight.shape[0] * 4 <= MOST
        and hidden.dtype in (torch.bfloat16, torch.float32)
        and argmax is None
        and problem.memory_budget is None
        and problem.chunk_tokens is None
        and problem.bias is None
        and problem.softcap is None
        and problem.logit_scale == 1
        and problem.token_weight is None
        and problem.is_plain_ce()
        and hidden.stride(1) == 1
        and weight.stride(1) == 1
    )


def loss_and_grads(problem: Problem, wanted: Outputs) -> Summed:
    hidden, weight, labels = problem.hidden, problem.weight, problem.labels.contiguous()
    (N, H), V, device = hidden.shape, weight.shape[0], hidden.device
    width, multiply = multiple_of_16(V), product(device, hidden.dtype)
    with device_guard(device):
        logits = torch.empty(N, width, dtype=torch.float32, device=device)
        grads = torch.empty(N, width, dtype=hidden.dtype, device=device)
        rows = torch.empty(2 * N + 2, dtype=torch.float32, device=device)
        losses, label_grads = rows[:N], rows[N : 2 * N]
        factor, loss_sum = rows[2 * N], rows[2 * N + 1]
        n_valid = torch.empty((), dtype=torch.int64, device=device)
        every = logits if width == V else logits[:, :V]
        multiply(hidden, weight.t(), out=every)
        block_n = max(power_of_2(N), 16)
        launch_grid(
            small_rows_kernel, (N,), logits=logits, grads=grads, labels=labels,
            upstream=problem.expected_upstream, losses=losses, label_grads=label_grads,
            n_valid=n_valid, factor=factor, N=N, V=V, width=width,
            ignore_index=problem.ignore_index, BLOCK_N=block_n, BLOCK_V=min(power_of_2(V), 2048),
            num_warps=8,
        )  # fmt: skip
        raise_on_cpu(n_valid, problem)
        g = grads if width == V else grads[:, :V]
        none = torch.empty(0, dtype=torch.float32, device=device)
        dtypes = saved_grad_dtypes(problem)
        dh = dw = None
        if wanted.hidden:
            dh = torch.empty(N, H, dtype=torch.float32, device=device)
            multiply(g, weight, out=dh)
        if wanted.weight:
            dw = torch.empty(V, H, dtype=dtypes.weight, device=device)
            torch.mm(g.t(), hidden, out=dw)
        block_h = min(power_of_2(H), 1024)
        launch_grid(
            small_finish_kernel, (N, -(-H // block_h)), d_hidden=dh, d_weight=dw, hidden=hidden,
            weight=weight, labels=labels, label_grads=label_grads, losses=losses,
            loss_sum=loss_sum, N=N, H=H, V=V, stride_hn=hidden.stride(0),
            stride_wv=weight.stride(0), BLOCK_N=block_n, BLOCK_C=16, BLOCK_H=block_h, num_warps=8,
        )  # fmt: skip
        return Summed(loss_sum, n_valid, factor, none if dh is None else dh,
                      none if dw is None else dw, none)  # fmt: skip
