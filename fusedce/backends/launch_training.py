"""The training pass: chunks of logits by cuBLAS, their gradient in place, two more products.

A chunk holds its exponentials in the inputs' dtype; float32 logits exist for one tile of the
vocabulary at a time. The number of valid tokens is read once, since the host sets the sizes of
cuBLAS's products; inside a CUDA graph, which nothing may wait for, all rows are computed.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from fusedce.backends import configs
from fusedce.backends import launch_common as common
from fusedce.backends.plan import chunk_size
from fusedce.kernels.softmax_grad import exp_tile_kernel, hidden_grad_kernel, softmax_grad_kernel

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
    device, dtype = hidden.device, hidden.dtype
    labels = labels.contiguous()
    with common.on(device):
        tickets = torch.empty(0, dtype=torch.int32, device=device)
        rows, count, n_valid, loss_sum = common.compact(labels, V, ignore_index, tickets)
        common.raise_on_cpu(n_valid, V, ignore_index)
        capturing = _capturing(device)
        n = len(labels) if capturing else int(count)  # the one host synchronisation
        if n == 0:
            for grad in (d_hidden, d_weight, d_bias):
                if grad is not None:
                    grad.zero_()
            return loss_sum, n_valid

        narrow = d_weight is not None and d_weight.dtype != torch.float32
        C = chunk_size(
            n,
            V,
            H,
            logit_bytes=dtype.itemsize,
            accumulator=narrow,
            on_cpu=False,
            chunk_tokens=chunk_tokens,
        )
        C = min(C, n)
        every_row = n == len(labels) and not capturing
        if d_hidden is not None and not every_row:
            d_hidden.zero_()
        d_weight_sum = d_weight
        if n > C and narrow:
            d_weight_sum = torch.empty(V, H, dtype=torch.float32, device=device)
        d_bias_sum = torch.zeros(0 if d_bias is None else V, device=device)
        losses = torch.empty(n, dtype=torch.float32, device=device)
        chunks = _Chunks(weight, bias, softcap, logit_scale, C)

        for begin in range(0, n, C):
            end = min(begin + C, n)
            chunk = slice(begin, end) if every_row else rows[begin:end].long()
            h, y = hidden[chunk], labels[chunk]  # (C, H), (C,)
            if capturing:  # ignored rows take part, as zeros
                padding = torch.arange(begin, end, device=device) >= count
                h = h.masked_fill(padding[:, None], 0)
            g = chunks.gradient(h, y, losses[begin:end], count, begin)  # (C, V)
            if d_hidden is not None:
                chunks.hidden_gradient(g, y, rows, begin, d_hidden)
            if d_weight_sum is not None:
                _add_weight_grad(d_weight_sum, g, h, 1 / chunks.amplify, first=begin == 0)
            if d_bias is not None:
                d_bias_sum.add_(g.sum(0, dtype=torch.float32), alpha=1 / chunks.amplify)

        if d_weight is not None and d_weight_sum is not None and d_weight_sum is not d_weight:
            d_weight.copy_(d_weight_sum)
        if d_bias is not None:
            d_bias.copy_(d_bias_sum)
        return losses.sum(dtype=torch.float64).float(), n_valid


class _Chunks:
    """The logits of one chunk after another, in the same buffers."""

    def __init__(
        self,
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        softcap: float | None,
        logit_scale: float,
        C: int,
    ) -> None:
        V = weight.shape[0]
        device = weight.device
        self.weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.softcap, self.scale = softcap, logit_scale
        self.bias = None if bias is None else bias.contiguous()
        self.amplify = _amplify(weight.dtype, logit_scale)
        self.block = min(triton.next_power_of_2(V), configs.exp_block(device))
        self.blocks = triton.cdiv(V, self.block)
        self.T = min(max(configs.TILE_ELEMENTS // C // self.block, 1) * self.block, V)
        self.products = torch.empty(C * self.T, dtype=torch.float32, device=device)
        # Rows start at multiples of 16 bytes, which the products that read them want.
        self.exps = torch.empty(C, -(-V // 8) * 8, dtype=weight.dtype, device=device)[:, :V]
        self.stats = torch.empty(2, self.blocks * C, dtype=torch.float32, device=device)
        self.z_label = torch.empty(C, dtype=torch.float32, device=device)
        self.residuals = torch.empty(C, dtype=torch.float32, device=device)

    def gradient(
        self,
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,)
        losses: Tensor,  # (C,) fp32 to fill
        count: Tensor,  # () int32: valid rows
        first: int,  # number of the chunk's first row
    ) -> Tensor:
        """``(C, V)``: ``amplify`` times the derivative of the losses by ``h @ weight.T``."""
        V, C = self.weight.shape[0], len(h)
        exps, (maxima, sums) = self.exps[:C], self.stats
        options = {
            "HAS_SCALE": self.scale != 1.0,
            "HAS_SOFTCAP": self.softcap is not None,
            "AMPLIFY": self.amplify,
            "BLOCK_V": self.block,
            "num_warps": configs.EXP_WARPS,
        }
        softcap = 1.0 if self.softcap is None else self.softcap
        for begin in range(0, V, self.T):
            T = min(self.T, V - begin)
            products = self.products[: C * T].view(C, T)
            _mm(h, self.weight[begin : begin + T].t(), products)
            exp_tile_kernel[(C, triton.cdiv(T, self.block))](
                products,
                exps[:, begin:],
                self.weight if self.bias is None else self.bias[begin:],
                y,
                maxima,
                sums,
                self.z_label,
                begin,
                C,
                T,
                products.stride(0),
                exps.stride(0),
                self.scale,
                softcap,
                HAS_BIAS=self.bias is not None,
                **options,
            )
        softmax_grad_kernel[(C, self.blocks)](
            exps,
            y,
            maxima,
            sums,
            self.z_label,
            losses,
            self.residuals,
            count,
            first,
            C,
            V,
            self.blocks,
            exps.stride(0),
            self.scale,
            softcap,
            BLOCKS=triton.next_power_of_2(self.blocks),
            **options,
        )
        return exps

    def hidden_gradient(
        self,
        g: Tensor,  # (C, V), from `gradient`
        y: Tensor,  # (C,)
        rows: Tensor,  # (N,) int32
        first: int,
        d_hidden: Tensor,  # (N, H) to fill at rows[first : first + C]
    ) -> None:
        V, H = self.weight.shape
        step = max(configs.TILE_ELEMENTS // 2 // H, 128)
        products = torch.empty(min(step, len(g)), H, dtype=torch.float32, device=g.device)
        block = min(triton.next_power_of_2(H), 1024)
        for begin in range(0, len(g), step):
            part = g[begin : begin + step]
            _mm(part, self.weight, products[: len(part)])
            hidden_grad_kernel[(len(part), triton.cdiv(H, block))](
                products,
                self.weight,
                y[begin:],
                self.residuals[begin:],
                rows,
                d_hidden,
                first + begin,
                H,
                V,
                self.weight.stride(0),
                d_hidden.stride(0),
                1 / self.amplify,
                BLOCK_H=block,
                num_warps=configs.EXP_WARPS,
            )


def _capturing(device: torch.device) -> bool:
    """Inside a CUDA graph nothing may wait: then all rows are computed, the ignored ones as 0."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b`` in float32, from float32 accumulators."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    elif a.device.type == "cuda":
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:  # products with another dtype than their operands exist on CUDA only
        torch.mm(a.float(), b.float(), out=out)


def _amplify(dtype: torch.dtype, logit_scale: float) -> float:
    """The power of two by which the gradient of the logits, at most |logit_scale|, is stored.

    A probability below 6e-5 loses bits in float16 and one below 6e-8 is lost, and a vocabulary has
    little else. bfloat16 and float32 have the range.
    """
    if dtype != torch.float16:
        return 1.0
    return 2.0 ** (14 - max(math.ceil(math.log2(max(abs(logit_scale), 1.0))), 0))


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
