"""Loss and gradient of a chunk of logits, in place: one program per row, two sweeps.

The first sweep reads the row for its log-sum-exp, the second (served by L2) overwrites it with
``(softmax - onehot) * slope``, the derivative by the raw products. The gradient may be narrower
than the logits: then it packs the front of the same row.
"""

import triton
import triton.language as tl

from .tile import LOG2E, exp, finish_logits, finite_max, logits_slope, token_loss


@triton.jit
def grad_rows_kernel(
    logits,  # (C, V) fp32 in: raw products hidden @ weight.T
    grads,  # (C, V) out, may share memory with logits, row by row
    bias,  # (V,)
    labels,  # (C,) int, none ignored
    losses,  # (C,) fp32 out
    V,
    stride_lc,
    stride_gc,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    AMPLIFY: tl.constexpr,  # a power of two on the gradient: small probabilities underflow in fp16
    PACKED: tl.constexpr,  # grads share memory with logits but are narrower
    BLOCK_V: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64)
    logits += c * stride_lc
    grads += c * stride_gc
    label = tl.load(labels + c).to(tl.int64)

    # The label's logit, before anything is overwritten. A bad label must not read out of bounds.
    known = (label >= 0) & (label < V)
    at = tl.where(known, label, 0)
    bias_label = tl.load(bias + at).to(tl.float32) if HAS_BIAS else 0.0
    z_label = tl.load(logits + at)
    z_label = finish_logits(z_label, bias_label, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    z_label = tl.where(known, z_label, float("nan"))

    # Sweep 1, over all logits but the label's: each lane keeps its own maximum (in powers of two)
    # and sum; they meet once, at the end.
    m = tl.full((BLOCK_V,), float("-inf"), dtype=tl.float32)
    s = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        mask_v = offs_v < V
        z = tl.load(logits + offs_v, mask=mask_v, other=0.0)
        b = tl.load(bias + offs_v, mask=mask_v, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        z = finish_logits(z, b, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        z = tl.where(mask_v & (offs_v != label), z, float("-inf"))
        m_new = tl.maximum(m, z * LOG2E)
        m_safe = finite_max(m_new)
        s = s * tl.exp2(m - m_safe) + exp(z, m_safe)
        m = m_new
    m_others = tl.max(m, axis=0)  # -inf where the label is alone
    m_safe = finite_max(m_others)
    others = tl.sum(s * tl.exp2(m - m_safe), axis=0)
    tl.store(losses + c, token_loss(m_safe, others, z_label).to(tl.float32))

    # Sweep 2: the gradient. At the label p - 1 = -(sum of the others), which does not cancel.
    top = finite_max(tl.maximum(m_others, z_label * LOG2E))
    others *= tl.exp2(m_others - top)
    inverse = 1.0 / (exp(z_label, top) + others)
    inverse = tl.where(known, inverse, float("nan"))  # a bad label poisons its row
    g_label = -others * inverse
    for start in range(0, V, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        mask_v = offs_v < V
        z = tl.load(logits + offs_v, mask=mask_v, other=0.0)
        b = tl.load(bias + offs_v, mask=mask_v, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        z = finish_logits(z, b, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        g = tl.where(offs_v == label, g_label, exp(z, top) * inverse)
        g *= logits_slope(z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        if AMPLIFY != 1.0:
            g *= AMPLIFY
        if PACKED:
            # A packed block lands on logits that other threads are about to read in this block,
            # or on those of an earlier one: all must have read before any writes.
            tl.debug_barrier()
        tl.store(grads + offs_v, g.to(grads.dtype.element_ty), mask=mask_v)
