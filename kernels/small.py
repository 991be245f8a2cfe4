"""Kernels of a small batch: no compaction, no sort, nothing that the host waits for.

The float32 logits of all tokens exist, made by one product. `small_rows_kernel` takes a row each:
its loss, and the gradient of its logits, written over them. Two products follow, and
`small_finish_kernel` adds the rest of the labels' entries to both. The matrix is rounded to the
inputs' dtype; what that leaves of the label's entry, far larger than the others, is added in
float32. The rounded entry is in the product, since the head's gradient is rounded after it: a row
of many labels nearly cancels there. Unlike in training of many tokens
(:mod:`fusedce.kernels.softmax_grad`) exponentials are normalised before they are rounded, so the
options of the loss are numbers in one formula.

Rows are few, so that every program can read all labels: it counts them itself, and the program of
the first row with a label adds up the hidden states of all its rows, in a fixed order.
"""

import triton
import triton.language as tl

from .tile import LOG2E, exp, finish_logits, finite_max, logits_slope, token_loss


@triton.jit
def label_and_weight(labels, token_weight, c, V, ignore_index):
    """Row ``c``'s label, its weight, and whether it is left out, as one of weight 0 is."""
    label = tl.load(labels + c).to(tl.int64)
    weight = 1.0
    left_out = label == ignore_index
    if token_weight is not None:
        weight = tl.load(token_weight + c)
        left_out = left_out | ((label >= 0) & (label < V) & (weight == 0.0))
    return label, weight, left_out


@triton.jit(do_not_specialize=["labels", "upstream", "token_weight", "hidden", "N"])
def small_rows_kernel(
    hidden,  # (N, H)
    weight,  # (V, H)
    used,  # (N, H) out, or None: hidden, and 0 in rows left out, which may hold anything
    logits,  # (N, V) fp32 raw products, rows of `width`
    grads,  # (N, V) out, in the same memory: derivative by the products; float32: 0 at the label
    labels,  # (N,) int
    token_weight,  # (N,) fp32, or None
    upstream,  # () fp32: a factor of the gradients; None: 1 / valid rows
    losses,  # (N,) fp32 out, as the next: 0 in rows left out
    label_grads,  # (N,) fp32 out: the label's derivative, less what grads holds of it
    n_valid,  # () int64 out: valid rows; negative code of a bad label
    factor,  # () fp32 out: the factor of the gradients
    N,
    H,
    V,
    width,  # V rounded up to a multiple of 16
    stride_hn,
    stride_wv,
    stride_gn,
    ignore_index,
    scale,  # None for 1
    softcap,  # or None
    smoothing,  # or None
    z_loss,  # or None
    BLOCK_N: tl.constexpr,  # at least N
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,  # at least H
):
    """A row's loss, its part of the gradient, and the label's entry apart."""
    # Phase 1: the count, which every program needs, and the first bad label.
    c = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    y = tl.load(labels + offs_n, mask=mask_n, other=0).to(tl.int64)
    valid = mask_n & (y != ignore_index)
    count = tl.sum(valid.to(tl.int32), axis=0)
    # Rounded as torch rounds it: backward then finds the factor it expects, and scales nothing.
    outer = tl.div_rn(1.0, tl.maximum(count, 1).to(tl.float32))
    if upstream is not None:
        outer = tl.load(upstream)
    if c == 0:
        # As in `compact_kernel`: the first bad label, as position * 2^32 + (value + 2^31).
        none_bad = tl.full((), 0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
        clamped = tl.minimum(tl.maximum(y, -0x80000000), 0x7FFFFFFF)
        code = (offs_n.to(tl.int64) << 32) | (clamped + 0x80000000)
        bad = valid & ((y < 0) | (y >= V))
        first_bad = tl.min(tl.where(bad, code, none_bad), axis=0)
        tl.store(n_valid, tl.where(first_bad == none_bad, count.to(tl.int64), -1 - first_bad))
        tl.store(factor, outer)

    label, of_loss, left_out = label_and_weight(labels, token_weight, c, V, ignore_index)
    offs_h = tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    h = tl.load(hidden + c * stride_hn + offs_h, mask=offs_h < tl.where(left_out, 0, H), other=0.0)
    if used is not None:
        tl.store(used + c * H + offs_h, h, mask=mask_h)
    logits += c * width
    grads += c * stride_gn
    offs_v = tl.arange(0, BLOCK_V)
    if left_out:
        for start in range(0, width, BLOCK_V):
            none = tl.zeros((BLOCK_V,), dtype=grads.dtype.element_ty)
            tl.store(grads + start + offs_v, none, mask=start + offs_v < width)
        tl.store(losses + c, 0.0)
        tl.store(label_grads + c, 0.0)
        return

    # Phase 2: sums of the exponentials of the other classes, a maximum a lane, so that no step of
    # the loop reduces over the block.
    # The label's logit is a sum over pairs: its error is one of all the row's probabilities.
    known = (label >= 0) & (label < V)
    at = weight + tl.where(known, label, 0) * stride_wv + offs_h
    w = tl.load(at, mask=offs_h < tl.where(known, H, 0), other=0.0)
    # Exact products: of rounded ones each of two lanes would fuse its own with the sum.
    exact: tl.constexpr = tl.float64 if w.dtype == tl.float32 else tl.float32
    z_label = tl.sum(h.to(exact) * w.to(exact), axis=0).to(tl.float32)
    z_label = tl.where(known, finish_logits(z_label, None, scale, softcap), float("nan"))
    tops = tl.full((BLOCK_V,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
    zsums = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, V, BLOCK_V):
        offs = start + offs_v
        z = tl.load(logits + offs, mask=offs < V, other=0.0)
        z = finish_logits(z, None, scale, softcap)
        if smoothing is not None:
            zsums += tl.where(offs < V, z, 0.0)
        z = tl.where((offs < V) & (offs != label), z, float("-inf"))
        new = tl.maximum(tops, z * LOG2E)
        safe = finite_max(new)
        sums = sums * tl.exp2(tops - safe) + exp(z, safe)
        tops = new
    top = finite_max(tl.maximum(tl.max(tops, axis=0), z_label * LOG2E))
    others = tl.sum(sums * tl.exp2(tops - top), axis=0)
    own = exp(z_label, top)
    inverse = 1.0 / (own + others)

    # Phase 3: the loss, and its slopes: the gradient is (a + b) * p - share, less a at the label.
    loss = token_loss(top, others, z_label)
    a = of_loss
    b = 0.0
    share = 0.0
    if (smoothing is not None) | (z_loss is not None):
        lse = tl.log((own + others).to(tl.float64)) + top.to(tl.float64) / LOG2E
        if smoothing is not None:
            zmean = tl.sum(zsums.to(tl.float64), axis=0) / V
            loss = (1.0 - smoothing) * loss + smoothing * (lse - zmean)
            a = of_loss * (1.0 - smoothing)
            b = of_loss * smoothing
            share = of_loss * smoothing / V
        if z_loss is not None:
            loss += z_loss * lse * lse
            b += of_loss * 2.0 * z_loss * lse.to(tl.float32)
    tl.store(losses + c, (loss * of_loss).to(tl.float32))
    # p - 1 = -(sum of the others), which does not cancel.
    of_label = b * (own * inverse) - a * (others * inverse) - share
    of_label *= logits_slope(z_label, scale, softcap) * outer
    in_grads = 0.0  # (products of float32 may be TF32's)
    if grads.dtype.element_ty != tl.float32:
        in_grads = of_label.to(grads.dtype.element_ty).to(tl.float32)
    tl.store(label_grads + c, of_label - in_grads)

    # Phase 4: the gradient, over the logits. A store must not overtake another thread's load.
    of_p = (a + b) * inverse
    for start in range(0, width, BLOCK_V):
        offs = start + offs_v
        z = tl.load(logits + offs, mask=offs < V, other=0.0)
        tl.debug_barrier()
        z = finish_logits(z, None, scale, softcap)
        g = (exp(z, top) * of_p - share) * logits_slope(z, scale, softcap) * outer
        g = tl.where(offs == label, in_grads, g)
        g = tl.where(offs < V, g, 0.0)
        tl.store(grads + offs, g.to(grads.dtype.element_ty), mask=offs < width)


@triton.jit(do_not_specialize=["labels", "token_weight", "N"])
def small_finish_kernel(
    d_hidden,  # (N, H) fp32 in place: grads @ weight; or None
    d_weight,  # (V, H) in place: grads.T @ used; or None
    used,  # (N, H): hidden, and 0 in rows left out
    weight,  # (V, H)
    labels,  # (N,) int
    token_weight,  # (N,) fp32, or None
    label_grads,  # (N,) fp32
    losses,  # (N,) fp32
    loss_sum,  # () fp32 out
    N,
    H,
    V,
    ignore_index,
    stride_wv,
    BLOCK_N: tl.constexpr,  # at least N
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The labels' entries of both gradients, and the sum of the losses. Deterministic."""
    c = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    if (c == 0) & (tl.program_id(1) == 0):
        loss = tl.load(losses + offs_n, mask=mask_n, other=0.0).to(tl.float64)
        tl.store(loss_sum, tl.sum(loss, axis=0).to(tl.float32))
    label, _, left_out = label_and_weight(labels, token_weight, c, V, ignore_index)
    entry = tl.load(label_grads + c)
    known = (label >= 0) & (label < V)
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < H
    if d_hidden is not None:
        to_hidden = d_hidden + c.to(tl.int64) * H + offs_h
        g = tl.load(to_hidden, mask=mask_h, other=0.0)
        at = weight + tl.where(known, label, 0) * stride_wv + offs_h
        w = tl.load(at, mask=offs_h < tl.where(known, H, 0), other=0.0).to(tl.float32)
        # The entry of a bad label is NaN; a row left out is 0 whatever the weight holds.
        tl.store(to_hidden, tl.where(left_out, 0.0, g + entry * w), mask=mask_h)
    if d_weight is not None:
        y = tl.load(labels + offs_n, mask=mask_n, other=-1).to(tl.int64)
        same = mask_n & (y == label)
        first = tl.min(tl.where(same, offs_n, BLOCK_N), axis=0)
        if known & (first == c):  # the other rows of this label leave it to this program
            last = tl.max(tl.where(same, offs_n, -1), axis=0)
            total = tl.zeros((BLOCK_H,), dtype=tl.float32)
            # (From a whole block on: a row's lane in its sum is its number % BLOCK_C.)
            for start in range(c // BLOCK_C * BLOCK_C, last + 1, BLOCK_C):
                rows = start + tl.arange(0, BLOCK_C)
                mine = rows < N
                mine &= tl.load(labels + rows, mask=mine, other=-1).to(tl.int64) == label
                e = tl.load(label_grads + rows, mask=mine, other=0.0)
                of_rows = used + rows.to(tl.int64)[:, None] * H + offs_h[None, :]
                h = tl.load(of_rows, mask=mine[:, None] & mask_h[None, :], other=0.0)
                total += tl.sum(e[:, None] * h.to(tl.float32), axis=0)
            to_weight = d_weight + label * H + offs_h
            total += tl.load(to_weight, mask=mask_h, other=0.0).to(tl.float32)
            tl.store(to_weight, total.to(d_weight.dtype.element_ty), mask=mask_h)
