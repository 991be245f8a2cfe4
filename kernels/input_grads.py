"""Kernels that add the labels' entries to the gradients of hidden states and head.

A chunk holds the gradient of its logits in the inputs' dtype, often of two bytes. The label's entry
of a row is far larger than the others; rounded to two bytes, it would make most of the error of
``grads.T @ hidden``: ``p - 1`` may lie midway between two bf16 numbers. So
:mod:`fusedce.kernels.softmax_grad` keeps this entry in float32, outside of the matrix and without
the row's factor.
`label_grad_kernel` adds the entries to the gradient of the head, `hidden_grad_kernel` to that of
the hidden states, and `scale_kernel` multiplies finished gradients by the factor that arrives in
backward.

Entries of one class are added to one row of the head's gradient. They are sorted by class first (a
stable sort: entries of one class stay in the order of the chunk). The program at the first entry of
a class adds all entries of that class, the others exit. So no two programs write to one address,
and sums have a fixed order: the same bits from run to run. Bytes moved for C entries: 2 C H to read
hidden states, and at most 8 C H to add to rows of float32 (4 C H to rows of two bytes), beside the
6 C H V FLOPs of the chunk's products. `BLOCK_C` entries of a class are read at a time.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["hidden", "columns", "order", "label_grads", "rows", "C", "stride_hn"]
)
def label_grad_kernel(
    hidden,  # (N, H)
    columns,  # (C,) int, sorted
    order,  # (C,) int64: the entry of each
    label_grads,  # (C,) fp32: the entries
    rows,  # (N,) int32: the row of each entry, or None: entries are of all rows, in their order
    d_weight,  # (V, H) to add to, or None
    d_bias,  # (V,) fp32 to add to, or None
    C,
    H,
    V,
    stride_hn,
    factor,  # of all entries
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add ``factor * entry * hidden`` to each entry's row of ``d_weight``, entries to ``d_bias``.

    Program ``(i, j)`` adds block ``j`` of H for the run of equal columns that begins at ``i``.
    """
    start = tl.program_id(0)
    column = tl.load(columns + start)
    goes_on = (start > 0) & (tl.load(columns + tl.maximum(start - 1, 0)) == column)
    # A bad label has no row; the product has made all rows NaN.
    if goes_on | (column < 0) | (column >= V):
        return
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    of_weight = tl.zeros((BLOCK_H,), dtype=tl.float32)
    of_bias = tl.zeros((), dtype=tl.float32)
    more = start < C
    while more:
        offs_c = start + tl.arange(0, BLOCK_C)
        mask_c = offs_c < C
        mask_c &= tl.load(columns + offs_c, mask=mask_c, other=0) == column
        at = tl.load(order + offs_c, mask=mask_c, other=0)
        entry = tl.load(label_grads + at, mask=mask_c, other=0.0)
        if d_weight is not None:
            if rows is not None:
                at = tl.load(rows + at, mask=mask_c, other=0).to(tl.int64)
            at = hidden + at[:, None] * stride_hn + offs_h[None, :]
            h = tl.load(at, mask=mask_c[:, None] & mask_h[None, :], other=0.0).to(tl.float32)
            of_weight += tl.sum(entry[:, None] * h, axis=0)
        of_bias += tl.sum(entry, axis=0)
        start += BLOCK_C
        more = (start < C) & (tl.load(columns + tl.minimum(start, C - 1)) == column)
    if d_weight is not None:
        at = d_weight + column.to(tl.int64) * H + offs_h
        total = tl.load(at, mask=mask_h, other=0.0).to(tl.float32) + of_weight * factor
        tl.store(at, total.to(d_weight.dtype.element_ty), mask=mask_h)
    if d_bias is not None:
        more_of_bias = tl.load(d_bias + column) + of_bias * factor
        tl.store(d_bias + column, more_of_bias, mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["columns", "label_grads", "row_factors", "rows", "begin", "first"])
def hidden_grad_kernel(
    products,  # (rows, H) fp32: GRAD_SCALE * g @ weight, g the logits' gradient from row `begin` on
    weight,  # (V, H)
    columns,  # (C,) int: classes of the entries that were left out of g
    label_grads,  # (C,) fp32: their values
    row_factors,  # (C,) fp32 or None: factors of the rows of products
    rows,  # (N,) int32: position of each row
    d_hidden,  # (N, H) out
    begin,
    first,  # number of the chunk's first row
    H,
    V,
    stride_wv,
    stride_dn,
    factor,  # of all rows
    GRAD_SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Finish rows of products and store them at their positions in ``d_hidden``."""
    c = begin + tl.program_id(0)
    products += tl.program_id(0).to(tl.int64) * H
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    g = tl.load(products + offs_h, mask=mask_h, other=0.0) * (1.0 / GRAD_SCALE)
    if row_factors is not None:
        g *= tl.load(row_factors + c)
    column = tl.load(columns + c).to(tl.uint32)  # one comparison for both ends
    known = column < V  # the entry of a bad label is NaN
    at = weight + tl.where(known, column, 0).to(tl.int64) * stride_wv + offs_h
    w = tl.where(known, tl.load(at, mask=mask_h, other=0.0).to(tl.float32), 0.0)
    g += tl.load(label_grads + c) * w
    row = tl.load(rows + first + c).to(tl.int64)
    out = d_hidden + row * stride_dn + offs_h
    tl.store(out, (g * factor).to(d_hidden.dtype.element_ty), mask=mask_h)


@triton.jit
def _scale(x, out, n, factor, again, BLOCK: tl.constexpr):
    """``out = x * factor * again``, both ``(n,)``, in blocks that the programs take in turn."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, tl.cast(n, tl.int64), tl.num_programs(0).to(tl.int64) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < n
        value = tl.load(x + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + offs, (value * factor * again).to(out.dtype.element_ty), mask=mask)


@triton.jit
def scale_kernel(
    x0,  # (n0,) any floating dtype, or None; so the two below
    x1,
    x2,
    out0,  # (n0,) of the result's dtype, or None: in place, if the factor is not 1
    out1,
    out2,
    n0,
    n1,
    n2,
    g,  # () fp32
    BLOCK: tl.constexpr,
):
    """Up to three gradients times ``g``, where 0 stays 0.

    A program takes one block after another, so that few programs have to read the factor.
    """
    factor = tl.load(g).to(tl.float32)
    changes = factor != 1.0
    # 0 times inf or NaN would be NaN. Two finite numbers make other values inf, or nearly so.
    finite = factor - factor == 0
    factor, again = tl.where(finite, factor, 3e38), tl.where(finite, 1.0, 3e38)
    if x0 is not None:
        if out0 is not None:
            _scale(x0, out0, n0, factor, again, BLOCK)
        elif changes:
            _scale(x0, x0, n0, factor, again, BLOCK)
    if x1 is not None:
        if out1 is not None:
            _scale(x1, out1, n1, factor, again, BLOCK)
        elif changes:
            _scale(x1, x1, n1, factor, again, BLOCK)
    if x2 is not None:
        if out2 is not None:
            _scale(x2, out2, n2, factor, again, BLOCK)
        elif changes:
            _scale(x2, x2, n2, factor, again, BLOCK)
