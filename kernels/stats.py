"""Statistics of every row's logits in one pass: label, log-sum-exp, entropy, argmax, mean.

The walk is that of :mod:`forward`, with more to carry along. Beside the running maximum ``m`` of
the logits but the label's there are, relative to it, ``rest``: the sum of exponentials without the
maximum's own 1, and ``below``: the sum of ``exp(z - m) * (m - z)``. Both are sums of what is not
negative, and entropy and loss are functions of them without cancellation where one class has
nearly all the probability: ``entropy = log1p(rest) + below / (1 + rest)``.

Splits of the vocabulary are merged by a second kernel, in float64 and in their order: the bits of
a row do not depend on the batch around it.
"""

import triton
import triton.language as tl

from .tile import LOG2E, finish_logits, finite_max, label_products, logits_tile


@triton.jit(do_not_specialize=["N"])
def stats_kernel(
    hidden,  # (N, H)
    weight,  # (V, H)
    weight_tiles,  # tensor descriptor of weight, if DESCRIPTOR
    bias,  # (V,)
    class_weight,  # (V,) fp32
    labels,  # (N,) int
    rows,  # (N,) int32: valid rows, from compact_kernel
    count,  # () int32: how many
    partials,  # (4, splits, N) fp32 out: m, rest (without HAS_ENTROPY: with the 1), below, sum of z
    places,  # (splits, N) int32 out, if HAS_ARGMAX
    z_labels,  # (N,) fp32 out
    N,
    H,
    V,
    stride_hn,
    stride_wv,
    scale,
    softcap,
    tiles_per_split,
    splits,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_ZSUM: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
    EVEN_H: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Row blocks of a group run next to each other on the same split: its weights come from L2.
    pid = tl.program_id(0)
    blocks = tl.cdiv(N, BLOCK_N)
    first_block = (pid // (GROUP_N * splits)) * GROUP_N
    group = tl.minimum(blocks - first_block, GROUP_N)
    block = first_block + (pid % (GROUP_N * splits)) % group
    split = (pid % (GROUP_N * splits)) // group

    n_valid = tl.load(count)
    if block * BLOCK_N >= n_valid:
        return

    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n_valid
    row = tl.load(rows + offs_n, mask=mask_n, other=0).to(tl.int64)
    label = tl.load(labels + row, mask=mask_n, other=-1).to(tl.int64)
    hidden_rows = hidden + row * stride_hn

    m = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    rest = tl.zeros((BLOCK_N,), dtype=tl.float32)
    below = tl.zeros((BLOCK_N,), dtype=tl.float32)
    zsum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    place = tl.zeros((BLOCK_N,), dtype=tl.int32)
    begin = split * tiles_per_split * BLOCK_V
    end = tl.minimum(begin + tiles_per_split * BLOCK_V, V)
    for start_v in tl.range(begin, end, BLOCK_V):
        z = logits_tile(
            hidden_rows,
            weight,
            weight_tiles,
            start_v,
            H,
            V,
            stride_wv,
            BLOCK_N,
            BLOCK_V,
            BLOCK_H,
            EVEN_H,
            DESCRIPTOR,
            INPUT_PRECISION,
            UPCAST,
        )
        offs_v = start_v + tl.arange(0, BLOCK_V)
        mask_v = offs_v < V
        if HAS_BIAS:
            b = tl.load(bias + offs_v, mask=mask_v, other=0.0).to(tl.float32)[None, :]
        else:
            b = 0.0
        z = finish_logits(z, b, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        if HAS_ZSUM:
            if HAS_CLASS_WEIGHT:
                c = tl.load(class_weight + offs_v, mask=mask_v, other=0.0)[None, :]
                zsum += tl.sum(tl.where(c != 0.0, c * z, 0.0), axis=1)  # 0 * inf is 0 here
            else:
                zsum += tl.sum(tl.where(mask_v[None, :], z, 0.0), axis=1)
        z = tl.where(mask_v[None, :] & (offs_v[None, :] != label[:, None]), z, float("-inf"))
        m_tile = tl.max(z, axis=1)
        if HAS_ARGMAX:
            here = start_v + tl.argmax(z, axis=1)
            place = tl.where(m_tile > m, here, place)
        m_new = tl.maximum(m, m_tile)
        m_safe = finite_max(m_new)
        a = tl.exp2((m - m_safe) * LOG2E)
        if HAS_ENTROPY:
            empty = m_tile == float("-inf")
            d = tl.maximum(z - finite_max(m_tile)[:, None], -1e30)  # e = 0 below, and 0 * inf NaN
            e = tl.exp2(d * LOG2E)
            top = z == m_tile[:, None]  # each but one of equal maxima counts among the rest
            ties = tl.where(empty, 0.0, tl.sum(top.to(tl.float32), axis=1) - 1.0)
            e = tl.where(top, 0.0, e)
            rest_tile = tl.sum(e, axis=1) + ties
            below_tile = -tl.sum(e * d, axis=1)
            t = tl.exp2((m_tile - m_safe) * LOG2E)
            below = (below + (1.0 + rest) * tl.where(a == 0.0, 0.0, m_safe - m)) * a
            fall = tl.where(t == 0.0, 0.0, m_safe - m_tile)
            below += (below_tile + (1.0 + rest_tile) * fall) * t
            rest = rest * a + rest_tile * t + tl.minimum(a, t)
        else:
            rest = rest * a + tl.sum(tl.exp2((z - m_safe[:, None]) * LOG2E), axis=1)
        m = m_new

    N64 = tl.cast(N, tl.int64)
    plane = splits * N64
    at = split * N64 + offs_n
    tl.store(partials + at, m, mask=mask_n)
    tl.store(partials + plane + at, rest, mask=mask_n)
    if HAS_ENTROPY:
        tl.store(partials + 2 * plane + at, below, mask=mask_n)
    if HAS_ZSUM:
        tl.store(partials + 3 * plane + at, zsum, mask=mask_n)
    if HAS_ARGMAX:
        tl.store(places + at, place, mask=mask_n)
    if split == 0:
        known = (label >= 0) & (label < V)  # a bad label must not read out of bounds
        v = tl.where(known, label, 0)
        z_label = label_products(hidden_rows, weight + v * stride_wv, H, BLOCK_N, BLOCK_H)
        b = tl.load(bias + v).to(tl.float32) if HAS_BIAS else 0.0
        z_label = finish_logits(z_label, b, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        z_label = tl.where(known & (z_label != float("inf")), z_label, float("nan"))
        tl.store(z_labels + offs_n, z_label, mask=mask_n)


@triton.jit(do_not_specialize=["N"])
def merge_stats_kernel(
    partials,  # (4, splits, N) fp32
    places,  # (splits, N) int32
    z_labels,  # (N,) fp32
    labels,  # (N,) int
    rows,  # (N,) int32
    count,  # () int32
    nll,  # (N,) fp32 out, as all below, at valid rows
    lse,
    entropy,
    zmean,
    argmax,  # (N,) int64 out
    N,
    V,
    splits,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_ZSUM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    n_valid = tl.load(count)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n_valid
    row = tl.load(rows + offs_n, mask=mask_n, other=0).to(tl.int64)
    N64 = tl.cast(N, tl.int64)
    plane = splits * N64

    m = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float64)
    rest = tl.zeros((BLOCK_N,), dtype=tl.float64)
    below = tl.zeros((BLOCK_N,), dtype=tl.float64)
    zsum = tl.zeros((BLOCK_N,), dtype=tl.float64)
    place = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for i in range(0, splits):
        at = partials + i * N64 + offs_n
        m_i = tl.load(at, mask=mask_n, other=0.0).to(tl.float64)
        rest_i = tl.load(at + plane, mask=mask_n, other=0.0).to(tl.float64)
        below_i = tl.zeros((BLOCK_N,), dtype=tl.float64)
        if HAS_ENTROPY:
            below_i = tl.load(at + 2 * plane, mask=mask_n, other=0.0).to(tl.float64)
        if HAS_ZSUM:
            zsum += tl.load(at + 3 * plane, mask=mask_n, other=0.0).to(tl.float64)
        if HAS_ARGMAX:
            here = tl.load(places + i * N64 + offs_n, mask=mask_n, other=0)
            place = tl.where(m_i > m, here, place)
        m, rest, below = merge(m, rest, below, m_i, rest_i, below_i, HAS_ENTROPY)

    # The label is one more part: its maximum is its own logit, and nothing is below.
    z = tl.load(z_labels + offs_n, mask=mask_n, other=0.0).to(tl.float64)
    none = tl.zeros((BLOCK_N,), dtype=tl.float64)
    label = tl.load(labels + row, mask=mask_n, other=0).to(tl.int64)
    if HAS_ARGMAX:
        best = tl.where(z > m, label, place.to(tl.int64))
        tl.store(argmax + row, best, mask=mask_n)
    if HAS_ENTROPY:
        top, rest, below = merge(m, rest, below, z, none, none, HAS_ENTROPY)
        log_sum = log1p(rest)
        loss = top - z + log_sum
        tl.store(entropy + row, (log_sum + below / (1.0 + rest)).to(tl.float32), mask=mask_n)
    else:
        # log(1 + exp(L - z)), L of the others alone, as in `token_loss`
        top = tl.maximum(m, z)
        others = rest * tl.exp(m - tl.where(m == float("-inf"), 0.0, top))
        own = tl.exp(z - top)
        log_sum = tl.where(z > m, log1p(others), tl.log(own + others))
        loss = top - z + log_sum
    total = tl.where(top == float("-inf"), top, top + log_sum)
    bad = z != z  # a bad label, or a logit of +inf: maxima may pass a NaN by
    tl.store(nll + row, tl.where(bad, z, loss).to(tl.float32), mask=mask_n)
    if HAS_LSE:
        tl.store(lse + row, tl.where(bad, z, total).to(tl.float32), mask=mask_n)
    if HAS_ZSUM:
        tl.store(zmean + row, (zsum / V).to(tl.float32), mask=mask_n)


@triton.jit
def merge(m, rest, below, m_i, rest_i, below_i, HAS_ENTROPY: tl.constexpr):
    """Two parts of a row as one, in fp64. Without HAS_ENTROPY ``rest`` holds the maximum's 1."""
    m_new = tl.maximum(m, m_i)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    a = tl.exp(m - m_safe)
    b = tl.exp(m_i - m_safe)
    if HAS_ENTROPY:
        fall_a = tl.where(a == 0.0, 0.0, m_safe - m)
        fall_b = tl.where(b == 0.0, 0.0, m_safe - m_i)
        below = (below + (1.0 + rest) * fall_a) * a + (below_i + (1.0 + rest_i) * fall_b) * b
        rest = rest * a + rest_i * b + tl.minimum(a, b)
    else:
        rest = rest * a + rest_i * b
    return m_new, rest, below


@triton.jit
def log1p(x):
    """``log(1 + x)`` for fp64 ``x >= 0``, exact for small ones (Kahan): the rounding of ``1 + x``
    is in both factors and leaves."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))
