"""Kernels of the divergence of a student from a teacher, and of the student's gradient.

A program takes a row of the student's logits and one of the teacher's, float32 products as cuBLAS
made them. It reads both for their log-sum-exps and again for the divergence, and writes the
gradient of the student's logits over the logits, in the inputs' dtype (a row of two-byte entries
ends before the floats that are still to be read begin; a barrier keeps the loads of a block before
its stores). Divergences whose gradient needs their own value, all but the forward one, read the
rows a third time.

With ``d = log p - log q`` everything is made from ``big = max(p, q)`` and ``e = expm1(-|d|)``.
As in :mod:`fusedce.backends.torch.divergence_tiles`, each class gets a term more, and these sum to
0, so that nothing cancels where p and q are nearly equal. There a series computes ``k = |d| + e``.

Bytes moved per class: 8 each time that the rows are read, 2 or 4 to store, and 4 more if there is a
bias, whose gradient is a sum of these. The products take 8 H FLOPs per class.
"""

import triton
import triton.language as tl

from .tile import LOG2E, finish_logits, logits_slope, softplus

FORWARD: tl.constexpr = tl.constexpr(0)
REVERSE: tl.constexpr = tl.constexpr(1)
JSD: tl.constexpr = tl.constexpr(2)
EDGE: tl.constexpr = tl.constexpr(3)  # JSD with beta below 0.1 or above 0.9
NEVER: tl.constexpr = tl.constexpr(1e30)  # a logit of -inf counts as minus this
FAR: tl.constexpr = tl.constexpr(1e20)  # ... and is below minus this after scale and temperature
NEAR: tl.constexpr = tl.constexpr(0.5)  # log-sum-exps no further apart: subtract logits
# A class counts as possible if its log-probability is above this (float64 can hold it). If the
# other head excludes such a class (a logit of -inf), the divergence is infinite.
HARDLY: tl.constexpr = tl.constexpr(-700.0)


@triton.jit
def row_logits(
    products,  # row of (V,) fp32
    bias,  # (V,) or None
    start,
    V,
    scale,  # None for 1
    softcap,  # or None
    BLOCK_V: tl.constexpr,
):
    """Finished logits of a block; -NEVER past V and for logits of -inf."""
    offs = start + tl.arange(0, BLOCK_V)
    mask = offs < V
    z = tl.load(products + offs, mask=mask, other=0.0)
    b = None
    if bias is not None:
        b = tl.load(bias + offs, mask=mask, other=0.0).to(tl.float32)
    z = finish_logits(z, b, scale, softcap)
    z = tl.where(z < -NEVER, -NEVER, z)  # a NaN stays
    return tl.where(mask, z, -NEVER)


@triton.jit
def add_to_sum(z, top, total):
    """Add a block of logits to a running maximum and an fp64 sum of exponentials."""
    new = tl.maximum(top, tl.max(z, axis=0))
    total = total * tl.exp2((top - new) * LOG2E).to(tl.float64)
    # The maximum may drop a NaN, the sum keeps it.
    return new, total + tl.sum(tl.exp2((z - new) * LOG2E), axis=0).to(tl.float64)


@triton.jit
def low_part(x):
    """The rest of a float64 that float32 drops."""
    return (x - x.to(tl.float32).to(tl.float64)).to(tl.float32)


@triton.jit
def label_loss(top, total, own):
    """``log(1 + exp(excess))`` and the excess: the others' log-sum-exp over the label's logit."""
    excess = tl.log(total) + top.to(tl.float64) - own
    return softplus(excess), excess


@triton.jit
def expm1_and_remainder(size):
    """``expm1(-size)`` and ``size + expm1(-size)`` for ``size >= 0``, both exact near 0."""
    # size^2 * (1/2 - size/6 + size^2/24 - ...): below 2^-27 relative for size < 0.5
    series = 1.0 / 3628800.0
    series = series * -size + 1.0 / 362880.0
    series = series * -size + 1.0 / 40320.0
    series = series * -size + 1.0 / 5040.0
    series = series * -size + 1.0 / 720.0
    series = series * -size + 1.0 / 120.0
    series = series * -size + 1.0 / 24.0
    series = series * -size + 1.0 / 6.0
    series = series * -size + 0.5
    near = size * size * series
    far = tl.exp2(-size * LOG2E) - 1.0
    small = size < 0.5
    return tl.where(small, near - size, far), tl.where(small, near, size + far)


@triton.jit
def log_and_remainder(x):
    """``log(1 + x)`` and ``(1 + x) * log(1 + x) - x`` for ``-1 < x <= 0``, both exact near 0."""
    # x^2/2 - x^3/6 + x^4/12 - ... = sum of (-x)^n / (n (n - 1)): below 2^-24 relative for 0.1
    y = -x
    series = 1.0 / 72.0
    series = series * y + 1.0 / 56.0
    series = series * y + 1.0 / 42.0
    series = series * y + 1.0 / 30.0
    series = series * y + 1.0 / 20.0
    series = series * y + 1.0 / 12.0
    series = series * y + 1.0 / 6.0
    series = series * y + 0.5
    near = x * x * series
    log = tl.log(1.0 + x)
    small = y < 0.1
    remainder = tl.where(small, near, (1.0 + x) * log - x)
    return tl.where(small, (x + near) / (1.0 + x), log), remainder


@triton.jit
def class_terms(z, t, lse, low, lse_t, low_t, beta, one_minus_beta, KIND: tl.constexpr):
    """The divergence's terms of a block's classes, with q, the logarithm and ``q - p`` of each.

    The logarithm is that of q over p, or over the mixture; 0 where no gradient needs it. A
    log-sum-exp is ``lse + low``, two floats: one alone is off by whole nats where logits are large.
    """
    log_q = (z - lse) - low
    log_p = (t - lse_t) - low_t
    # Near equality the difference of logits is exact. Heads of other log-sum-exps have other
    # logits, which may be far larger than their log-probabilities.
    shift = (lse - lse_t) + (low - low_t)
    d = tl.where(tl.abs(shift) <= NEAR, (t - z) + shift, log_p - log_q)
    size = tl.abs(d)
    e, k = expm1_and_remainder(size)
    teacher = d > 0  # has the larger probability
    big = tl.exp2(tl.maximum(log_q, log_p) * LOG2E)
    q = tl.where(teacher, big * (1.0 + e), big)
    gap = tl.where(teacher, big * e, -big * e)
    # Minus the divergence of the smaller one from the larger, over big; it tends to -1.
    lesser = tl.where(size < 0.5, k + size * e, size * (1.0 + e) + e)
    if KIND >= JSD:
        # The rounding of 1 + e is large beside a small q, which its logarithm multiplies.
        q = tl.exp2(log_q * LOG2E)
        w = tl.where(teacher, one_minus_beta, beta)  # of the smaller probability
        log, remainder = log_and_remainder(w * e)
        # (w (k + size e) + remainder) is w |d| (1 + e) + (1 + x) log
        term = -big * (remainder + w * lesser)
        x = -tl.maximum(d, 0.0) - log
        if KIND == EDGE:  # the mixture over big: near 0 only a sum of positive numbers is exact
            ratio = tl.exp2(-size * LOG2E)
            far = w * e < -0.5
            mixture = tl.where(far, tl.where(teacher, beta, one_minus_beta) + w * ratio, 1.0)
            log_of_far = tl.log(mixture)
            term = tl.where(far, -big * (mixture * log_of_far + w * size * ratio), term)
            x = tl.where(far, -tl.maximum(d, 0.0) - log_of_far, x)
    elif KIND == FORWARD:
        term = tl.where(teacher, big * k, -big * lesser)
        x = tl.zeros_like(d)
    else:
        term = tl.where(teacher, -big * lesser, big * k)
        x = -d
    return term, q, x, gap


@triton.jit
def leave_row_out(row, losses, row_factors, grads, grads_fp32, width, BLOCK_V: tl.constexpr):
    """Store 0 as the loss, factor and gradient of ``row``, which both ``grads`` point to."""
    tl.store(losses + row, 0.0)
    if row_factors is not None:
        tl.store(row_factors + row, 0.0)
    if grads is not None:
        for start in range(0, width, BLOCK_V):
            offs_v = start + tl.arange(0, BLOCK_V)
            none = tl.zeros((BLOCK_V,), dtype=grads.dtype.element_ty)
            tl.store(grads + offs_v, none, mask=offs_v < width)
            if grads_fp32 is not None:
                tl.store(grads_fp32 + offs_v, none.to(tl.float32), mask=offs_v < width)


@triton.jit(
    do_not_specialize=[
        "labels", "losses", "token_weight", "row_factors", "of_ce", "beta", "one_minus_beta"
    ]
)  # fmt: skip
def divergence_rows_kernel(
    student,  # (C, width) fp32 products
    teacher,  # (C, width) fp32 products
    grads,  # (C, 4 / itemsize * width) out: the memory of `student`, in the inputs' dtype; or None
    grads_fp32,  # (C, width) fp32 out: the memory of `teacher`, gets grads before rounding; or None
    bias,  # (V,) or None
    teacher_bias,  # (V,) or None
    labels,  # (C,) int
    token_weight,  # (C,) fp32: 0 leaves a row out
    losses,  # (C,) fp32 out
    row_factors,  # (C,) fp32 out, or None: what each row of grads must be multiplied by
    V,
    width,  # V rounded up to a multiple of 16
    stride_g,  # entries of a row of grads
    scale,  # None for 1; this and the three below are already divided by the temperature
    softcap,  # or None
    teacher_scale,
    teacher_softcap,
    beta,  # of the teacher in the mixture
    one_minus_beta,  # 1 - beta, the student's
    of_ce,  # weight of the cross-entropy
    temperature,  # logits times this are those at temperature 1
    KIND: tl.constexpr,
    HAS_CE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # the largest entry of grads is GRAD_SCALE or less
    GRAD_SCALE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A row's divergence, plus ``of_ce`` times its cross-entropy, and the student's gradient."""
    c = tl.program_id(0).to(tl.int64)
    student += c * width
    teacher += c * width
    if grads is not None:
        grads += c * stride_g
    if grads_fp32 is not None:
        grads_fp32 += c * width
    offs_v = tl.arange(0, BLOCK_V)
    weight = tl.load(token_weight + c)
    if weight == 0.0:
        leave_row_out(c, losses, row_factors, grads, grads_fp32, width, BLOCK_V)
        return

    label = tl.load(labels + c)
    known = (label >= 0) & (label < V)  # a bad label makes its whole row NaN
    label = tl.where(known, label, -1).to(tl.int32)

    # Phase 1: both log-sum-exps, and with a cross-entropy that of the other classes.
    top_s = tl.full((), float("-inf"), tl.float32)
    top_t = top_s
    top_1 = top_s  # the other classes' logits at temperature 1
    sum_s = tl.zeros((), tl.float64)
    sum_t = sum_s
    sum_1 = sum_s
    given = top_s  # the largest logit of a class that the other head excludes
    z_label = tl.zeros((), tl.float32)
    for start in range(0, V, BLOCK_V):
        z = row_logits(student, bias, start, V, scale, softcap, BLOCK_V)
        t = row_logits(teacher, teacher_bias, start, V, teacher_scale, teacher_softcap, BLOCK_V)
        top_s, sum_s = add_to_sum(z, top_s, sum_s)
        top_t, sum_t = add_to_sum(t, top_t, sum_t)
        if KIND == FORWARD:
            given = tl.maximum(given, tl.max(tl.where(z <= -FAR, t, float("-inf")), axis=0))
        elif KIND == REVERSE:
            given = tl.maximum(given, tl.max(tl.where(t <= -FAR, z, float("-inf")), axis=0))
        if HAS_CE:
            at = start + offs_v == label
            z_label += tl.sum(tl.where(at, z, 0.0), axis=0) * temperature
            z = tl.where(at, -NEVER, z * temperature)
            top_1, sum_1 = add_to_sum(z, top_1, sum_1)
    lse = tl.log(sum_s) + top_s.to(tl.float64)
    lse_t = tl.log(sum_t) + top_t.to(tl.float64)
    impossible = given - (lse if KIND == REVERSE else lse_t) > HARDLY
    bad = lse - lse + (lse_t - lse_t)  # 0, or NaN
    low = low_part(lse)
    low_t = low_part(lse_t)
    lse = lse.to(tl.float32)
    lse_t = lse_t.to(tl.float32)
    nll = tl.zeros((), tl.float64)
    lse_1 = tl.zeros((), tl.float32)
    low_1 = lse_1
    g_label = tl.zeros((), tl.float32)
    if HAS_CE:
        excluded = z_label <= -FAR  # its loss is infinite, and the others have all probability
        own = tl.where(excluded, float("-inf"), z_label).to(tl.float64)
        nll, excess = label_loss(top_1, sum_1, own)
        wide = tl.where(excluded, tl.log(sum_1) + top_1.to(tl.float64), own + nll)
        low_1 = low_part(wide)
        lse_1 = wide.to(tl.float32)
        g_label = tl.where(excluded, -1.0, -tl.exp(excess - nll)).to(tl.float32)  # p - 1

    # Phase 2: the divergence and the mean of its logarithms, where the gradient needs them.
    divergence = tl.zeros((), tl.float64)
    mean = tl.zeros((), tl.float32)
    total = tl.zeros((), tl.float32)
    largest = tl.zeros((), tl.float32)
    if SCALE_ROWS:
        largest += 1.0
    if KIND != FORWARD or grads is None:
        for start in range(0, V, BLOCK_V):
            z = row_logits(student, bias, start, V, scale, softcap, BLOCK_V)
            t = row_logits(teacher, teacher_bias, start, V, teacher_scale, teacher_softcap, BLOCK_V)
            term, q, x, gap = class_terms(z, t, lse, low, lse_t, low_t, beta, one_minus_beta, KIND)
            inside = start + offs_v < V
            divergence += tl.sum(tl.where(inside, term, 0.0), axis=0).to(tl.float64)
            mean += tl.sum(tl.where(inside, q * x, 0.0), axis=0)
            total += tl.sum(tl.where(inside, q, 0.0), axis=0)
            if SCALE_ROWS:
                largest = tl.maximum(largest, tl.max(tl.where(inside, q * tl.abs(x), 0.0), axis=0))
        # Sums of q differ from 1 as the rounded log-sum-exps do, and so do those of q * x.
        mean /= total
    if SCALE_ROWS:
        # A power of two, which the products' other operand takes in without being rounded again.
        size = largest + tl.abs(mean) + tl.maximum(of_ce, -of_ce) * temperature
        exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
        size = exponent.to(tl.float32, bitcast=True)
        row_scale = GRAD_SCALE / size
        tl.store(row_factors + c, weight * size)
    else:
        row_scale = weight

    # Phase 3: the gradient; for the forward divergence its value as well.
    if grads is not None:
        for start in range(0, width, BLOCK_V):
            z = row_logits(student, bias, start, V, scale, softcap, BLOCK_V)
            t = row_logits(teacher, teacher_bias, start, V, teacher_scale, teacher_softcap, BLOCK_V)
            inside = start + offs_v < V
            term, q, x, gap = class_terms(z, t, lse, low, lse_t, low_t, beta, one_minus_beta, KIND)
            if KIND == FORWARD:
                divergence += tl.sum(tl.where(inside, term, 0.0), axis=0).to(tl.float64)
                g = gap
            else:
                g = q * (x - mean)
            if KIND >= JSD:
                g *= one_minus_beta
            if HAS_CE:
                at = start + offs_v == label
                p_1 = tl.exp2(((z * temperature - lse_1) - low_1) * LOG2E)
                g += of_ce * temperature * tl.where(at, g_label, p_1)
            slope = logits_slope(z, None, softcap)
            g *= slope * row_scale
            g = tl.where(known & inside, g, tl.where(inside, float("nan"), 0.0))
            tl.debug_barrier()
            tl.store(
                grads + start + offs_v,
                g.to(grads.dtype.element_ty),
                mask=start + offs_v < width,
            )
            if grads_fp32 is not None:
                tl.store(grads_fp32 + start + offs_v, g, mask=start + offs_v < width)
    divergence = tl.where(impossible, float("inf"), divergence) + bad
    loss = weight.to(tl.float64) * (divergence + of_ce * nll)
    tl.store(losses + c, tl.where(known, loss, float("nan")).to(tl.float32))
