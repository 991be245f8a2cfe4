"""Kernels that sum a row's exponentials over all ranks of a sharded vocabulary.

`shard_sums` merges the blocks of a rank into one reference and one sum a row, which the ranks
exchange. `merge_shards` then computes the row's loss, on every rank from the same numbers by the
same instructions, so that its bits are equal on all of them.

References are in units of log 2, as everywhere; one of -inf belongs to a rank that holds nothing of
a row but its label.
"""

import triton
import triton.language as tl

from .tile import LOG2E, block_reference, exp, finite_max, token_loss


@triton.jit(do_not_specialize=["maxima", "sums", "z_label", "best", "table", "C", "first_class"])
def shard_sums_kernel(
    maxima,  # (blocks, C) fp32, the label's logit left out
    sums,  # (blocks, C) fp32, relative to the block's reference
    z_label,  # (C,) fp32
    best,  # (blocks, C) int32, or None: where the maxima are
    table,  # (2, C) fp32 out: reference, sum; with best (4, C): maximum, bits of its class
    C,
    blocks,
    first_class,  # of this rank
    OWN_REFERENCES: tl.constexpr,  # of every block, not the labels' logits
    BLOCK_C: tl.constexpr,
):
    """Merge the blocks of this rank into one reference and one sum a row."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    z = tl.load(z_label + offs_c, mask=mask_c, other=0.0)
    own = None
    if not OWN_REFERENCES:
        own = z
    m = tl.full((BLOCK_C,), float("-inf"), dtype=tl.float32)
    index = tl.zeros((BLOCK_C,), dtype=tl.int32)
    for i in range(0, blocks):
        m_i = tl.load(maxima + i * C + offs_c, mask=mask_c, other=0.0)
        if best is not None:
            index_i = tl.load(best + i * C + offs_c, mask=mask_c, other=0)
            index = tl.where(m_i > m, index_i, index)
        m = tl.maximum(m, m_i)
    reference = tl.maximum(m, z) * LOG2E
    top = finite_max(reference)
    s = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for i in range(0, blocks):
        m_i = tl.load(maxima + i * C + offs_c, mask=mask_c, other=0.0)
        s_i = tl.load(sums + i * C + offs_c, mask=mask_c, other=0.0)
        of_block = tl.where(m_i == float("-inf"), float("-inf"), block_reference(m_i, own))
        s += s_i * tl.exp2(of_block - top)
    tl.store(table + offs_c, reference, mask=mask_c)
    tl.store(table + C + offs_c, s, mask=mask_c)
    if best is not None:
        tl.store(table + 2 * C + offs_c, m, mask=mask_c)
        of_all = (index + first_class).to(tl.float32, bitcast=True)
        tl.store(table + 3 * C + offs_c, of_all, mask=mask_c)


@triton.jit(
    do_not_specialize=["table", "z_label", "labels", "merged", "losses", "lse", "argmax", "rows",
                       "C", "ranks", "first"]
)  # fmt: skip
def merge_shards_kernel(
    table,  # (ranks, PLANES, C) fp32: references, sums; with argmax maxima, bits of their classes
    z_label,  # (C,) fp32, NaN for bad labels
    labels,  # (C,) int, or None without argmax
    merged,  # (2, C) fp32 out: reference that is finite, sum; the label left out
    losses,  # (C,) fp32 out
    lse,  # (C,) fp32 out, or None
    argmax,  # (N,) int64 out, or None
    rows,  # (N,) int32: position of each row, with argmax
    C,
    ranks,
    first,  # number of the chunk's first row
    PLANES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Merge the ranks' references and sums into the loss, log-sum-exp and argmax of each row."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    z = tl.load(z_label + offs_c, mask=mask_c, other=0.0)
    top = z * LOG2E
    top = tl.where(top == top, top, float("-inf"))
    for r in range(0, ranks):
        top = tl.maximum(top, tl.load(table + r * PLANES * C + offs_c, mask=mask_c, other=0.0))
    top = finite_max(top)
    s = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for r in range(0, ranks):
        at = table + r * PLANES * C + offs_c
        reference = tl.load(at, mask=mask_c, other=0.0)
        s_r = tl.load(at + C, mask=mask_c, other=0.0)
        s += tl.where(reference == float("-inf"), s_r, s_r * tl.exp2(reference - top))
    tl.store(merged + offs_c, top, mask=mask_c)
    tl.store(merged + C + offs_c, s, mask=mask_c)
    tl.store(losses + offs_c, token_loss(top, s, z).to(tl.float32), mask=mask_c)
    if lse is not None:
        total = tl.log((exp(z, top) + s).to(tl.float64)) + top.to(tl.float64) / LOG2E
        tl.store(lse + offs_c, total.to(tl.float32), mask=mask_c)
    if argmax is not None:
        m = tl.full((BLOCK_C,), float("-inf"), dtype=tl.float32)
        index = tl.zeros((BLOCK_C,), dtype=tl.int64)
        for r in range(0, ranks):
            at = table + (r * PLANES + 2) * C + offs_c
            m_r = tl.load(at, mask=mask_c, other=0.0)
            bits = tl.load(at + C, mask=mask_c, other=0.0)
            index = tl.where(m_r > m, bits.to(tl.int32, bitcast=True).to(tl.int64), index)
            m = tl.maximum(m, m_r)
        index = tl.where(z > m, tl.load(labels + offs_c, mask=mask_c, other=0).to(tl.int64), index)
        row = tl.load(rows + first + offs_c, mask=mask_c, other=0)
        tl.store(argmax + row, index, mask=mask_c)
