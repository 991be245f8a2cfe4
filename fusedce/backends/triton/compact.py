"""Which rows count, packed on the device; and what every launcher asks of the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.gradients import call_of
from fusedce.backends.plan import tiles_of
from fusedce.backends.triton import archs
from fusedce.contract.labels import bad_label_message
from fusedce.contract.problem import Problem, Wanted
from fusedce.kernels.compact import compact_kernel


class Rows(NamedTuple):
    """Valid rows, packed, and how many."""

    rows: Tensor  # (N,) int32, of which `used` are written
    used: Tensor  # () int32
    n_valid: Tensor  # () int64: with those of weight 0; negative for a bad label
    loss_sum: Tensor  # () fp32, 0


def compact(
    problem: Problem,
    tickets: Tensor | None = None,
    used: Tensor | None = None,
    V: int | None = None,
) -> Rows:
    """Rows with a label to predict and a weight (or ``used (N,)``) other than 0.

    ``tickets (...)`` int32 are set to 0. ``V``: classes, where ``weight`` has not a row of each.
    """
    labels, device = problem.labels, problem.labels.device
    N = labels.shape[0]  # (len asks for four times as long)
    weights = problem.token_weight if used is None else used
    packed = Rows(
        torch.empty(N, dtype=torch.int32, device=device),
        torch.empty((), dtype=torch.int32, device=device),
        torch.empty((), dtype=torch.int64, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )
    compact_kernel[(1,)](
        labels=labels,
        rows=packed.rows,
        count=packed.used,
        n_valid=packed.n_valid,
        loss_sum=packed.loss_sum,
        tickets=tickets,
        token_weight=None if weights is None else weights.contiguous(),
        N=N,
        V=problem.weight.shape[0] if V is None else V,
        ignore_index=problem.ignore_index,
        n_tickets=0 if tickets is None else len(tickets),
        BLOCK_N=archs.architecture(device).compact_block_n,
    )
    return packed


def raise_on_cpu(n_valid: Tensor, problem: Problem, V: int | None = None) -> None:
    """Bad labels: an error where looking costs nothing; on a GPU the code in ``n_valid`` stays."""
    if n_valid.device.type == "cpu" and n_valid.item() < 0:
        V = problem.weight.shape[0] if V is None else V
        raise ValueError(bad_label_message(int(n_valid), V, problem.ignore_index, problem.labels))


def check_budget(problem: Problem) -> None:
    """Raise ValueError where what a pass without gradients holds does not fit the budget."""
    if problem.memory_budget is not None:
        call = call_of(problem, Wanted(), len(problem.labels), triton=True)
        tiles_of(call, memory_budget=problem.memory_budget)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type == "cpu":
        return nullcontext()
    return getattr(torch, device.type).device(device)


def capturing(device: torch.device) -> bool:
    """Inside a CUDA graph nothing may wait: then all rows are computed, the ignored ones as 0."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
