"""Kernel of the gradient of a tile of logits, with known log-sum-exp and factors per row.

The label's entry of a row leaves the tile, which holds 0 there, and is kept in float32, as in
training (:mod:`fusedce.kernels.softmax_grad`).
"""

import triton
import triton.language as tl

from .softmax_grad import label_of_tile
from .tile import LOG2E, finish_logits, logits_slope


@triton.jit(
    do_not_specialize=[
        "labels", "lse", "temperature", "alpha", "beta", "gamma", "at_label", "entries",
        "first", "begin", "T",
    ]
)  # fmt: skip
def token_grad_kernel(
    products,  # (C, T) fp32: hidden @ weight[begin : begin + T].T
    grads,  # (C, T) out: AMPLIFY times the derivative by the products
    bias,  # (V,) from `begin`, or None
    class_weight,  # (V,) fp32 from `begin`, or None
    labels,  # (C,) int
    lse,  # (C,) fp32
    temperature,  # (C,) fp32, or None: divisor of the logits in p alone
    alpha,  # (C,) fp32, as all below: g = p * (alpha - beta * log p) + gamma * class_weight
    beta,  # or None
    gamma,  # or None
    at_label,  # (C,) fp32: g at the label
    entries,  # (C,) fp32 out: the label's, without AMPLIFY
    count,  # () int32: rows from here on (counted from the first block's) are padding
    first,
    begin,
    T,
    width,  # T rounded up to a multiple of 16
    stride_pc,
    stride_gc,
    scale,  # None for 1
    softcap,  # or None
    AMPLIFY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the gradient of one block of a row, and the label's entry apart."""
    c = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_V
    offs_t = start + tl.arange(0, BLOCK_V)
    mask_t = offs_t < width
    out = grads + c * stride_gc + offs_t
    if first + c >= tl.load(count):
        tl.store(out, tl.zeros((BLOCK_V,), dtype=grads.dtype.element_ty), mask=mask_t)
        return
    products += c * stride_pc
    z = tl.load(products + offs_t, mask=mask_t, other=0.0)
    b = None
    if bias is not None:
        b = tl.load(bias + offs_t, mask=mask_t, other=0.0).to(tl.float32)
    z = finish_logits(z, b, scale, softcap)

    log_p = z
    if temperature is not None:
        log_p /= tl.load(temperature + c)
    log_p -= tl.load(lse + c)
    p = tl.exp2(log_p * LOG2E)
    factor = tl.load(alpha + c)
    if beta is not None:
        g = p * (factor - tl.load(beta + c) * tl.maximum(log_p, -1e30))  # 0 * inf is 0 here
    else:
        g = p * factor
    if gamma is not None:
        if class_weight is not None:
            g += tl.load(gamma + c) * tl.load(class_weight + offs_t, mask=mask_t, other=0.0)
        else:
            g += tl.load(gamma + c)
    slope = logits_slope(z, scale, softcap)
    g *= slope * AMPLIFY

    at = label_of_tile(labels, c, begin, start, T, BLOCK_V)
    if at >= 0:
        own = tl.sum(tl.where(offs_t == at, slope, 0.0), axis=0)
        tl.store(entries + c, tl.load(at_label + c) * own)
    g = tl.where(offs_t == at, 0.0, g)
    tl.store(out, g.to(grads.dtype.element_ty), mask=mask_t)
