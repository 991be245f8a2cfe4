"""From logits to their gradient, by three kernels, with two bytes per logit in between.

The logits of a chunk come as float32 products, one tile of the vocabulary at a time. The first
kernel turns a tile into exponentials in the inputs' dtype, relative to the maximum of their row and
block, and keeps what it needs to know about them in float32. Once all tiles are through, the second
multiplies each block by ``2 ** maximum / sum``, in place, and writes the label's entry: then the
buffer holds ``(softmax - onehot) * slope``, the derivative by the raw products.

The label's entry is alone in its size and has no neighbours to average its rounding with. What
rounding takes from it is kept aside in float32, and the third kernel gives it back to the gradient
of the hidden state: four bytes a token and a row of weight read again, for an error of 1.7e-3 where
it is 2.7e-3 without (peaked bf16 logits). The gradient of the head gets it back by
:mod:`fusedce.kernels.label_grad`.

Rounding an exponential to bf16 is a relative error of 2^-9, no more than rounding the gradient
itself; a logit rounded to bf16 would be wrong by 2^-9 *of its size*, and the probability with it.
(The idea of storing exponentials is QuACK's, https://github.com/Dao-AILab/quack.)

Rows of all buffers are padded to multiples of 16 entries, and masks count the padding in: what
Triton knows to be a multiple of 16 it moves 16 bytes at a time. Numbers and addresses that depend
on how many rows there are, and so differ inside and outside of a CUDA graph, are not specialised
on: compiling inside a graph's capture is an error.
"""

import triton
import triton.language as tl

from .tile import LOG2E, exp, finish_logits, finite_max, logits_slope, token_loss


@triton.jit
def label_of_tile(labels, c, begin, start, T, BLOCK_V: tl.constexpr):
    """Place of row ``c``'s label in a tile, int32; -1 where the block at ``start`` has it not."""
    at = tl.load(labels + c).to(tl.int64) - begin
    return tl.where((at >= start) & (at < tl.minimum(start + BLOCK_V, T)), at, -1).to(tl.int32)


@triton.jit
def finished_label(products, bias, at, scale, softcap):
    """The logit at ``at`` of a row of products: one load; anything where ``at`` is -1."""
    at = tl.maximum(at, 0)
    b = None
    if bias is not None:
        b = tl.load(bias + at).to(tl.float32)
    return finish_logits(tl.load(products + at), b, scale, softcap)


@triton.jit(
    do_not_specialize=[
        "labels", "maxima", "sums", "z_label", "best", "first", "first_block", "T", "stride_block"
    ]
)  # fmt: skip
def exp_tile_kernel(
    products,  # (rows, T) fp32: hidden[first:] @ weight[begin : begin + T].T
    exps,  # (C, V) out
    bias,  # (V,) or None
    labels,  # (C,) int
    maxima,  # (blocks, C) fp32 out, in powers of two, the label's logit left out
    sums,  # (blocks, C) fp32 out, the same
    z_label,  # (C,) fp32 out, where a block holds the label
    best,  # (blocks, C) int32 out, or None: where the maximum is
    first,  # row of the chunk
    first_block,  # begin / BLOCK_V
    T,
    width,  # T rounded up to a multiple of 16
    stride_pc,
    stride_ec,
    stride_block,  # of maxima, sums and best
    scale,  # None for 1
    softcap,  # or None
    AMPLIFY: tl.constexpr,  # a power of two on what is stored: small numbers underflow in fp16
    BLOCK_V: tl.constexpr,
):
    c = first + tl.program_id(0).to(tl.int64)
    begin = first_block * BLOCK_V
    start = tl.program_id(1) * BLOCK_V
    offs_t = start + tl.arange(0, BLOCK_V)
    mask_t = offs_t < width
    products += tl.program_id(0).to(tl.int64) * stride_pc
    z = tl.load(products + offs_t, mask=mask_t, other=0.0)
    b = None
    if bias is not None:
        bias += begin
        b = tl.load(bias + offs_t, mask=mask_t, other=0.0).to(tl.float32)
    z = finish_logits(z, b, scale, softcap)
    slope = logits_slope(z, scale, softcap)

    at = label_of_tile(labels, c, begin, start, T, BLOCK_V)
    if at >= 0:
        tl.store(z_label + c, finished_label(products, bias, at, scale, softcap))
    z = tl.where((offs_t < T) & (offs_t != at), z, float("-inf"))
    m = tl.max(z, axis=0) * LOG2E
    e = exp(z, finite_max(m))
    at_block = (first_block + tl.program_id(1)) * stride_block + c
    tl.store(maxima + at_block, m)
    tl.store(sums + at_block, tl.sum(e, axis=0))
    if best is not None:
        tl.store(best + at_block, begin + start + tl.argmax(z, axis=0))
    g = e * slope
    if AMPLIFY != 1.0:
        g *= AMPLIFY
    tl.store(exps + c * stride_ec + begin + offs_t, g.to(exps.dtype.element_ty), mask=mask_t)


@triton.jit(
    do_not_specialize=[
        "labels", "maxima", "sums", "z_label", "losses", "residuals", "terms", "shifts", "lse",
        "row_factors", "best", "argmax", "rows", "first", "stride_block", "stride_terms",
    ]
)  # fmt: skip
def softmax_grad_kernel(
    exps,  # (C, V)
    grads,  # (C, V) out: exps, or with shifts another buffer
    class_weight,  # (V,) fp32, or None
    labels,  # (C,) int
    maxima,  # (blocks, rows) fp32
    sums,  # (blocks, rows) fp32
    z_label,  # (C,) fp32
    losses,  # (C,) fp32 out
    residuals,  # (C,) fp32 out: what rounding took from the label's entry, without AMPLIFY
    count,  # () int32: rows from here on (counted from the first chunk's) are padding
    terms,  # (3, C) fp32 or None: the gradient is a * (p - onehot) + (b + b2 * lse) * p
    shifts,  # (C,) fp32 or None: and shift * class_weight, taken before anything is rounded
    lse,  # (C,) fp32 out, with terms
    row_factors,  # (C,) fp32 out, with terms: what the row is to be multiplied by
    best,  # (blocks, rows) int32, or None
    argmax,  # (N,) int64 out, where there is best
    rows,  # (N,) int32: where each row belongs, with argmax
    first,
    V,
    width,  # V rounded up to a multiple of 16
    blocks,
    stride_ec,
    stride_gc,
    stride_block,
    stride_terms,
    scale,  # None for 1
    softcap,  # or None
    AMPLIFY: tl.constexpr,
    BLOCKS: tl.constexpr,  # at least `blocks`
    EXP_BLOCK_V: tl.constexpr,  # entries that share a maximum
    BLOCK_V: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    offs_v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < width
    if first + c >= tl.load(count):
        out = grads + c * stride_gc + offs_v
        tl.store(out, tl.zeros((BLOCK_V,), dtype=grads.dtype.element_ty), mask=mask_v)
        tl.store(losses + c, 0.0)
        tl.store(residuals + c, 0.0)
        if terms is not None:
            tl.store(lse + c, 0.0)
            tl.store(row_factors + c, 0.0)
        return

    label = tl.load(labels + c)
    known = (label >= 0) & (label < V)  # a bad label poisons its row, and was never looked up
    label = tl.where(known, label, -1).to(tl.int32)
    z = tl.where(known, tl.load(z_label + c), float("nan"))
    offs_b = tl.arange(0, BLOCKS)
    m = tl.load(maxima + offs_b * stride_block + c, mask=offs_b < blocks, other=float("-inf"))
    s = tl.load(sums + offs_b * stride_block + c, mask=offs_b < blocks, other=0.0)
    m_others = tl.max(m, axis=0)  # -inf where the label is alone
    m_safe = finite_max(m_others)
    others = tl.sum(s * tl.exp2(m - m_safe), axis=0)
    top = finite_max(tl.maximum(m_others, z * LOG2E))
    others *= tl.exp2(m_others - top)
    inverse = 1.0 / (exp(z, top) + others)
    if EXP_BLOCK_V == BLOCK_V:
        own = tl.load(maxima + block * stride_block + c)
    else:
        of_entry = offs_v // EXP_BLOCK_V
        own = tl.load(maxima + of_entry * stride_block + c, mask=offs_v < V, other=0.0)
    factor = tl.exp2(own - top) * inverse
    g = tl.load(exps + c * stride_ec + offs_v, mask=mask_v, other=0.0).to(tl.float32) * factor
    # p - 1 = -(sum of the others), which does not cancel.
    g_label = -others * inverse * logits_slope(z, scale, softcap)
    if terms is not None:
        # The row's size is kept aside: whatever the weights, what is stored is at most `scale`.
        log_sum = tl.log((exp(z, top) + others).to(tl.float64)) + top.to(tl.float64) / LOG2E
        a = tl.load(terms + c)
        by_lse = tl.load(terms + 2 * stride_terms + c) * log_sum.to(tl.float32)
        b = tl.load(terms + stride_terms + c) + by_lse
        size = tl.abs(a) + tl.abs(b)
        if shifts is not None:
            shift = tl.load(shifts + c)
            size += tl.abs(shift)
        # A power of two: the products' other operand takes it in without being rounded again.
        exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
        size = tl.where(size == 0.0, 1.0, exponent.to(tl.float32, bitcast=True))
        g *= (a + b) / size
        p = exp(z, top) * inverse * logits_slope(z, scale, softcap)
        g_label = (a / size) * g_label + (b / size) * p
        if shifts is not None:  # (no soft-cap beside it: the slope is the scale)
            shift /= size
            if scale is not None:
                shift *= scale
            if class_weight is not None:
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
        tl.store(residuals + c, g_label - rounded * (1.0 / AMPLIFY))
        if best is not None:
            index = tl.load(best + tl.argmax(m, axis=0) * stride_block + c)
            index = tl.where(z * LOG2E > m_others, label, index)
            tl.store(argmax + tl.load(rows + first + c), index.to(tl.int64))
    g = tl.where(offs_v == label, rounded, g)
    out = grads + c * stride_gc + offs_v  # (not kept in registers from the beginning)
    tl.store(out, g.to(grads.dtype.element_ty), mask=mask_v)


@triton.jit(do_not_specialize=["labels", "residuals", "row_factors", "rows"])
def hidden_grad_kernel(
    products,  # (C, H) fp32: gradient of the logits @ weight, AMPLIFY times
    weight,  # (V, H)
    labels,  # (C,) int
    residuals,  # (C,) fp32
    row_factors,  # (C,) fp32 or None: multiply all of the above
    rows,  # (C,) int32: where each row belongs
    d_hidden,  # (N, H) out
    H,
    V,
    stride_wv,
    stride_dn,
    factor,  # of all rows
    AMPLIFY: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    label = tl.load(labels + c).to(tl.uint32)  # negative ones are large then
    at = tl.where(label < V, label, 0).to(tl.int64)  # of a bad one the residual is NaN
    if row_factors is not None:
        factor *= tl.load(row_factors + c)
    w = tl.load(weight + at * stride_wv + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    g = tl.load(products + c * H + offs_h, mask=mask_h, other=0.0)
    g = (g * (1.0 / AMPLIFY) + tl.load(residuals + c) * w) * factor
    row = tl.load(rows + c).to(tl.int64)
    tl.store(d_hidden + row * stride_dn + offs_h, g.to(d_hidden.dtype.element_ty), mask=mask_h)
