"""The gradient of the head by a chunk: a product, and what rounding took from the labels' entries.

The latter, by :mod:`fusedce.kernels.label_grad`, is added to a float32 sum after the product. Into
a buffer of two bytes (that of a single chunk) it goes before it, and the product is added on top:
then the whole is rounded once. That costs zeros and reading them, 4 bytes an entry of weight.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients
from fusedce.backends.triton import archs
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
    """``weight (+)= g.T @ h`` and ``bias += g.sum(0)``, rows times their factors.

    As if the labels' entries of g had not been rounded. Deterministic.
    """
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
    weight, bias, V = grads.weight, grads.bias, chunks.weight.shape[0]
    if weight is None and bias is None:
        return
    h = h if h.stride(1) == 1 else h.contiguous()
    labels, order = y.sort(stable=True)  # nothing waits for the device
    _launch(h, labels, order, chunks.residuals, row_factors, weight, bias, V, outer)
    if weight is not None and weight.dtype == h.dtype:
        compile_for_sums(
            h.device, h.dtype, y.dtype, V, h.shape[1], row_factors is not None, bias is not None
        )


@functools.cache
def compile_for_sums(
    device: torch.device,
    dtype: torch.dtype,
    of_labels: torch.dtype,
    V: int,
    H: int,
    scaled: bool,
    biased: bool,
) -> None:
    """Once, beside a gradient of two bytes: the kernel that adds to float32. It adds nothing.

    A CUDA graph computes the ignored rows, too: it may hold several chunks where its warm-up had
    one, and nothing may be compiled inside.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    _launch(
        zeros(1, H, dtype=dtype),
        zeros(1, dtype=of_labels) - 1,  # which is no label
        zeros(1, dtype=torch.int64),
        zeros(1),
        zeros(1) if scaled else None,
        zeros(1, H),
        zeros(1) if biased else None,
        V,
        1.0,
    )


def _launch(
    h: Tensor,  # (C, H)
    labels: Tensor,  # (C,) sorted
    order: Tensor,  # (C,) int64
    residuals: Tensor,  # (C,) fp32
    row_factors: Tensor | None,  # (C,) fp32
    weight: Tensor | None,  # (V, H)
    bias: Tensor | None,  # (V,)
    V: int,
    outer: float,
) -> None:
    C, H = h.shape
    block_c, block_h = archs.architecture(h.device).label_block
    block_h = min(power_of_2(H), block_h)
    label_grad_kernel[(C, 1 if weight is None else -(-H // block_h))](
        hidden=h,
        labels=labels,
        order=order,
        residuals=residuals,
        row_factors=row_factors,
        d_weight=weight,
        d_bias=bias,
        C=C,
        H=H,
        V=V,
        stride_hn=h.stride(0),
        factor=outer,
        BLOCK_C=block_c,
        BLOCK_H=block_h,
        num_warps=4,
    )
