"""Products that are added to a gradient."""

from __future__ import annotations

import torch
from torch import Tensor


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
