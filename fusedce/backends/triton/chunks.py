"""A chunk of logits of the training pass: cuBLAS makes it, kernels turn it into its gradient."""

from __future__ import annotations

import functools
import math

import torch
import triton
from torch import Tensor

from fusedce.backends.gradients import Gradients
from fusedce.backends.triton import archs
from fusedce.backends.triton.row_factors import ChunkFactors
from fusedce.contract.problem import Problem
from fusedce.kernels.softmax_grad import exp_tile_kernel, hidden_grad_kernel, softmax_grad_kernel
from fusedce.kernels.token_grad import token_grad_kernel

_PART = 16384  # vocabulary rows whose chunk gradient is held before it is added


class Chunks:
    """The logits of one chunk after another, in the same buffers."""

    def __init__(self, problem: Problem, C: int) -> None:
        weight, bias = problem.weight, problem.bias
        V = weight.shape[0]
        device = weight.device
        self.weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.softcap, self.scale = problem.softcap, problem.logit_scale
        self.bias = None if bias is None else bias.contiguous()
        self.amplify = amplification(weight.dtype, self.scale)
        self.block = min(triton.next_power_of_2(V), archs.exp_block(device))
        self.blocks = triton.cdiv(V, self.block)
        self.T = min(max(archs.TILE_ELEMENTS // C // self.block, 1) * self.block, V)
        self.products = torch.empty(C * self.T, dtype=torch.float32, device=device)
        # Rows start at multiples of 16 bytes, which the products that read them want.
        self.grads = torch.empty(C, -(-V // 8) * 8, dtype=weight.dtype, device=device)[:, :V]
        self.exps = self.grads
        if problem.label_smoothing and problem.softcap is None:
            # What smoothing leaves of a probability is rounded, not the probability itself.
            self.exps = torch.empty(C, V, dtype=torch.float32, device=device)
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
        part: ChunkFactors | None,
        argmax: Tensor | None,  # (C,) int64 to fill
    ) -> Tensor:
        """``(C, V)``: ``amplify`` times the derivative of the losses by ``h @ weight.T``.

        With ``part``, each row still waits for its factor ``part.rows``.
        """
        V, C = self.weight.shape[0], len(h)
        exps, grads, (maxima, sums) = self.exps[:C], self.grads[:C], self.stats
        places = sums  # unused without argmax
        if argmax is not None:
            places = torch.empty(self.blocks * C, dtype=torch.int32, device=h.device)
        options = {
            "HAS_SCALE": self.scale != 1.0,
            "HAS_SOFTCAP": self.softcap is not None,
            "HAS_ARGMAX": argmax is not None,
            "AMPLIFY": self.amplify,
            "BLOCK_V": self.block,
            "num_warps": archs.EXP_WARPS,
        }
        softcap = 1.0 if self.softcap is None else self.softcap
        for begin in range(0, V, self.T):
            T = min(self.T, V - begin)
            products = self.products[: C * T].view(C, T)
            mm(h, self.weight[begin : begin + T].t(), products)
            exp_tile_kernel[(C, triton.cdiv(T, self.block))](
                products,
                exps[:, begin:],
                self.weight if self.bias is None else self.bias[begin:],
                y,
                maxima,
                sums,
                self.z_label,
                places,
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
        class_weight = None if part is None else part.class_weight
        softmax_grad_kernel[(C, self.blocks)](
            exps,
            grads,
            losses if class_weight is None else class_weight,
            y,
            maxima,
            sums,
            self.z_label,
            losses,
            self.residuals,
            count,
            losses if part is None else part.terms,
            losses if part is None else part.lse,
            losses if part is None else part.rows,
            places,
            y if argmax is None else argmax,
            first,
            C,
            V,
            self.blocks,
            exps.stride(0),
            grads.stride(0),
            self.scale,
            softcap,
            HAS_TERMS=part is not None,
            HAS_SHIFT=exps.data_ptr() != grads.data_ptr(),
            HAS_CLASS_WEIGHT=class_weight is not None,
            BLOCKS=triton.next_power_of_2(self.blocks),
            **options,
        )
        return grads

    def known_gradient(
        self,
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,)
        lse: Tensor,  # (C,) fp32, as all down to at_label
        alpha: Tensor,  # g = p * (alpha - beta * log p) + gamma * class_weight
        beta: Tensor | None,
        gamma: Tensor | None,
        at_label: Tensor,  # g at the label
        class_weight: Tensor | None,  # (V,) fp32
        count: Tensor,  # () int32: used rows
        first: int,  # number of the chunk's first row
    ) -> Tensor:
        """``(C, V)``: ``amplify`` times ``g``, times the derivative of z by ``h @ weight.T``."""
        V, C = self.weight.shape[0], len(h)
        grads = self.grads[:C]
        self.residuals.zero_()
        for begin in range(0, V, self.T):
            T = min(self.T, V - begin)
            products = self.products[: C * T].view(C, T)
            mm(h, self.weight[begin : begin + T].t(), products)
            token_grad_kernel[(C, triton.cdiv(T, self.block))](
                products,
                grads[:, begin:],
                self.weight if self.bias is None else self.bias[begin:],
                lse if class_weight is None else class_weight[begin:],
                y,
                lse,
                alpha,
                lse if beta is None else beta,
                lse if gamma is None else gamma,
                at_label,
                self.residuals,
                count,
                first,
                begin,
                T,
                products.stride(0),
                grads.stride(0),
                self.scale,
                1.0 if self.softcap is None else self.softcap,
                HAS_BIAS=self.bias is not None,
                HAS_SCALE=self.scale != 1.0,
                HAS_SOFTCAP=self.softcap is not None,
                HAS_BETA=beta is not None,
                HAS_GAMMA=gamma is not None,
                HAS_CLASS_WEIGHT=class_weight is not None,
                AMPLIFY=self.amplify,
                BLOCK_V=self.block,
                num_warps=archs.EXP_WARPS,
            )
        return grads

    def hidden_gradient(
        self,
        g: Tensor,  # (C, V), from `gradient`
        y: Tensor,  # (C,)
        rows: Tensor,  # (N,) int32
        first: int,
        d_hidden: Tensor,  # (N, H) to fill at rows[first : first + C]
        factors: Tensor | None,  # (C,) fp32: of the rows of g
        outer: float,  # of all of them
    ) -> None:
        V, H = self.weight.shape
        step = max(archs.TILE_ELEMENTS // 2 // H, 128)
        products = torch.empty(min(step, len(g)), H, dtype=torch.float32, device=g.device)
        block = min(triton.next_power_of_2(H), 1024)
        for begin in range(0, len(g), step):
            part = g[begin : begin + step]
            mm(part, self.weight, products[: len(part)])
            hidden_grad_kernel[(len(part), triton.cdiv(H, block))](
                products,
                self.weight,
                y[begin:],
                self.residuals[begin:],
                self.residuals if factors is None else factors[begin:],
                rows,
                d_hidden,
                first + begin,
                H,
                V,
                self.weight.stride(0),
                d_hidden.stride(0),
                self.amplify,
                outer,
                HAS_FACTORS=factors is not None,
                BLOCK_H=block,
                num_warps=archs.EXP_WARPS,
            )

    def add_head_gradients(
        self,
        g: Tensor,  # (C, V), from `gradient`
        h: Tensor,  # (C, H)
        grads: Gradients,
        factors: Tensor | None,  # (C,) fp32: of the rows of g
        outer: float,  # of all of them
        *,
        first: bool,
    ) -> None:
        """``weight (+)= g.T @ h`` and ``bias += g.sum(0)``, rows times their factors."""
        alpha = outer / self.amplify
        if grads.bias is not None and factors is None:
            grads.bias.add_(g.sum(0, dtype=torch.float32), alpha=alpha)
        elif grads.bias is not None and factors is not None:
            for i in range(0, len(grads.bias), _PART):
                sums = torch.mv(g[:, i : i + _PART].float().t(), factors)
                grads.bias[i : i + _PART].add_(sums, alpha=alpha)
        if grads.weight is None:
            return
        largest = None
        if factors is not None:
            if h.dtype == torch.float16:  # whose range is not that of the factors
                largest = factors.amax().clamp_(min=torch.finfo(torch.float32).tiny)
                factors = factors / largest
            h = (h.float() * factors[:, None]).to(h.dtype)
        _add_weight_grad(grads.weight, g, h, alpha, largest, first=first)


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """``out = a @ b`` in float32, from float32 accumulators."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    elif _has_out_dtype(a.device, a.dtype):
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.float(), b.float(), out=out)


@functools.cache
def _has_out_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of another dtype than their operands exist there: CUDA has them."""
    if device.type != "cuda":
        return False
    if torch.version.hip is None:
        return True
    x = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(x, x, out_dtype=torch.float32, out=x.new_empty(16, 16, dtype=torch.float32))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def amplification(dtype: torch.dtype, logit_scale: float) -> float:
    """The power of two by which the gradient of the logits, at most |logit_scale|, is stored.

    A probability below 6e-5 loses bits in float16 and one below 6e-8 is lost, and a vocabulary has
    little else. bfloat16 and float32 have the range.
    """
    if dtype != torch.float16:
        return 1.0
    return 2.0 ** (14 - max(math.ceil(math.log2(max(abs(logit_scale), 1.0))), 0))


def _add_weight_grad(
    d_weight: Tensor, g: Tensor, h: Tensor, factor: float, largest: Tensor | None, *, first: bool
) -> None:
    """``d_weight (V, H) (+)= factor * largest * g (C, V).T @ h (C, H)`` in d_weight's dtype."""
    if d_weight.dtype == h.dtype:
        torch.addmm(d_weight, g.t(), h, beta=0 if first else 1, alpha=factor, out=d_weight)
        return
    for begin in range(0, len(d_weight), _PART):
        part = d_weight[begin : begin + _PART]
        product = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        mm(g[:, begin : begin + _PART].t(), h, product)
        if largest is not None:
            product.mul_(largest)
        if first:
            part.copy_(product.mul_(factor))
        else:
            part.add_(product, alpha=factor)
