"""Kernel that merges the splits' statistics of every row: nll, log-sum-exp, entropy, argmax, mean.

They come from the walk's epilogue ``STATISTICS`` (:mod:`fusedce.kernels.walk`), and are merged in
float64 and in their order: the bits of a row do not depend on the batch around it.
"""

import triton
import triton.language as tl


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
