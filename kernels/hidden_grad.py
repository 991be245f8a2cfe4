"""Gradient of the hidden states: a product's rows, finished and brought to where they belong.

The gradient of the logits is not all in the matrix that was multiplied: a row's own factor is left
out, and so are its largest entries, which come in float32 (:mod:`fusedce.kernels.softmax_grad`).
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["columns", "entries", "row_factors", "rows", "begin", "first", "stride_row"]
)
def hidden_grad_kernel(
    products,  # (rows, H) fp32: gradient of the logits from row `begin` on @ weight, AMPLIFY times
    weight,  # (V, H)
    columns,  # (ENTRIES, C) int: entries of that gradient which are not in it
    entries,  # (ENTRIES, C) fp32: what they are
    row_factors,  # (C,) fp32 or None: of the products
    rows,  # (N,) int32: where each row belongs
    d_hidden,  # (N, H) out
    begin,
    first,  # number of the chunk's first row
    H,
    V,
    stride_wv,
    stride_dn,
    stride_row,  # of columns and entries
    factor,  # of all rows
    AMPLIFY: tl.constexpr,
    ENTRIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    c = begin + tl.program_id(0)
    products += tl.program_id(0).to(tl.int64) * H
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    g = tl.load(products + offs_h, mask=mask_h, other=0.0) * (1.0 / AMPLIFY)
    if row_factors is not None:
        g *= tl.load(row_factors + c)
    for entry in tl.static_range(ENTRIES):
        column = tl.load(columns + entry * stride_row + c).to(tl.uint32)  # negative ones are large
        known = column < V  # (of a bad label the entry is NaN)
        at = weight + tl.where(known, column, 0).to(tl.int64) * stride_wv + offs_h
        w = tl.where(known, tl.load(at, mask=mask_h, other=0.0).to(tl.float32), 0.0)
        g += tl.load(entries + entry * stride_row + c) * w
    row = tl.load(rows + first + c).to(tl.int64)
    out = d_hidden + row * stride_dn + offs_h
    tl.store(out, (g * factor).to(d_hidden.dtype.element_ty), mask=mask_h)
