"""The gradient of the head by a chunk: a product, and the entries that are not in it.

:mod:`fusedce.kernels.input_grads` adds those entries to the product. In a buffer of two bytes (that
of a single chunk and a large head) the product is rounded before. That shows where hidden states
share a mean, so that a row is a small difference of the two: up to 2.3 roundings.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients
from fusedce.backends.triton import archs
from fusedce.backends.triton.chunks import ChunkGradient, Chunks
from fusedce.backends.triton.launch import power_of_2, run
from fusedce.backends.triton.products import add_product
from fusedce.kernels.input_grads import label_grad_kernel

_COLUMNS = 16384  # of a chunk's gradient that are widened at a time


def add_head_gradients(
    chunks: Chunks,
    grads: Gradients,  # whose weight and bias are added to
    gradient: ChunkGradient,
    h: Tensor,  # (C, H), of unit stride
    outer: float,  # a factor
    *,
    first: bool,  # weight is not yet written
) -> None:
    """``weight (+)= gradient.T @ h`` and ``bias += gradient.sum(0)``. Deterministic."""
    weight, bias = grads.weight, grads.bias
    g, factors = gradient.logits, gradient.factors
    alpha = outer / chunks.amplify
    if bias is not None:
        add_to_bias(bias, g, factors, alpha)
    if weight is not None:
        _add_product(weight, gradient, h, alpha, first=first)
    add_entries(grads, gradient.labels, gradient.entries, h, outer)
    if weight is not None and weight.element_size() == 2:
        labels = gradient.labels.dtype
        compile_for_sums(h.device, h.dtype, labels, g.shape[1], h.shape[1], bias is not None)


def add_to_bias(bias: Tensor, g: Tensor, factors: Tensor | None, alpha: float) -> None:
    """``bias (V,) += alpha * g.T @ factors`` for ``g (C, V)``; without factors they are 1."""
    if factors is None:
        bias.add_(g.sum(0, dtype=torch.float32), alpha=alpha)
        return
    for i in range(0, len(bias), _COLUMNS):
        sums = torch.mv(g[:, i : i + _COLUMNS].float().t(), factors)
        bias[i : i + _COLUMNS].add_(sums, alpha=alpha)


def _add_product(
    total: Tensor,  # (V, H)
    gradient: ChunkGradient,
    h: Tensor,  # (C, H)
    alpha: float,
    *,
    first: bool,
) -> None:
    largest, factors = None, gradient.factors
    if gradient.scaled is not None:
        h = gradient.scaled
    elif factors is not None:
        if h.dtype == torch.float16:  # whose range is not that of the factors
            largest = factors.amax().clamp_(min=torch.finfo(torch.float32).tiny)
            factors = factors / largest
        h = (h.float() * factors[:, None]).to(h.dtype)
    add_product(total, gradient.logits, h, alpha, largest, first=first)


def add_entries(
    grads: Gradients,
    columns: Tensor,  # (K * C,) int; out of range: none
    entries: Tensor,  # (K * C,) fp32
    h: Tensor,  # (C, H)
    outer: float,
) -> None:
    """``weight[columns] += outer * entries * h``, and ``bias[columns]`` the same without h."""
    weight, bias = grads.weight, grads.bias
    if weight is None and bias is None:
        return
    V = len(bias) if weight is None else len(weight)  # type: ignore[arg-type]
    columns, order = columns.sort(stable=True)  # nothing waits for the device
    _launch(h, columns, order, entries, weight, bias, V, outer)


@functools.cache
def compile_for_sums(
    device: torch.device,
    dtype: torch.dtype,
    of_columns: torch.dtype,
    V: int,
    H: int,
    biased: bool,
) -> None:
    """Warm-up launch of the kernel that adds to float32, so that graph capture never compiles.

    A CUDA graph computes the ignored rows, too: it may have several chunks, with a float32 sum,
    where its warm-up had one with a gradient of two bytes.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    _launch(
        zeros(1, H, dtype=dtype),
        zeros(1, dtype=of_columns) - 1,  # no column: nothing is added
        zeros(1, dtype=torch.int64),
        zeros(1),
        zeros(1, H),
        zeros(1) if biased else None,
        V,
        1.0,
    )


def _launch(
    h: Tensor,  # (C, H)
    columns: Tensor,  # (K * C,) sorted
    order: Tensor,  # (K * C,) int64
    entries: Tensor,  # (K * C,) fp32
    weight: Tensor | None,  # (V, H)
    bias: Tensor | None,  # (V,)
    V: int,
    outer: float,
) -> None:
    n, (C, H) = columns.shape[0], h.shape
    block_c, block_h = archs.architecture(h.device).label_block
    block_h = min(power_of_2(H), block_h)
    run(
        label_grad_kernel,
        (n, 1 if weight is None else -(-H // block_h)),
        hidden=h,
        columns=columns,
        order=order,
        entries=entries,
        d_weight=weight,
        d_bias=bias,
        n=n,
        C=C,
        H=H,
        V=V,
        stride_hn=h.stride(0),
        stride_row=C,
        factor=outer,
        BLOCK_C=block_c,
        BLOCK_H=block_h,
        num_warps=4,
    )
