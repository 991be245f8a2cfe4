"""The training pass: chunks of logits by cuBLAS, their gradient in place, two more products.

The number of valid tokens is read once, since the host sets the sizes of cuBLAS's products.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from fusedce.backends import configs
from fusedce.backends import launch_common as common
from fusedce.backends.plan import chunk_size
from fusedce.kernels.grad_rows import grad_rows_kernel

_WEIGHT_GRAD_ROWS = 16384  # vocabulary rows whose chunk gradient is held before it is added


def loss_and_grads(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    bias: Tensor | None,  # (V,)
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    chunk_tokens: int | None,
    d_hidden: Tensor | None,  # (N, H) to fill
    d_weight: Tensor | None,  # (V, H) to fill
    d_bias: Tensor | None,  # (V,) to fill
) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()``; the gradients of the sum go to the given buffers."""
    V, H = weight.shape
    device = hidden.device
    labels = labels.contiguous()
    with common.on(device):
        tickets = torch.empty(0, dtype=torch.int32, device=device)
        rows, count, n_valid, loss_sum = common.compact(labels, V, ignore_index, tickets)
        common.raise_on_cpu(n_valid, V, ignore_index)
        n = int(count)  # the one host synchronisation
        if d_hidden is not None:
            d_hidden.zero_()
        if n == 0:
            for grad in (d_weight, d_bias):
                if grad is not None:
                    grad.zero_()
            return loss_sum, n_valid

        rows = rows[:n].long()
        C = min(
            n,
            chunk_size(
                n,
                V,
                H,
                logit_bytes=4,
                accumulator=d_weight is not None and d_weight.dtype != torch.float32,
                on_cpu=False,
                chunk_tokens=chunk_tokens,
            ),
        )
        narrow = hidden.element_size() < 4
        amplify = _amplify(hidden.dtype, logit_scale)
        several = n > C
        d_weight_sum = d_weight
        if several and d_weight is not None and d_weight.dtype != torch.float32:
            d_weight_sum = torch.empty(V, H, dtype=torch.float32, device=device)
        d_bias_sum = torch.zeros(0 if d_bias is None else V, device=device)
        buffer = torch.empty(C, V, dtype=torch.float32, device=device)
        losses = torch.empty(n, dtype=torch.float32, device=device)

        for begin in range(0, n, C):
            chunk = rows[begin : begin + C]
            h, y = hidden[chunk], labels[chunk]  # (C, H), (C,)
            logits = _mm(h, weight.t(), buffer[: len(chunk)])
            g = logits
            if narrow:  # packs the front of each row of logits
                g = logits.view(hidden.dtype)[:, :V]
            grad_rows_kernel[(len(chunk),)](
                logits,
                g,
                weight if bias is None else bias.contiguous(),
                y,
                losses[begin:],
                V,
                logits.stride(0),
                g.stride(0),
                logit_scale,
                1.0 if softcap is None else softcap,
                HAS_BIAS=bias is not None,
                HAS_SCALE=logit_scale != 1.0,
                HAS_SOFTCAP=softcap is not None,
                AMPLIFY=amplify,
                PACKED=narrow,
                BLOCK_V=min(triton.next_power_of_2(V), configs.GRAD_ROWS_BLOCK_V),
                num_warps=configs.GRAD_ROWS_WARPS,
            )
            if d_hidden is not None:
                d_hidden[chunk] = _hidden_grad(g, weight, d_hidden.dtype, 1 / amplify)
            if d_weight_sum is not None:
                _add_weight_grad(d_weight_sum, g, h, 1 / amplify, first=begin == 0)
            if d_bias is not None:
                d_bias_sum.add_(g.sum(0, dtype=torch.float32), alpha=1 / amplify)

        if d_weight is not None and d_weight_sum is not None and d_weight_sum is not d_weight:
            d_weight.copy_(d_weight_sum)
        if d_bias is not None:
            d_bias.copy_(d_bias_sum)
        return losses.sum(dtype=torch.float64).float(), n_valid


def _mm(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    """``a @ b``: to float32 from float32 accumulators where ``out`` is given, else to a's dtype."""
    if a.dtype == torch.float32:
        return torch.mm(a, b, out=out)
    if a.device.type != "cuda":  # mixed output dtypes exist on CUDA only
        product = torch.mm(a.float(), b.float(), out=out)
        return product if out is not None else product.to(a.dtype)
    if out is None:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32, out=out)


def _amplify(dtype: torch.dtype, logit_scale: float) -> float:
    """The power of two by which the gradient of the logits, at most |logit_scale|, is stored.

    A probability below 6e-5 loses bits in float16 and one below 6e-8 is lost, and a vocabulary has
    little else. bfloat16 and float32 have the range.
    """
    if dtype != torch.float16:
        return 1.0
    return 2.0 ** (14 - max(math.ceil(math.log2(max(abs(logit_scale), 1.0))), 0))


def _hidden_grad(g: Tensor, weight: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    """``factor * g (C, V) @ weight (V, H)``."""
    if dtype == g.dtype:
        return _mm(g, weight, None)
    product = torch.empty(len(g), weight.shape[1], dtype=torch.float32, device=g.device)
    return _mm(g, weight, product).mul_(factor).to(dtype)


def _add_weight_grad(d_weight: Tensor, g: Tensor, h: Tensor, factor: float, *, first: bool) -> None:
    """``d_weight (V, H) (+)= factor * g (C, V).T @ h (C, H)``, accumulated in d_weight's dtype."""
    if d_weight.dtype == h.dtype:
        torch.addmm(d_weight, g.t(), h, beta=0 if first else 1, out=d_weight)
        return
    for begin in range(0, len(d_weight), _WEIGHT_GRAD_ROWS):
        part = d_weight[begin : begin + _WEIGHT_GRAD_ROWS]
        product = torch.empty_like(part)
        _mm(g[:, begin : begin + _WEIGHT_GRAD_ROWS].t(), h, product)
        torch.mul(product, factor, out=part) if first else part.add_(product, alpha=factor)
