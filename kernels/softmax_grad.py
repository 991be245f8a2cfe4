"""From logits to their gradient, by three kernels, with two bytes per logit in between.

The logits of a chunk come as float32 products, one tile of the vocabulary at a time. The first
kernel turns a tile into exponentials in the inputs' dtype, relative to the maximum of their row and
block, and keeps what it needs to know about them in float32. Once all tiles are through, the second
multiplies each block by ``2 ** maximum / sum``, in place, and writes the label's entry: then the
buffer holds ``(softmax - onehot) * slope``, the derivative by the raw products.

The label's entry is alone in its size and has no neighbours to average its rounding with. What
rounding takes from it is kept aside in float32, and the third kernel gives it back to the gradient
of the hidden state.

Rounding an exponential to bf16 is a relative error of 2^-9, no more than rounding the gradient
itself; a logit rounded to bf16 would be wrong by 2^-9 *of its size*, and the probability with it.
(The idea of storing exponentials is QuACK's, https://github.com/Dao-AILab/quack.)
"""

import triton
import triton.language as tl

from .tile import LOG2E, exp, finish_logits, finite_max, logits_slope, token_loss


@triton.jit(do_not_specialize=["begin"])
def exp_tile_kernel(
    products,  # (C, T) fp32: hidden @ weight[begin : begin + T].T
    exps,  # (C, V) out, from column `begin`
    bias,  # (V,), from `begin`
    labels,  # (C,) int
    maxima,  # (blocks, C) fp32 out, in powers of two, the label's logit left out
    sums,  # (blocks, C) fp32 out, the same
    z_label,  # (C,) fp32 out, where a block holds the label
    places,  # (blocks, C) int32 out, if HAS_ARGMAX: where the maximum is
    begin,
    C,
    T,
    stride_pc,
    stride_ec,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    AMPLIFY: tl.constexpr,  # a power of two on what is stored: small numbers underflow in fp16
    BLOCK_V: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    offs_t = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_t = offs_t < T
    z = tl.load(products + c * stride_pc + offs_t, mask=mask_t, other=0.0)
    b = tl.load(bias + offs_t, mask=mask_t, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    z = finish_logits(z, b, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    slope = logits_slope(z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)

    is_label = mask_t & (begin + offs_t == tl.load(labels + c))
    found = tl.max(is_label.to(tl.int32), axis=0) > 0
    tl.store(z_label + c, tl.sum(tl.where(is_label, z, 0.0), axis=0), mask=found)

    z = tl.where(mask_t & (is_label == 0), z, float("-inf"))
    m = tl.max(z, axis=0) * LOG2E
    e = exp(z, finite_max(m))
    block = begin // BLOCK_V + tl.program_id(1)
    tl.store(maxima + block * C + c, m)
    tl.store(sums + block * C + c, tl.sum(e, axis=0))
    if HAS_ARGMAX:
        tl.store(places + block * C + c, begin + tl.program_id(1) * BLOCK_V + tl.argmax(z, axis=0))
    g = e * slope
    if AMPLIFY != 1.0:
        g *= AMPLIFY
    tl.store(exps + c * stride_ec + offs_t, g.to(exps.dtype.element_ty), mask=mask_t)


@triton.jit(do_not_specialize=["first"])
def softmax_grad_kernel(
    exps,  # (C, V)
    grads,  # (C, V) out: exps, or where HAS_SHIFT another buffer
    class_weight,  # (V,) fp32, if HAS_CLASS_WEIGHT
    labels,  # (C,) int
    maxima,  # (blocks, C) fp32
    sums,  # (blocks, C) fp32
    z_label,  # (C,) fp32
    losses,  # (C,) fp32 out
    residuals,  # (C,) fp32 out: what rounding took from the label's entry, without AMPLIFY
    count,  # () int32: rows from here on (counted from the first chunk's) are padding
    terms,  # (4, C) fp32, if HAS_TERMS: a, b, b2, shift, see below
    lse,  # (C,) fp32 out, if HAS_TERMS
    row_factors,  # (C,) fp32 out, if HAS_TERMS: what the row is to be multiplied by
    places,  # (blocks, C) int32, if HAS_ARGMAX
    argmax,  # (C,) int64 out, if HAS_ARGMAX
    first,
    C,
    V,
    blocks,
    stride_ec,
    stride_gc,
    scale,
    softcap,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TERMS: tl.constexpr,  # the gradient is a * (p - onehot) + (b + b2 * lse) * p
    HAS_SHIFT: tl.constexpr,  # and shift * class_weight, taken before anything is rounded
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    AMPLIFY: tl.constexpr,
    BLOCKS: tl.constexpr,  # at least `blocks`
    BLOCK_V: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    out = grads + c * stride_gc + offs_v
    if first + c >= tl.load(count):
        tl.store(out, tl.zeros((BLOCK_V,), dtype=grads.dtype.element_ty), mask=mask_v)
        tl.store(losses + c, 0.0)
        tl.store(residuals + c, 0.0)
        if HAS_TERMS:
            tl.store(lse + c, 0.0)
            tl.store(row_factors + c, 0.0)
        return

    label = tl.load(labels + c).to(tl.int64)
    known = (label >= 0) & (label < V)  # a bad label poisons its row, and was never looked up
    z = tl.where(known, tl.load(z_label + c), float("nan"))
    offs_b = tl.arange(0, BLOCKS)
    m = tl.load(maxima + offs_b * C + c, mask=offs_b < blocks, other=float("-inf"))
    s = tl.load(sums + offs_b * C + c, mask=offs_b < blocks, other=0.0)
    m_others = tl.max(m, axis=0)  # -inf where the label is alone
    m_safe = finite_max(m_others)
    others = tl.sum(s * tl.exp2(m - m_safe), axis=0)
    top = finite_max(tl.maximum(m_others, z * LOG2E))
    others *= tl.exp2(m_others - top)
    inverse = 1.0 / (exp(z, top) + others)
    factor = tl.exp2(tl.load(maxima + block * C + c) - top) * inverse
    g = tl.load(exps + c * stride_ec + offs_v, mask=mask_v, other=0.0).to(tl.float32) * factor
    # p - 1 = -(sum of the others), which does not cancel.
    g_label = -others * inverse * logits_slope(z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    if HAS_TERMS:
        # The row's size is kept aside: whatever the weights, what is stored is at most `scale`.
        log_sum = tl.log((exp(z, top) + others).to(tl.float64)) + top.to(tl.float64) / LOG2E
        a = tl.load(terms + c)
        b = tl.load(terms + C + c) + tl.load(terms + 2 * C + c) * log_sum.to(tl.float32)
        shift = tl.load(terms + 3 * C + c)
        size = tl.abs(a) + tl.abs(b)
        if HAS_SHIFT:
            size += tl.abs(shift)
        # A power of two: the products' other operand takes it in without being rounded again.
        exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
        size = tl.where(size == 0.0, 1.0, exponent.to(tl.float32, bitcast=True))
        g *= (a + b) / size
        p = exp(z, top) * inverse * logits_slope(z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        g_label = (a / size) * g_label + (b / size) * p
        if HAS_SHIFT:  # (no soft-cap beside it: the slope is the scale)
            shift *= scale / size
            if HAS_CLASS_WEIGHT:
                cw = tl.load(class_weight + offs_v, mask=mask_v, other=0.0)
                g += shift * AMPLIFY * cw
                g_label += shift * tl.load(class_weight + tl.where(known, label, 0))
            else:
                g += shift * AMPLIFY
                g_label += shift
        if block == 0:
            tl.store(lse + c, log_sum.to(tl.float32))
            tl.store(row_factors + c, size)
    rounded = (g_label * AMPLIFY).to(grads.dtype.element_ty).to(tl.float32)
    if block == 0:
        tl.store(losses + c, token_loss(top, others, z).to(tl.float32))
        tl.store(residuals + c, g_label - rounded / AMPLIFY)
        if HAS_ARGMAX:
            best = tl.load(places + tl.argmax(m, axis=0) * C + c)
            tl.store(argmax + c, tl.where(z * LOG2E > m_others, label, best.to(tl.int64)))
    g = tl.where(offs_v == label, rounded, g)
    g = tl.where(known, g, float("nan"))
    tl.store(out, g.to(grads.dtype.element_ty), mask=mask_v)


@triton.jit(do_not_specialize=["first"])
def hidden_grad_kernel(
    products,  # (C, H) fp32: gradient of the logits @ weight
    weight,  # (V, H)
    labels,  # (C,) int
    residuals,  # (C,) fp32
    row_factors,  # (C,) fp32, if HAS_FACTORS: multiply all of the above
    rows,  # (N,) int32: where each row belongs
    d_hidden,  # (N, H) out
    first,  # place of the first row in `rows`
    H,
    V,
    stride_wv,
    stride_dn,
    amplify,
    factor,
    HAS_FACTORS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    label = tl.load(labels + c).to(tl.int64)
    # A bad label must not read out of bounds; its residual is NaN, whatever is read instead.
    label = tl.where((label >= 0) & (label < V), label, 0)
    g = tl.load(products + c * H + offs_h, mask=mask_h, other=0.0) / amplify
    w = tl.load(weight + label * stride_wv + offs_h, mask=mask_h, other=0.0)
    g = (g + tl.load(residuals + c) * w.to(tl.float32)) * factor
    if HAS_FACTORS:
        g *= tl.load(row_factors + c)
    row = tl.load(rows + first + c).to(tl.int64)
    tl.store(d_hidden + row * stride_dn + offs_h, g.to(d_hidden.dtype.element_ty), mask=mask_h)
