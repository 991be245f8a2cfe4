"""Host side of the gradients of a head: finish products, and add the labels' entries to them.

:mod:`fusedce.kernels.input_grads` adds the entries to the product. In a buffer of two bytes the
product is rounded before that. If hidden states share a mean, product and entries nearly cancel in
a row, so its error is up to 2.3 roundings.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ...contract.problem import Problem, Projection
from ...kernels.input_grads import hidden_grad_kernel, label_grad_kernel
from ..plan import power_of_2
from . import archs
from .launch import launch_grid, padded, pointwise


class Head:
    """A head as the kernels of its gradients read it."""

    def __init__(self, problem: Problem) -> None:
        weight, bias = problem.weight, problem.bias
        self.arch = archs.architecture(weight.device)
        self.weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.pointwise = pointwise(Projection.of(problem))
        if bias is not None:
            self.pointwise["bias"] = padded(bias)
        # The power of two by which the gradient of the logits, at most |logit_scale|, is stored.
        # In float16 a probability below 6e-5 loses bits and one below 6e-8 is lost, and most
        # classes of a large vocabulary have such probabilities; the other dtypes have the range.
        self.grad_scale = 1.0
        if weight.dtype == torch.float16:
            size = max(abs(problem.logit_scale), 1.0)
            self.grad_scale = 2.0 ** (14 - math.ceil(math.log2(size)))

    def finish_hidden(
        self,
        products: Tensor,  # (n, H) fp32, `grad_scale` times the gradient of the logits @ weight
        columns: Tensor,  # (C,) int: see `add_label_grads`
        label_grads: Tensor,  # (C,) fp32
        factors: Tensor | None,  # (C,) fp32: of the products
        rows: Tensor,  # (N,) int32
        d_hidden: Tensor,  # (N, H) to fill at rows[first + begin:]
        begin: int,  # row of the chunk
        first: int,  # number of the chunk's first row
        outer: float,  # a factor
    ) -> None:
        """Add single entries to the rows of products, and store them at their positions."""
        V, H = self.weight.shape
        launch_grid(
            hidden_grad_kernel,
            (len(products), -(-H // 1024)),
            products=products,
            weight=self.weight,
            columns=columns,
            label_grads=label_grads,
            row_factors=factors,
            rows=rows,
            d_hidden=d_hidden,
            begin=begin,
            first=first,
            H=H,
            V=V,
            stride_wv=self.weight.stride(0),
            stride_dn=d_hidden.stride(0),
            factor=outer,
            GRAD_SCALE=self.grad_scale,
            BLOCK_H=min(power_of_2(H), 1024),
            num_warps=archs.ROW_WARPS,
        )


def add_to_bias(
    bias: Tensor, g: Tensor, factors: Tensor | None, alpha: float, scratch: Tensor
) -> None:
    """``bias (V,) += alpha * g.T @ factors`` for ``g (C, V)``; without factors they are 1.

    Columns of two bytes are widened in ``scratch``, fp32.
    """
    if factors is None:
        bias.add_(g.sum(0, dtype=torch.float32), alpha=alpha)
        return
    step = max(scratch.numel() // len(g), 1)
    for i in range(0, len(bias), step):
        some = g[:, i : i + step]
        if some.dtype != torch.float32:
            some = scratch[: some.numel()].view(some.shape).copy_(some)
        bias[i : i + step].add_(torch.mv(some.t(), factors), alpha=alpha)


def add_label_grads(
    weight: Tensor | None,  # (V, H)
    bias: Tensor | None,  # (V,)
    columns: Tensor,  # (C,) int; entries out of [0, V) are left out
    label_grads: Tensor,  # (C,) fp32
    h: Tensor,  # (N, H)
    V: int,
    outer: float,  # a factor
    rows: Tensor | None = None,  # (N,) int32: the row of h of each entry; None: that of its number
) -> None:
    """Add ``outer * label_grads`` at ``columns`` to the head's gradients. Deterministic."""
    if weight is None and bias is None:
        return
    columns, order = columns.sort(stable=True)  # nothing waits for the device
    C, H = len(columns), h.shape[1]
    block_c, block_h = archs.LABEL_GRAD_BLOCK
    block_h = min(power_of_2(H), block_h)
    launch_grid(
        label_grad_kernel,
        (C, 1 if weight is None else -(-H // block_h)),
        hidden=h,
        columns=columns,
        order=order,
        label_grads=label_grads,
        rows=rows,
        d_weight=weight,
        d_bias=bias,
        C=C,
        H=H,
        V=V,
        stride_hn=h.stride(0),
        factor=outer,
        BLOCK_C=block_c,
        BLOCK_H=block_h,
        num_warps=archs.LABEL_GRAD_WARPS,
    )


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

    none = zeros(1, dtype=of_columns) - 1  # no column: nothing is added
    bias = zeros(1) if biased else None
    h, rows = zeros(1, H, dtype=dtype), zeros(1, dtype=torch.int32)
    add_label_grads(zeros(1, H), bias, none, zeros(1), h, V, 1.0, rows)
