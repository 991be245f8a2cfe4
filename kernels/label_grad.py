"""What rounding took from the labels' entries of a chunk, given back to the gradient of the head.

A chunk holds the gradient of its logits in two bytes. The label's entry of a row is alone in its
size, so its rounding is most of the error of ``grads.T @ hidden``: ``p - 1`` may lie in the middle
between two numbers. Of each row :mod:`fusedce.kernels.softmax_grad` keeps what was lost, and this
kernel adds ``lost * hidden`` to the row of the label.

Rows of one label meet in one row of the gradient. They are sorted by label beforehand (a stable
sort: in a run of one label they are in the order of the chunk), the program of the first of a run
walks through it and the others leave. So no two programs write to one place, and sums are added in
one order: the same bits from run to run.

Bytes moved for a chunk of C tokens: 2 C H to read the hidden states, and 8 C H at most (4 in a
buffer of two bytes) to add to rows of float32, beside the 6 C H V FLOPs of its products. A run is
walked through `BLOCK_C` rows at a time.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "hidden", "labels", "order", "residuals", "row_factors", "C", "stride_hn"
    ]
)  # fmt: skip
def label_grad_kernel(
    hidden,  # (C, H)
    labels,  # (C,) int, sorted
    order,  # (C,) int64: the rows of `hidden` that they belong to
    residuals,  # (C,) fp32, in the order of `hidden`
    row_factors,  # (C,) fp32 or None: multiply them
    d_weight,  # (V, H) to add to, or None
    d_bias,  # (V,) fp32 to add to, or None
    C,
    H,
    V,
    stride_hn,
    factor,  # of all rows
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    start = tl.program_id(0)
    label = tl.load(labels + start)
    goes_on = (start > 0) & (tl.load(labels + tl.maximum(start - 1, 0)) == label)
    # (A bad label has no row, and has poisoned all of them through the product.)
    if goes_on | (label < 0) | (label >= V):
        return
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    of_weight = tl.zeros((BLOCK_H,), dtype=tl.float32)
    of_bias = tl.zeros((), dtype=tl.float32)
    more = start < C
    while more:
        offs_c = start + tl.arange(0, BLOCK_C)
        mask_c = offs_c < C
        mask_c &= tl.load(labels + offs_c, mask=mask_c, other=0) == label
        rows = tl.load(order + offs_c, mask=mask_c, other=0)
        lost = tl.load(residuals + rows, mask=mask_c, other=0.0)
        if row_factors is not None:
            lost *= tl.load(row_factors + rows, mask=mask_c, other=0.0)
        if d_weight is not None:
            at = hidden + rows[:, None] * stride_hn + offs_h[None, :]
            h = tl.load(at, mask=mask_c[:, None] & mask_h[None, :], other=0.0).to(tl.float32)
            of_weight += tl.sum(lost[:, None] * h, axis=0)
        of_bias += tl.sum(lost, axis=0)
        start += BLOCK_C
        more = (start < C) & (tl.load(labels + tl.minimum(start, C - 1)) == label)
    if d_weight is not None:
        at = d_weight + label.to(tl.int64) * H + offs_h
        total = tl.load(at, mask=mask_h, other=0.0).to(tl.float32) + of_weight * factor
        tl.store(at, total.to(d_weight.dtype.element_ty), mask=mask_h)
    if d_bias is not None:
        more_of_bias = tl.load(d_bias + label) + of_bias * factor
        tl.store(d_bias + label, more_of_bias, mask=tl.program_id(1) == 0)
