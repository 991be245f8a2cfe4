"""Kernels of a small batch (at most 1,024 rows): no compaction, no sort, nothing that the host waits for."""

import triton
import triton.language as tl

from .tile import LOG2E, exp, finite_max, token_loss


@triton.jit(do_not_specialize=["labels", "upstream", "N"])
def small_rows_kernel(
    logits,  # (N, V) fp32, rows of `width`
    grads,  # (N, V) out, rows of `width`: outer * p, 0 at the label and in rows left out
    labels,  # (N,) int
    upstream,  # () fp32, or None: 1 / valid rows
    losses,  # (N,) fp32 out
    label_grads,  # (N,) fp32 out: outer * (p - 1)
    n_valid,  # () int64 out; negative code of a bad label
    factor,  # () fp32 out: outer
    N,
    V,
    width,
    ignore_index,
    BLOCK_N: tl.constexpr,  # at least N
    BLOCK_V: tl.constexpr,
):
    """A row's loss, its part of the logits' gradient, and the label's entry apart."""
    c = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    y = tl.load(labels + offs_n, mask=mask_n, other=0).to(tl.int64)
    valid = mask_n & (y != ignore_index)
    count = tl.sum(valid.to(tl.int32), axis=0)
    outer = 1.0 / tl.maximum(count, 1).to(tl.float32)
    if upstream is not None:
        outer = tl.load(upstream)
    if c == 0:
        none_bad = tl.full((), 0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
        clamped = tl.minimum(tl.maximum(y, -0x80000000), 0x7FFFFFFF)
        code = (offs_n.to(tl.int64) << 32) | (clamped + 0x80000000)
        bad = valid & ((y < 0) | (y >= V))
        first_bad = tl.min(tl.where(bad, code, none_bad), axis=0)
        tl.store(n_valid, tl.where(first_bad == none_bad, count.to(tl.int64), -1 - first_bad))
        tl.store(factor, outer)
    label = tl.load(labels + c).to(tl.int64)
    logits += c * width
    grads += c * width
    offs_v = tl.arange(0, BLOCK_V)
    if label == ignore_index:
        for start in range(0, width, BLOCK_V):
            none = tl.zeros((BLOCK_V,), dtype=grads.dtype.element_ty)
            tl.store(grads + start + offs_v, none, mask=start + offs_v < width)
        tl.store(losses + c, 0.0)
        tl.store(label_grads + c, 0.0)
        return
    known = (label >= 0) & (label < V)
    at = tl.where(known, label, 0)
    z_label = tl.where(known, tl.load(logits + at), float("nan"))
    tops = tl.full((BLOCK_V,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, V, BLOCK_V):  # one maximum a lane: no reduction in the loop
        offs = start + offs_v
        z = tl.load(logits + offs, mask=(offs < V) & (offs != label), other=float("-inf")) * LOG2E
        new = tl.maximum(tops, z)
        safe = tl.where(new == float("-inf"), 0.0, new)
        sums = sums * tl.exp2(tops - safe) + tl.exp2(z - safe)
        tops = new
    m = tl.max(tops, axis=0)
    top = finite_max(tl.maximum(m, z_label * LOG2E))
    others = tl.sum(sums * tl.exp2(tops - top), axis=0)
    inverse = 1.0 / (exp(z_label, top) + others)
    tl.store(losses + c, token_loss(top, others, z_label).to(tl.float32))
    tl.store(label_grads + c, -others * inverse * outer)
    scale = inverse * outer
    for start in range(0, width, BLOCK_V):
        offs = start + offs_v
        z = tl.load(logits + offs, mask=(offs < V) & (offs != label), other=float("-inf"))
        g = exp(z, top) * scale
        tl.store(grads + offs, g.to(grads.dtype.element_ty), mask=offs < width)


@triton.jit(do_not_specialize=["labels", "N", "hidden"])
def small_finish_kernel(
    d_hidden,  # (N, H) fp32 in place: grads @ weight; or None
    d_weight,  # (V, H) in place: grads.T @ hidden; or None
    hidden,  # (N, H)
    weight,  # (V, H)
    labels,  # (N,)
    label_grads,  # (N,) fp32
    losses,  # (N,) fp32
    loss_sum,  # () fp32 out
    N,
    H,
    V,
    stride_hn,
    stride_wv,
    BLOCK_N: tl.constexpr,  # at least N
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The labels' entries of both gradients, and the sum of the losses."""
    c = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    if (c == 0) & (tl.program_id(1) == 0):
        loss = tl.load(losses + offs_n, mask=mask_n, other=0.0).to(tl.float64)
        tl.store(loss_sum, tl.sum(loss, axis=0).to(tl.float32))
    label = tl.load(labels + c).to(tl.int64)
    entry = tl.load(label_grads + c)
    known = (label >= 0) & (label < V)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    if d_hidden is not None:
        to_hidden = d_hidden + c.to(tl.int64) * H + offs_h
        g = tl.load(to_hidden, mask=mask_h, other=0.0)
        w = tl.load(weight + tl.where(known, label, 0) * stride_wv + offs_h, mask=mask_h & known, other=0.0)
        # an ignored row has an entry of 0; a bad label's is NaN
        tl.store(to_hidden, g + entry * w.to(tl.float32), mask=mask_h)
    if d_weight is not None:
        if known:
            y = tl.load(labels + offs_n, mask=mask_n, other=-1).to(tl.int64)
            same = mask_n & (y == label)
            first = tl.min(tl.where(same, offs_n, BLOCK_N), axis=0)
            last = tl.max(tl.where(same, offs_n, -1), axis=0)
            if first == c:  # the others leave: one program writes a row, in a fixed order
                total = tl.zeros((BLOCK_H,), dtype=tl.float32)
                for start in range(c // BLOCK_C * BLOCK_C, last + 1, BLOCK_C):
                    rows = start + tl.arange(0, BLOCK_C)
                    mine = rows < N
                    mine &= tl.load(labels + rows, mask=mine, other=-1).to(tl.int64) == label
                    e = tl.load(label_grads + rows, mask=mine, other=0.0)
                    h = tl.load(
                        hidden + rows.to(tl.int64)[:, None] * stride_hn + offs_h[None, :],
                        mask=mine[:, None] & mask_h[None, :], other=0.0,
                    )
                    total += tl.sum(e[:, None] * h.to(tl.float32), axis=0)
                to_weight = d_weight + label * H + offs_h
                total += tl.load(to_weight, mask=mask_h, other=0.0).to(tl.float32)
                tl.store(to_weight, total.to(d_weight.dtype.element_ty), mask=mask_h)
