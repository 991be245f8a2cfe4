"""Single entries of the gradient of a chunk's logits, brought to the gradient of the head.

A chunk holds that gradient in two bytes. The label's entry of a row is alone in its size, and so is
the likeliest other class's of a row that is sure and wrong; rounded with the others they would be
most of the error of ``grads.T @ hidden``: ``p - 1`` may lie in the middle between two numbers. Of
each row :mod:`fusedce.kernels.softmax_grad` keeps them apart in float32, and this kernel adds
``entry * hidden`` to the rows of their classes.

Entries of one class meet in one row of the gradient. They are sorted by class beforehand (a stable
sort: in a run of one class they are in the order of the chunk), the program of the first of a run
walks through it and the others leave. So no two programs write to one place, and sums are added in
one order: the same bits from run to run.

Bytes moved for n entries: 2 n H to read the hidden states, and 8 n H at most (4 in a buffer of two
bytes) to add to rows of float32, beside the 6 C H V FLOPs of the chunk's products. A run is walked
through `BLOCK_C` entries at a time.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "hidden", "columns", "order", "entries", "n", "C", "stride_hn", "stride_row"
    ]
)  # fmt: skip
def label_grad_kernel(
    hidden,  # (C, H)
    columns,  # (n,) int, sorted
    order,  # (n,) int64: where each stood in (K, C)
    entries,  # (K, C) fp32
    d_weight,  # (V, H) to add to, or None
    d_bias,  # (V,) fp32 to add to, or None
    n,
    C,
    H,
    V,
    stride_hn,
    stride_row,  # of entries
    factor,  # of all of them
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    start = tl.program_id(0)
    column = tl.load(columns + start)
    goes_on = (start > 0) & (tl.load(columns + tl.maximum(start - 1, 0)) == column)
    # (A bad label has no row, and has poisoned all of them through the product.)
    if goes_on | (column < 0) | (column >= V):
        return
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    of_weight = tl.zeros((BLOCK_H,), dtype=tl.float32)
    of_bias = tl.zeros((), dtype=tl.float32)
    more = start < n
    while more:
        offs_c = start + tl.arange(0, BLOCK_C)
        mask_c = offs_c < n
        mask_c &= tl.load(columns + offs_c, mask=mask_c, other=0) == column
        places = tl.load(order + offs_c, mask=mask_c, other=0)
        rows = places % C
        entry = tl.load(entries + places // C * stride_row + rows, mask=mask_c, other=0.0)
        if d_weight is not None:
            at = hidden + rows[:, None] * stride_hn + offs_h[None, :]
            h = tl.load(at, mask=mask_c[:, None] & mask_h[None, :], other=0.0).to(tl.float32)
            of_weight += tl.sum(entry[:, None] * h, axis=0)
        of_bias += tl.sum(entry, axis=0)
        start += BLOCK_C
        more = (start < n) & (tl.load(columns + tl.minimum(start, n - 1)) == column)
    if d_weight is not None:
        at = d_weight + column.to(tl.int64) * H + offs_h
        total = tl.load(at, mask=mask_h, other=0.0).to(tl.float32) + of_weight * factor
        tl.store(at, total.to(d_weight.dtype.element_ty), mask=mask_h)
    if d_bias is not None:
        more_of_bias = tl.load(d_bias + column) + of_bias * factor
        tl.store(d_bias + column, more_of_bias, mask=tl.program_id(1) == 0)
