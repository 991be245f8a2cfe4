"""The gradient of the head by a chunk: a product, and what rounding took from the labels' entries.

The latter, by :mod:`fusedce.kernels.label_grad`, is added to a float32 sum after the product. Into
a buffer of two bytes (that of a single chunk) it goes before it, and the product is added on top:
then the whole is rounded once. That costs zeros and reading them, 4 bytes an entry of weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients
from fusedce.backends.triton.chunks import Chunks
from fusedce.backends.triton.operands import power_of_2
from fusedce.backends.triton.products import add_product
from fusedce.kernels.label_grad import label_grad_kernel

_COLUMNS = 16384  # of a chunk's gradient that are widened at a time


def add_head_gradients(
    chunks: Chunks,
    grads: Gradients,  # whose weight and bias are added to
    g: Tensor,  # (C, V), what `chunks` has made
    h: Tensor,  # (C, H)
    y: Tensor,  # (C,)
    row_factors: Tensor | None,  # (C,) fp32: of the rows of g
    outer: float,  # of all of them
    *,
    first: bool,  # weight is not yet written
) -> None:
    """``weight (+)= g.T @ h`` and ``bias += g.sum(0)``, rows times their factors."""
    weight, bias = grads.weight, grads.bias
    alpha = outer / chunks.amplify
    if bias is not None and row_factors is None:
        bias.add_(g.sum(0, dtype=torch.float32), alpha=alpha)
    elif bias is not None and row_factors is not None:
        for i in range(0, len(bias), _COLUMNS):
            sums = torch.mv(g[:, i : i + _COLUMNS].float().t(), row_factors)
            bias[i : i + _COLUMNS].add_(sums, alpha=alpha)
    rounded = g.dtype != torch.float32
    if rounded and weight is not None and weight.dtype == g.dtype:
        weight.zero_()
        _add_labels(chunks, grads, h, y, row_factors, outer)
        _add_product(weight, g, h, row_factors, alpha, first=False)
        return
    if weight is not None:
        _add_product(weight, g, h, row_factors, alpha, first=first)
    if rounded:
        _add_labels(chunks, grads, h, y, row_factors, outer)


def _add_product(
    total: Tensor,  # (V, H)
    g: Tensor,  # (C, V)
    h: Tensor,  # (C, H)
    row_factors: Tensor | None,  # (C,) fp32
    alpha: float,
    *,
    first: bool,
) -> None:
    largest = None
    if row_factors is not None:
        if h.dtype == torch.float16:  # whose range is not that of the factors
            largest = row_factors.amax().clamp_(min=torch.finfo(torch.float32).tiny)
            row_factors = row_factors / largest
        h = (h.float() * row_factors[:, None]).to(h.dtype)
    add_product(total, g, h, alpha, largest, first=first)


def _add_labels(
    chunks: Chunks,
    grads: Gradients,
    h: Tensor,  # (C, H)
    y: Tensor,  # (C,)
    row_factors: Tensor | None,  # (C,) fp32
    outer: float,
) -> None:
    """``weight[y] += outer * row_factors * residuals * h``, and ``bias[y]`` the same without h."""
    weight, bias = grads.weight, grads.bias
    if weight is None and bias is None:
        return
    C, H = h.shape
    h = h if h.stride(1) == 1 else h.contiguous()
    labels, order = y.sort(stable=True)  # nothing waits for the device
    block_c, block_h = chunks.arch.label_block
    block_h = min(power_of_2(H), block_h)
    label_grad_kernel[(C, 1 if weight is None else -(-H // block_h))](
        hidden=h,
        labels=labels,
        order=order,
        residuals=chunks.residuals,
        row_factors=row_factors,
        d_weight=weight,
        d_bias=bias,
        C=C,
        H=H,
        V=chunks.weight.shape[0],
        stride_hn=h.stride(0),
        factor=outer,
        BLOCK_C=block_c,
        BLOCK_H=block_h,
        num_warps=4,
    )
