"""Kernels that turn logits into their gradient: one exponential per logit, one factor per row.

The logits of a chunk come as float32 products, one tile of the vocabulary at a time.
`exp_tile_kernel` turns a tile into exponentials in the inputs' dtype, relative to the *label's*
logit, which `label_logit_kernel` computes beforehand. One factor, the same in all tiles, then turns
a row of them into probabilities. It is applied to the small operand or result of the two products
that follow, so only these read the chunk. `softmax_rows_kernel` merges the sums of a row's blocks
into its loss and that factor, and writes the hidden state times the factor for the head's gradient.

The label's entry of a row is far larger than the others, so its rounding error would not average
out with theirs. It leaves the chunk, which holds 0 there, and reaches the gradients in float32
(:mod:`fusedce.kernels.input_grads`). Errors of bfloat16 gradients, over that of rounding the exact
ones once, are 1.0 to 1.5 in this way, and up to 2.5 where a wrong class has nearly all the
probability; those of torch's bfloat16 logits are 3 to 15 there.

References are powers of two, so changing the reference is an exact factor. A block that exceeds
2^30 times the label's exponential takes a reference of its own; then `softmax_rows_kernel` rescales
that row to its highest reference. For float16, whose range is too small, it rescales every row, to
probabilities (``STORE_PROBS``).

Rounding an exponential to bf16 is a relative error of 2^-9, no more than rounding the gradient
itself; a logit rounded to bf16 would be wrong by 2^-9 *of its size*, and the probability with it.
(The idea of storing exponentials is QuACK's, https://github.com/Dao-AILab/quack.)

If every row has upstream factors of its own and its log-sum-exp is known, `token_grad_kernel` makes
the gradient of a tile of logits in one step.

Rows of all buffers are padded to multiples of 16 entries, and masks count the padding in: what
Triton knows to be a multiple of 16 it moves 16 bytes at a time. Numbers and addresses that depend
on how many rows there are, and so differ inside and outside of a CUDA graph, are not specialised
on: compiling inside a graph's capture is an error.
"""

import triton
import triton.language as tl

from .tile import (
    LIKELY,
    LOG2E,
    block_reference,
    exp,
    finish_logits,
    finite_max,
    label_logits,
    logits_slope,
    place_of_largest,
    token_loss,
)


@triton.jit(do_not_specialize=["hidden", "labels", "z_label", "C", "stride_hn"])
def label_logit_kernel(
    hidden,  # (C, H)
    weight,  # (V, H)
    bias,  # (V,) or None
    labels,  # (C,) int
    z_label,  # (C,) fp32 out, NaN for bad labels
    C,
    H,
    V,
    stride_hn,
    stride_wv,
    scale,  # None for 1
    softcap,  # or None
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The logit of each row's label, by a dot product in float32."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    row = tl.where(mask_c, offs_c, 0).to(tl.int64)
    label = tl.load(labels + row)
    label = tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)
    z = label_logits(
        hidden + row * stride_hn, weight, bias, label, H, stride_wv, scale, softcap,
        BLOCK_C, BLOCK_H,
    )  # fmt: skip
    tl.store(z_label + offs_c, z, mask=mask_c)


@triton.jit
def label_of_tile(labels, c, begin, start, T, BLOCK_V: tl.constexpr):
    """Index of row ``c``'s label in a tile, int32; -1 where it is not in the block at ``start``."""
    at = tl.load(labels + c).to(tl.int64) - begin
    return tl.where((at >= start) & (at < tl.minimum(start + BLOCK_V, T)), at, -1).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "labels", "maxima", "sums", "z_label", "factors", "best", "first", "first_block", "most",
        "stride_block",
    ]
)  # fmt: skip
def exp_tile_kernel(
    products,  # (rows, T) fp32, rows padded: hidden[first:] @ weight[begin : begin + T].T
    exps,  # (C, width >= V) out: exponentials times the slope of their logits, 0 at the label
    bias,  # (V,) or None
    labels,  # (C,) int
    z_label,  # (C,) fp32, or None: every block has a reference of its own
    factors,  # (C,) fp32, or None: what a row's exponentials are multiplied by
    maxima,  # (blocks, C) fp32 out, the label's logit left out
    sums,  # (blocks, C) fp32 out: sums of their exponentials, relative to the block's reference
    best,  # (blocks, C) int32 out, or None: class of the maximum
    first,  # row of the chunk that products begin with
    first_block,  # the tile's first class / BLOCK_V
    most,  # classes of a tile; the last one may have fewer
    V,
    stride_ec,
    stride_block,  # of maxima, sums and best
    scale,  # None for 1
    softcap,  # or None
    GRAD_SCALE: tl.constexpr,  # a power of two on what is stored: small numbers underflow in fp16
    BLOCK_V: tl.constexpr,
):
    """Exponentials of one block of a row's products, with the block's maximum and sum."""
    c = first + tl.program_id(0).to(tl.int64)
    begin = first_block * BLOCK_V
    start = tl.program_id(1) * BLOCK_V
    offs_t = start + tl.arange(0, BLOCK_V)
    T = tl.minimum(V - begin, most)
    width = tl.cdiv(T, 16) * 16
    mask_t = offs_t < width
    products += tl.program_id(0).to(tl.int64) * width
    z = tl.load(products + offs_t, mask=mask_t, other=0.0)
    b = None
    if bias is not None:
        b = tl.load(bias + begin + offs_t, mask=mask_t, other=0.0).to(tl.float32)
    z = finish_logits(z, b, scale, softcap)
    slope = logits_slope(z, scale, softcap)

    at = label_of_tile(labels, c, begin, start, T, BLOCK_V)
    z = tl.where((offs_t < T) & (offs_t != at), z, float("-inf"))
    m = tl.max(z, axis=0)
    own = None
    if z_label is not None:
        own = tl.load(z_label + c)
    e = exp(z, block_reference(m, own))
    at_block = (first_block + tl.program_id(1)) * stride_block + c
    tl.store(maxima + at_block, m)
    tl.store(sums + at_block, tl.sum(e, axis=0))
    if best is not None:
        tl.store(best + at_block, begin + start + place_of_largest(z, 0))
    g = e * slope
    if factors is not None:
        g *= tl.load(factors + c)
    if GRAD_SCALE != 1.0:
        g *= GRAD_SCALE
    tl.store(exps + c * stride_ec + begin + offs_t, g.to(exps.dtype.element_ty), mask=mask_t)


@triton.jit(
    do_not_specialize=[
        "hidden", "labels", "maxima", "sums", "z_label", "losses", "label_grads",
        "loss_slopes", "lse", "row_factors", "best", "argmax", "rows", "first", "stride_hn",
        "stride_row", "stride_slopes",
    ]
)  # fmt: skip
def softmax_rows_kernel(
    exps,  # (C, width >= V), rewritten in place
    hidden,  # (C, H)
    scaled,  # (C, H) out, or None: hidden times the rows' factors
    labels,  # (C,) int
    maxima,  # (blocks, C) fp32
    sums,  # (blocks, C) fp32
    z_label,  # (C,) fp32
    losses,  # (C,) fp32 out
    label_grads,  # (C,) fp32 out: without GRAD_SCALE and row factor; 0 in exps
    count,  # () int32: rows from here on (counted from the first chunk's) are padding
    loss_slopes,  # (3, C) fp32 or None: the gradient is a * (p - onehot) + (b + b2 * lse) * p
    lse,  # (C,) fp32 out, with loss_slopes
    row_factors,  # (C,) fp32 out, or None: factor of the row
    best,  # (blocks, rows) int32, or None
    argmax,  # (N,) int64 out, where there is best
    rows,  # (N,) int32: position of each row, with argmax
    first,
    H,
    V,
    width,  # V rounded up to a multiple of 16: stride of exps
    stride_hn,
    stride_row,  # of maxima, sums and best
    stride_slopes,
    scale,  # None for 1
    softcap,  # or None
    STORE_PROBS: tl.constexpr,  # exps become probabilities, and row_factors are powers of two
    BLOCKS: tl.constexpr,  # at least V / BLOCK_V
    BLOCK_V: tl.constexpr,  # entries that share a maximum
    BLOCK_H: tl.constexpr,
):
    """A row's loss and factor from its blocks' sums; the row itself is rewritten only if necessary.

    A program takes one row. A row of padding gets zeros.
    """
    c = tl.program_id(0).to(tl.int64)
    exps += c * width
    offs_v = tl.arange(0, BLOCK_V)
    offs_h = tl.arange(0, BLOCK_H)
    if first + c >= tl.load(count):
        for start in range(0, width, BLOCK_V):
            none = tl.zeros((BLOCK_V,), dtype=exps.dtype.element_ty)
            tl.store(exps + start + offs_v, none, mask=start + offs_v < width)
        if scaled is not None:
            for start in range(0, H, BLOCK_H):
                none = tl.zeros((BLOCK_H,), dtype=scaled.dtype.element_ty)
                tl.store(scaled + c * H + start + offs_h, none, mask=start + offs_h < H)
        tl.store(losses + c, 0.0)
        tl.store(label_grads + c, 0.0)
        if row_factors is not None:
            tl.store(row_factors + c, 0.0)
        if loss_slopes is not None:
            tl.store(lse + c, 0.0)
        return

    # Phase 1: the sum of the row's exponentials, from its blocks, and the factor that turns what is
    # stored into probabilities.
    label = tl.load(labels + c)
    known = (label >= 0) & (label < V)  # a bad label makes its whole row NaN
    label = tl.where(known, label, -1).to(tl.int32)
    z = tl.load(z_label + c)
    own = None
    if not STORE_PROBS:
        own = z
    offs_b = tl.arange(0, BLOCKS)
    mask_b = offs_b < tl.cdiv(V, BLOCK_V)
    m = tl.load(maxima + offs_b * stride_row + c, mask=mask_b, other=float("-inf"))
    s = tl.load(sums + offs_b * stride_row + c, mask=mask_b, other=0.0)
    empty = m == float("-inf")  # no block, or one that holds nothing but the label
    references = tl.where(empty, float("-inf"), block_reference(m, own))
    m_others = tl.max(m, axis=0)  # -inf where the label is alone
    top = finite_max(tl.maximum(m_others, z) * LOG2E)
    others = tl.sum(s * tl.exp2(references - top), axis=0)
    reference = tl.max(references, axis=0)  # of the row
    reference = tl.where(reference == float("-inf"), top, reference)
    inverse = 1.0 / (exp(z, top) + others)
    to_p = tl.exp2(reference - top) * inverse
    # p - 1 = -(sum of the others), which does not cancel.
    g_label = -others * inverse * logits_slope(z, scale, softcap)
    factor = to_p

    # Phase 2: options of the loss change the factor and the label's entry.
    if loss_slopes is not None:
        log_sum = tl.log((exp(z, top) + others).to(tl.float64)) + top.to(tl.float64) / LOG2E
        a = tl.load(loss_slopes + c)
        by_lse = tl.load(loss_slopes + 2 * stride_slopes + c) * log_sum.to(tl.float32)
        b = tl.load(loss_slopes + stride_slopes + c) + by_lse
        of_p = a + b
        g_label = a * g_label + b * (exp(z, top) * inverse * logits_slope(z, scale, softcap))
        if STORE_PROBS:
            # The row's factor takes the size of the weights, so that no number stored is larger
            # than `scale`.
            size = tl.abs(a) + tl.abs(b)
            # A power of two: the products' other operand takes it in without being rounded again.
            # By its bits: log2 is approximate, and its floor would be one off near a power of two.
            exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
            size = tl.where(exponent == 0, 1.0, exponent.to(tl.float32, bitcast=True))
            to_p *= of_p / size
            factor = size
        else:
            factor *= of_p
        tl.store(lse + c, log_sum.to(tl.float32))

    # Phase 3: the row's results. The label's entry, far larger than the others, is not rounded with
    # them to two bytes, but added in float32.
    if row_factors is not None:
        tl.store(row_factors + c, factor)
    tl.store(losses + c, token_loss(top, others, z).to(tl.float32))
    if best is not None:
        index = tl.load(best + place_of_largest(m, 0) * stride_row + c)
        index = tl.where(z > m_others, label, index)
        tl.store(argmax + tl.load(rows + first + c), index.to(tl.int64))
    tl.store(label_grads + c, g_label)

    # Phase 4: the row is read and rewritten where its blocks differ in their references, or where
    # it has to be normalised.
    end = width
    if not STORE_PROBS:
        lowest = tl.min(tl.where(empty, reference, references), axis=0)
        end = tl.where(lowest < reference, width, 0)
    for start in range(0, end, BLOCK_V):
        offs = start + offs_v
        of_block = tl.load(maxima + start // BLOCK_V * stride_row + c)
        g = tl.load(exps + offs, mask=offs < width, other=0.0).to(tl.float32)
        of_block = tl.where(of_block == float("-inf"), reference, block_reference(of_block, own))
        g *= tl.exp2(of_block - reference)
        if STORE_PROBS:
            g *= to_p
        tl.store(exps + offs, g.to(exps.dtype.element_ty), mask=offs < width)

    # Phase 5: the hidden state times the factor, for the product of the head's gradient.
    if scaled is not None:
        for start in range(0, H, BLOCK_H):
            offs = start + offs_h
            h = tl.load(hidden + c * stride_hn + offs, mask=offs < H, other=0.0).to(tl.float32)
            tl.store(scaled + c * H + offs, (h * factor).to(scaled.dtype.element_ty), mask=offs < H)


@triton.jit(
    do_not_specialize=[
        "labels", "lse", "top", "temperature", "alpha", "beta", "gamma", "at_label", "classes",
        "at_classes", "K", "label_grads", "first", "begin", "T",
    ]
)  # fmt: skip
def token_grad_kernel(
    products,  # (C, T) fp32: hidden @ weight[begin : begin + T].T
    grads,  # (C, T) out: GRAD_SCALE times the derivative by the products
    bias,  # (V,) from `begin`, or None
    class_weight,  # (V,) fp32 from `begin`, or None
    labels,  # (C,) int
    lse,  # (C,) fp32
    top,  # (C,) fp32, or None: the largest logit as the forward pass has it
    temperature,  # (C,) fp32, or None: divisor of the logits in p alone
    alpha,  # (C,) fp32, as all below: g = p * (alpha - beta * log p) + gamma * class_weight
    beta,  # or None
    gamma,  # or None
    at_label,  # (C,) fp32: g at the label
    classes,  # (C, K) int, or None: further classes, other numbers for none
    at_classes,  # (C, K) fp32: added to their derivatives, where they are not the label
    K,
    label_grads,  # (C,) fp32 out: the label's, without GRAD_SCALE
    count,  # () int32: rows from here on (counted from the first block's) are padding
    first,
    begin,
    T,
    width,  # T rounded up to a multiple of 16
    stride_pc,
    stride_gc,
    scale,  # None for 1
    softcap,  # or None
    GRAD_SCALE: tl.constexpr,
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
    if top is not None:  # near p = 1, log p is as small as the rounding of this second product
        log_p = tl.where(log_p > LIKELY, tl.load(top + c) - tl.load(lse + c), log_p)
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
    g *= slope * GRAD_SCALE
    if classes is not None:  # before g is rounded, since the two may nearly cancel
        for k in range(c * K, c * K + K):
            at = label_of_tile(classes, k, begin, start, T, BLOCK_V)
            if at >= 0:
                g += tl.where(offs_t == at, tl.load(at_classes + k) * GRAD_SCALE, 0.0)

    at = label_of_tile(labels, c, begin, start, T, BLOCK_V)
    if at >= 0:
        own = tl.sum(tl.where(offs_t == at, slope, 0.0), axis=0)
        tl.store(label_grads + c, tl.load(at_label + c) * own)
    g = tl.where(offs_t == at, 0.0, g)
    tl.store(out, g.to(grads.dtype.element_ty), mask=mask_t)
