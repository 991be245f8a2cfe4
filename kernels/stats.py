"""Kernels of every row's statistics in one pass: nll, log-sum-exp, entropy, argmax, mean logit.

They read tiles as :mod:`forward` does, and carry more along. Beside the running maximum ``m`` of
the logits but the label's there are, relative to it, ``others``: the sum of exponentials without
the maximum's own 1, and ``moment``: the sum of ``exp(z - m) * (m - z)``. Both are sums of what is
not negative, and entropy and loss are functions of them without cancellation where one class has
nearly all the probability: ``entropy = log1p(others) + moment / (1 + others)``.

Splits of the vocabulary are merged by a second kernel, in float64 and in their order: the bits of
a row do not depend on the batch around it.
"""

import triton
import triton.language as tl

from .tile import (
    LOG2E,
    finite_max,
    label_logits,
    logits_tile,
    others_of_tile,
    packed_rows,
    program_of_grid,
)


@triton.jit(do_not_specialize=["N"])
def stats_kernel(
    hidden,  # (N, H)
    weight,  # (V, H)
    weight_tiles,  # tensor descriptor of weight, or None
    bias,  # (V,) or None
    class_weight,  # (V,) fp32 or None: weights of the sum of the logits
    temperature,  # (N,) fp32 or None: divisor of the logits of a row
    labels,  # (N,) int
    rows,  # (N,) int32: valid rows, from compact_kernel
    count,  # () int32: how many
    maxima,  # (splits, N) fp32 out, as all down to zsums
    sums,  # of the others; without moments, of all
    moments,  # or None: no entropy
    zsums,  # or None
    best,  # (splits, N) int32 out, or None: index of the maximum
    z_labels,  # (N,) fp32 out
    N,
    H,
    V,
    stride_hn,
    stride_wv,
    scale,  # None for 1
    softcap,  # or None
    tiles_per_split,
    splits,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
    EVEN_H: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Statistics of each row over one split of the vocabulary, for `merge_stats_kernel`."""
    block, split = program_of_grid(tl.program_id(0), N, splits, BLOCK_N, GROUP_N)
    n_valid = tl.load(count)
    if block * BLOCK_N >= n_valid:
        return
    offs_n, mask_n, row, label = packed_rows(block, rows, labels, n_valid, V, BLOCK_N)
    hidden_rows = hidden + row * stride_hn

    t_row = None
    if temperature is not None:
        t_row = tl.load(temperature + row, mask=mask_n, other=1.0)
    m = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    others = tl.zeros((BLOCK_N,), dtype=tl.float32)
    moment = tl.zeros((BLOCK_N,), dtype=tl.float32)
    zsum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    index = tl.zeros((BLOCK_N,), dtype=tl.int32)
    begin = split * tiles_per_split * BLOCK_V
    end = tl.minimum(begin + tiles_per_split * BLOCK_V, V)
    for start_v in tl.range(begin, end, BLOCK_V):
        z = logits_tile(
            hidden_rows, weight, weight_tiles, bias, start_v, H, V, stride_wv, scale, softcap,
            BLOCK_N, BLOCK_V, BLOCK_H, EVEN_H, INPUT_PRECISION, UPCAST,
        )  # fmt: skip
        if t_row is not None:
            z /= t_row[:, None]
        if zsums is not None:
            offs_v = start_v + tl.arange(0, BLOCK_V)
            mask_v = offs_v < V
            if class_weight is not None:
                c = tl.load(class_weight + offs_v, mask=mask_v, other=0.0)[None, :]
                zsum += tl.sum(tl.where(c != 0.0, c * z, 0.0), axis=1)  # 0 * inf is 0 here
            else:
                zsum += tl.sum(tl.where(mask_v[None, :], z, 0.0), axis=1)
        z = others_of_tile(z, label, start_v, V, BLOCK_V)
        m_tile = tl.max(z, axis=1)
        if best is not None:
            index = tl.where(m_tile > m, start_v + tl.argmax(z, axis=1), index)
        m_new = tl.maximum(m, m_tile)
        m_safe = finite_max(m_new)
        a = tl.exp2((m - m_safe) * LOG2E)
        if moments is not None:
            empty = m_tile == float("-inf")
            d = tl.maximum(z - finite_max(m_tile)[:, None], -1e30)  # e = 0 there, and 0 * inf NaN
            e = tl.exp2(d * LOG2E)
            top = z == m_tile[:, None]  # each but one of equal maxima counts among the others
            ties = tl.where(empty, 0.0, tl.sum(top.to(tl.float32), axis=1) - 1.0)
            e = tl.where(top, 0.0, e)
            others_tile = tl.sum(e, axis=1) + ties
            moment_tile = -tl.sum(e * d, axis=1)
            t = tl.exp2((m_tile - m_safe) * LOG2E)
            drop = tl.where(a == 0.0, 0.0, m_safe - m)  # by how much the maximum rises
            moment = (moment + (1.0 + others) * drop) * a
            drop_tile = tl.where(t == 0.0, 0.0, m_safe - m_tile)
            moment += (moment_tile + (1.0 + others_tile) * drop_tile) * t
            others = others * a + others_tile * t + tl.minimum(a, t)
        else:
            others = others * a + tl.sum(tl.exp2((z - m_safe[:, None]) * LOG2E), axis=1)
        m = m_new

    at = split * tl.cast(N, tl.int64) + offs_n
    tl.store(maxima + at, m, mask=mask_n)
    tl.store(sums + at, others, mask=mask_n)
    if moments is not None:
        tl.store(moments + at, moment, mask=mask_n)
    if zsums is not None:
        tl.store(zsums + at, zsum, mask=mask_n)
    if best is not None:
        tl.store(best + at, index, mask=mask_n)
    if split == 0:
        z_label = label_logits(
            hidden_rows, weight, bias, label, H, stride_wv, scale, softcap, BLOCK_N, BLOCK_H
        )
        if t_row is not None:
            z_label /= t_row
        z_label = tl.where(z_label != float("inf"), z_label, float("nan"))
        tl.store(z_labels + offs_n, z_label, mask=mask_n)


@triton.jit(do_not_specialize=["N"])
def merge_stats_kernel(
    maxima,  # (splits, N) fp32, as all down to zsums
    sums,
    moments,  # or None
    zsums,  # or None
    best,  # (splits, N) int32 or None
    z_labels,  # (N,) fp32
    labels,  # (N,) int
    rows,  # (N,) int32
    count,  # () int32
    nll,  # (N,) fp32 out, as all below, at valid rows
    lse,  # or None
    entropy,  # where there are moments
    zmean,  # where there are zsums
    argmax,  # (N,) int64 out, where there is best
    highest,  # (N,) fp32 out, the same: its logit
    N,
    V,
    splits,
    BLOCK_N: tl.constexpr,
):
    """Merge the splits' statistics, and store each row's at its position."""
    n_valid = tl.load(count)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n_valid
    row = tl.load(rows + offs_n, mask=mask_n, other=0).to(tl.int64)
    N64 = tl.cast(N, tl.int64)

    m = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float64)
    others = tl.zeros((BLOCK_N,), dtype=tl.float64)
    moment = tl.zeros((BLOCK_N,), dtype=tl.float64)
    zsum = tl.zeros((BLOCK_N,), dtype=tl.float64)
    index = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for i in range(0, splits):
        at = i * N64 + offs_n
        m_i = tl.load(maxima + at, mask=mask_n, other=0.0).to(tl.float64)
        others_i = tl.load(sums + at, mask=mask_n, other=0.0).to(tl.float64)
        moment_i = tl.zeros((BLOCK_N,), dtype=tl.float64)
        if moments is not None:
            moment_i = tl.load(moments + at, mask=mask_n, other=0.0).to(tl.float64)
        if zsums is not None:
            zsum += tl.load(zsums + at, mask=mask_n, other=0.0).to(tl.float64)
        if best is not None:
            index_i = tl.load(best + at, mask=mask_n, other=0)
            index = tl.where(m_i > m, index_i, index)
        m, others, moment = merge(m, others, moment, m_i, others_i, moment_i, moments is not None)

    # The label is one more split: its maximum is its own logit, and nothing is beside it.
    z = tl.load(z_labels + offs_n, mask=mask_n, other=0.0).to(tl.float64)
    none = tl.zeros((BLOCK_N,), dtype=tl.float64)
    label = tl.load(labels + row, mask=mask_n, other=0).to(tl.int64)
    if best is not None:
        tl.store(argmax + row, tl.where(z > m, label, index.to(tl.int64)), mask=mask_n)
        tl.store(highest + row, tl.maximum(m, z).to(tl.float32), mask=mask_n)
    if moments is not None:
        top, others, moment = merge(m, others, moment, z, none, none, True)
        log_sum = log1p(others)
        loss = top - z + log_sum
        spread = (log_sum + moment / (1.0 + others)).to(tl.float32)
        tl.store(entropy + row, spread, mask=mask_n)
    else:
        # log(1 + exp(L - z)), L of the others alone, as in `token_loss`
        top = tl.maximum(m, z)
        above = others * tl.exp(m - tl.where(m == float("-inf"), 0.0, top))
        own = tl.exp(z - top)
        log_sum = tl.where(z > m, log1p(above), tl.log(own + above))
        loss = top - z + log_sum
    total = tl.where(top == float("-inf"), top, top + log_sum)
    bad = z != z  # a bad label, or a logit of +inf: maxima may pass a NaN by
    tl.store(nll + row, tl.where(bad, z, loss).to(tl.float32), mask=mask_n)
    if lse is not None:
        tl.store(lse + row, tl.where(bad, z, total).to(tl.float32), mask=mask_n)
    if zsums is not None:
        tl.store(zmean + row, (zsum / V).to(tl.float32), mask=mask_n)


@triton.jit
def merge(m, others, moment, m_i, others_i, moment_i, HAS_MOMENT: tl.constexpr):
    """Two splits of a row as one, in fp64. Without HAS_MOMENT ``others`` has the maximum's 1."""
    m_new = tl.maximum(m, m_i)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp(m - m_safe)
    b = tl.exp(m_i - m_safe)
    if HAS_MOMENT:
        drop_a = tl.where(a == 0.0, 0.0, m_safe - m)
        drop_b = tl.where(b == 0.0, 0.0, m_safe - m_i)
        moment = (moment + (1.0 + others) * drop_a) * a + (moment_i + (1.0 + others_i) * drop_b) * b
        others = others * a + others_i * b + tl.minimum(a, b)
    else:
        others = others * a + others_i * b
    return m_new, others, moment


@triton.jit
def log1p(x):
    """``log(1 + x)`` for fp64 ``x >= 0``, exact for small ones (Kahan): the rounding of ``1 + x``
    is in both factors and leaves. Not libdevice's, which the interpreter and HIP do not have."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))
