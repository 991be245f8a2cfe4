"""cuBLAS's products with float32 results, and those that are added to a gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

_ROWS = 16384  # of a weight gradient, whose product is held before it is added


@functools.cache
def product(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """What is called with ``(a, b, out=c)``: ``c = a @ b`` in float32, as it is accumulated."""
    if dtype == torch.float32:
        return torch.mm
    if widens(torch.mm, device, dtype):
        return functools.partial(torch.mm, out_dtype=torch.float32)
    return _of_widened


def _of_widened(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    return torch.mm(a.float(), b.float(), out=out)


@functools.cache
def widens(operation: object, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch.mm`` or ``torch.addmm`` has an ``out_dtype`` there: CUDA does.

    ``addmm`` beside a float32 addend from torch 2.11 on.
    """
    if device.type != "cuda":
        return False
    x = torch.zeros(16, 16, device=device, dtype=dtype)
    out = torch.zeros(16, 16, device=device, dtype=torch.float32)
    try:
        if operation is torch.mm:
            torch.mm(x, x, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, x, x, out_dtype=torch.float32, out=out)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def add_to(
    total: Tensor,  # (R, H) fp32
    a: Tensor,  # (R, T)
    b: Tensor,  # (T, H)
    *,
    scratch: Tensor,  # fp32, for products that cannot be added in place
) -> None:
    """``total += a @ b``."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, out=total)
    elif widens(torch.addmm, a.device, a.dtype):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        H = total.shape[1]
        step = scratch.numel() // H
        if step == 0:
            scratch, step = torch.empty(H, dtype=torch.float32, device=total.device), 1
        for begin in range(0, len(total), step):
            some = total[begin : begin + step]
            added = scratch[: some.numel()].view_as(some)
            some += product(a.device, a.dtype)(a[begin : begin + step], b, out=added)


def add_product(
    total: Tensor,  # (V, H), in a dtype of its own
    g: Tensor,  # (C, V)
    h: Tensor,  # (C, H)
    factor: float,
    largest: Tensor | None = None,  # () fp32: another factor
    *,
    first: bool,  # total is not yet written
) -> None:
    """``total (+)= factor * largest * g.T @ h``."""
    if largest is None:
        beta = 0 if first else 1
        if total.dtype == h.dtype:
            torch.addmm(total, g.t(), h, beta=beta, alpha=factor, out=total)
            return
        if total.dtype == torch.float32 and widens(torch.addmm, h.device, h.dtype):
            # Added in the product's epilogue: half the traffic of a product that is added later.
            torch.addmm(
                total, g.t(), h, beta=beta, alpha=factor, out_dtype=torch.float32, out=total
            )
            return
    for begin in range(0, len(total), _ROWS):
        some = total[begin : begin + _ROWS]
        added = torch.empty(some.shape, dtype=torch.float32, device=some.device)
        product(h.device, h.dtype)(g[:, begin : begin + _ROWS].t(), h, out=added)
        if largest is not None:
            added.mul_(largest)
        if first:
            some.copy_(added.mul_(factor))
        else:
            some.add_(added, alpha=factor)
