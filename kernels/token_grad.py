"""Gradient of a tile of logits whose log-sum-exp is known, with factors of each row's own."""

import triton
import triton.language as tl

from .tile import LOG2E, finish_logits, logits_slope


@triton.jit(do_not_specialize=["first", "begin"])
def token_grad_kernel(
    products,  # (C, T) fp32: hidden @ weight[begin : begin + T].T
    grads,  # (C, V) out, from column `begin`: AMPLIFY times the derivative by the products
    bias,  # (V,), from `begin`
    class_weight,  # (V,) fp32, from `begin`
    labels,  # (C,) int
    lse,  # (C,) fp32
    alpha,  # (C,) fp32, as all below: g = p * (alpha - beta * log p) + gamma * class_weight
    beta,
    gamma,
    at_label,  # (C,) fp32: g at the label
    residuals,  # (C,) fp32 out: what rounding took from the label's entry, without AMPLIFY
    count,  # () int32: rows from here on (counted from the first chunk's) are padding
    first,
    begin,
    T,
    stride_pc,
    stride_gc,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    AMPLIFY: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    offs_t = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_t = offs_t < T
    place = grads + c * stride_gc + offs_t
    if first + c >= tl.load(count):
        tl.store(place, tl.zeros((BLOCK_V,), dtype=grads.dtype.element_ty), mask=mask_t)
        return
    z = tl.load(products + c * stride_pc + offs_t, mask=mask_t, other=0.0)
    b = tl.load(bias + offs_t, mask=mask_t, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    z = finish_logits(z, b, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    slope = logits_slope(z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)

    log_p = z - tl.load(lse + c)
    p = tl.exp2(log_p * LOG2E)
    factor = tl.load(alpha + c)
    if HAS_BETA:
        g = p * (factor - tl.load(beta + c) * tl.maximum(log_p, -1e30))  # 0 * inf is 0 here
    else:
        g = p * factor
    if HAS_GAMMA:
        if HAS_CLASS_WEIGHT:
            g += tl.load(gamma + c) * tl.load(class_weight + offs_t, mask=mask_t, other=0.0)
        else:
            g += tl.load(gamma + c)
    g *= slope * AMPLIFY

    is_label = mask_t & (begin + offs_t == tl.load(labels + c))
    exact = tl.load(at_label + c) * slope
    rounded = (exact * AMPLIFY).to(grads.dtype.element_ty)
    lost = tl.where(is_label, exact - rounded.to(tl.float32) / AMPLIFY, 0.0)
    found = tl.max(is_label.to(tl.int32), axis=0) > 0
    tl.store(residuals + c, tl.sum(lost, axis=0), mask=found)
    tl.store(place, tl.where(is_label, rounded, g.to(grads.dtype.element_ty)), mask=mask_t)
