"""The gradient of the head by a chunk: a product, and what rounding took from the labels' entries.

The chunk's gradient is one of two bytes a logit; see :mod:`fusedce.kernels.label_grad`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients
from fusedce.backends.triton.operands import power_of_2
from fusedce.backends.triton.products import add_product
from fusedce.kernels.label_grad import label_grad_kernel

_COLUMNS = 16384  # of a chunk's gradient that are widened at a time


def add_head_gradients(
    grads: Gradients,  # of which weight and bias are added to
    g: Tensor,  # (C, V): the derivative of the losses by the products, `amplify` times
    h: Tensor,  # (C, H)
    y: Tensor,  # (C,)
    residuals: Tensor,  # (C,) fp32: what rounding took from g[c, y[c]], without `amplify`
    row_factors: Tensor | None,  # (C,) fp32: of the rows of g
    outer: float,  # of all of them
    amplify: float,
    *,
    first: bool,  # weight is not yet written
) -> None:
    """``weight (+)= g.T @ h`` and ``bias += g.sum(0)``, rows times their factors."""
    alpha = outer / amplify
    if grads.bias is not None and row_factors is None:
        grads.bias.add_(g.sum(0, dtype=torch.float32), alpha=alpha)
    elif grads.bias is not None and row_factors is not None:
        for i in range(0, len(grads.bias), _COLUMNS):
            sums = torch.mv(g[:, i : i + _COLUMNS].float().t(), row_factors)
            grads.bias[i : i + _COLUMNS].add_(sums, alpha=alpha)
    rounded = g.dtype != torch.float32
    # A buffer of two bytes gets them first and the product on top: the sum is rounded once.
    before = rounded and grads.weight is not None and grads.weight.dtype == g.dtype
    if before:
        assert grads.weight is not None
        assert first, "there is no other chunk"
        grads.weight.zero_()
        _add_labels(grads, h, y, residuals, row_factors, outer, g.shape[1])
    if grads.weight is not None:
        _add_product(grads.weight, g, h, row_factors, alpha, first=first and not before)
    if rounded and not before:
        _add_labels(grads, h, y, residuals, row_factors, outer, g.shape[1])


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
    grads: Gradients,
    h: Tensor,  # (C, H)
    y: Tensor,  # (C,)
    residuals: Tensor,  # (C,) fp32
    row_factors: Tensor | None,  # (C,) fp32
    outer: float,
    V: int,
) -> None:
    """``weight[y] += outer * row_factors * residuals * h`` and ``bias[y]`` the same without h."""
    if grads.weight is None and grads.bias is None:
        return
    C, H = h.shape
    h = h if h.stride(1) == 1 else h.contiguous()
    labels, order = y.sort(stable=True)
    block = min(power_of_2(H), 512)
    label_grad_kernel[(C, 1 if grads.weight is None else -(-H // block))](
        hidden=h,
        labels=labels,
        order=order,
        residuals=residuals,
        row_factors=row_factors,
        d_weight=grads.weight,
        d_bias=grads.bias,
        C=C,
        H=H,
        V=V,
        stride_hn=h.stride(0),
        factor=outer,
        BLOCK_C=16,
        BLOCK_H=block,
        num_warps=4,
    )
