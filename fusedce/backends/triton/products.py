"""Products of cuBLAS with float32 results, and products added to a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..devices import widens
from .launch import warn_once


@functools.cache
def product(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The function to call with ``(a, b, out=c)`` for ``c = a @ b`` in float32."""
    if dtype == torch.float32:
        return torch.mm
    widens("addmm", device, dtype)  # asked now: later a graph's capture may not wait for it
    if widens("mm", device, dtype):
        return functools.partial(torch.mm, out_dtype=torch.float32)
    if device.type != "cpu":
        kind = str(dtype).removeprefix("torch.")
        warn_once(f"torch has no {kind} product with float32 result on {device}: float32 is used")
    return lambda a, b, *, out: torch.mm(a.float(), b.float(), out=out)


def scaled_by(h: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """``h (C, H)`` times ``factors (C,)`` in its dtype, and the factor left out of it: None for 1.

    In float16 that is the largest one, since the factors may leave float16's range.
    """
    if factors is None:
        return h, None
    largest = None
    if h.dtype == torch.float16:
        largest = factors.abs().amax().clamp_(min=torch.finfo(torch.float32).tiny)
        factors = factors / largest
    # (computed in float32 and rounded into `out`, without a copy in float32)
    return torch.mul(h, factors[:, None], out=torch.empty_like(h)), largest


def add_product(
    total: Tensor,  # (R, H), in a dtype of its own
    a: Tensor,  # (R, T)
    b: Tensor,  # (T, H)
    factor: float = 1.0,
    largest: Tensor | None = None,  # () fp32: another factor
    *,
    scratch: Tensor,  # fp32, for products that cannot be added in place
    first: bool = False,  # total is not yet written
) -> None:
    """``total (+)= factor * largest * a @ b``."""
    dtype, device, H = b.dtype, b.device, b.shape[1]
    same = total.dtype == dtype
    wide = total.dtype == torch.float32
    if largest is None and (same or (wide and widens("addmm", device, dtype))):
        # Added in the product's epilogue: half the traffic of a product that is added later.
        asked = {} if same else {"out_dtype": torch.float32}
        torch.addmm(total, a, b, beta=0 if first else 1, alpha=factor, out=total, **asked)
        return
    step = max(scratch.numel() // H, 1)
    for begin in range(0, len(total), step):
        some = total[begin : begin + step]
        if scratch.numel() < H:
            added = torch.empty(some.shape, dtype=torch.float32, device=device)
        else:
            added = scratch[: some.numel()].view_as(some)
        product(device, dtype)(a[begin : begin + step], b, out=added)
        if largest is not None:
            added.mul_(largest)
        if first:
            some.copy_(added.mul_(factor))
        else:
            some.add_(added, alpha=factor)
