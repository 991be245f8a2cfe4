"""What both passes of the Triton backend share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fusedce.backends.triton import archs as configs
from fusedce.contract.labels import bad_label_message
from fusedce.kernels.compact import compact_kernel


def compact(
    labels: Tensor,
    V: int,
    ignore_index: int,
    tickets: Tensor,
    token_weight: Tensor | None = None,  # (N,): rows of weight 0 count, and are left out
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``rows (N,)``, ``count ()`` int32, ``n_valid ()`` int64 and a zero ``loss_sum ()``."""
    N, device = len(labels), labels.device
    rows = torch.empty(N, dtype=torch.int32, device=device)
    count = torch.empty((), dtype=torch.int32, device=device)
    n_valid = torch.empty((), dtype=torch.int64, device=device)
    loss_sum = torch.empty((), dtype=torch.float32, device=device)
    compact_kernel[(1,)](
        labels,
        rows,
        count,
        n_valid,
        loss_sum,
        tickets,
        labels if token_weight is None else token_weight.contiguous(),
        N,
        V,
        ignore_index,
        len(tickets),
        HAS_TOKEN_WEIGHT=token_weight is not None,
        BLOCK_N=configs.COMPACT_BLOCK_N,
    )
    return rows, count, n_valid, loss_sum


def raise_on_cpu(n_valid: Tensor, V: int, ignore_index: int) -> None:
    """Bad labels: an error where looking costs nothing; on a GPU the code in ``n_valid`` stays."""
    if n_valid.device.type == "cpu" and n_valid.item() < 0:
        raise ValueError(bad_label_message(int(n_valid), V, ignore_index))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type == "cpu":
        return nullcontext()
    return getattr(torch, device.type).device(device)
