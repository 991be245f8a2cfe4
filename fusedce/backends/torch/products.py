"""Products: in which dtype, and added to a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.contract.rounding import acc_dtype


def add_product(
    total: Tensor,  # (v, H)
    tile: Tensor,  # (v, C)
    h: Tensor,  # (C, H)
    *,
    first: bool,  # total is not yet written
) -> None:
    """``total (+)= tile @ h``."""
    if total.dtype == tile.dtype:
        torch.addmm(total, tile, h, beta=0 if first else 1, out=total)
    elif first:
        total.copy_(torch.mm(tile, h))
    else:
        total.add_(torch.mm(tile, h))


def gemm_dtype(hidden: Tensor) -> torch.dtype:
    """Of the products behind the logits' gradient."""
    if hidden.dtype == torch.bfloat16 and fast_bf16(hidden.device):
        return torch.bfloat16
    return acc_dtype(hidden.dtype)


def fast_bf16(device: torch.device) -> bool:
    """Whether bf16 GEMMs run on units made for them. Elsewhere they are 3 to 4 times slower."""
    if device.type != "cpu":
        return True
    return any(
        probe()
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        if (probe := getattr(torch.cpu, name, None)) is not None
    )
