"""Kernel of the forward-only pass: loss sum and token count in one launch, no logit is written.

A program owns ``BLOCK_N`` valid rows and one split of the vocabulary. It walks over the split's
tiles, adds up the exponentials of all logits but the label's, and stores one partial (reference,
sum of exponentials) per row; the first split also computes the label's logit, a dot product per
row. The reference follows the row's maximum from tile to tile (online softmax, Milakov and
Gimelshein, arXiv:1805.02867), rounded up to a whole power of two: rescaling a sum, and merging
the splits' sums, is then exact.

Each program then takes a ticket; the program that draws the last ticket of a row block merges the
partials, and the one that draws the last ticket of all row blocks adds up the losses. No program
waits for another.

Bits do not depend on which program comes last: splits are merged in their order, rows are added in
theirs, in float64. The split of the vocabulary depends on V alone, so a row's loss does not depend
on the batch around it.
"""

import triton
import triton.language as tl

from .tile import (
    LOG2E,
    exp,
    finite_max,
    label_logits,
    logits_tile,
    others_of_tile,
    packed_rows,
    program_of_grid,
    token_loss,
)

# The reference of a row whose tiles so far are empty. (-inf - -inf would be NaN.)
NO_REFERENCE: tl.constexpr = tl.constexpr(-1e30)
# References stay finite beside a logit of +inf, so that its exponential is +inf and not NaN.
HIGHEST: tl.constexpr = tl.constexpr(2.0**127)


@triton.jit(do_not_specialize=["N"])
def forward_kernel(
    hidden,  # (N, H)
    weight,  # (V, H)
    weight_tiles,  # tensor descriptor of weight, or None
    bias,  # (V,) or None
    labels,  # (N,) int
    rows,  # (N,) int32: valid rows, from compact_kernel
    count,  # () int32: how many
    partials,  # (2 * splits + 1, N) fp32 scratch: references, sums of exponentials, label logits
    block_losses,  # (blocks,) fp64 scratch
    tickets,  # (1 + blocks,) int32, all 0: of the row blocks together, then of each
    loss_sum,  # () fp32 out
    lse,  # (N,) fp32 out at valid rows, or None
    N,
    H,  # in units of UNIT elements, as the strides
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
    UNIT: tl.constexpr,  # what rows are aligned to: the compiler then reads so many at once
    EVEN_H: tl.constexpr,
    FLATTEN: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Three phases: sums of a split, merging of a row block's splits, the sum of all losses."""
    H, stride_hn, stride_wv = H * UNIT, stride_hn * UNIT, stride_wv * UNIT
    block, split = program_of_grid(tl.program_id(0), N, splits, BLOCK_N, GROUP_N)
    n_valid = tl.load(count)
    if block * BLOCK_N >= n_valid:
        return
    offs_n, mask_n, row, label = packed_rows(block, rows, labels, n_valid, V, BLOCK_N)
    hidden_rows = hidden + row * stride_hn

    # Phase 1: sums of exponentials over the tiles of this split, in units of 2 ** m, where m is the
    # least whole number that is not below the maximum.
    begin = split * tiles_per_split * BLOCK_V
    end = tl.minimum(begin + tiles_per_split * BLOCK_V, V)
    m = tl.full((BLOCK_N,), NO_REFERENCE, dtype=tl.float32)
    s = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for start_v in tl.range(begin, end, BLOCK_V, flatten=FLATTEN):
        z = logits_tile(
            hidden_rows, weight, weight_tiles, bias, start_v, H, V, stride_wv, scale, softcap,
            BLOCK_N, BLOCK_V, BLOCK_H, EVEN_H, INPUT_PRECISION, UPCAST,
        )  # fmt: skip
        z = others_of_tile(z, label, start_v, V, BLOCK_V)
        highest = tl.maximum(m, tl.ceil(tl.max(z, axis=1) * LOG2E))
        highest = tl.minimum(highest, HIGHEST)
        s = s * tl.exp2(m - highest) + tl.sum(exp(z, highest[:, None]), axis=1)
        m = highest

    N64 = tl.cast(N, tl.int64)
    plane = splits * N64
    at = partials + split * N64 + offs_n
    tl.store(at, m, mask=mask_n)
    tl.store(at + plane, s, mask=mask_n)
    if split == 0:
        z_label = label_logits(
            hidden_rows, weight, bias, label, H, stride_wv, scale, softcap, BLOCK_N, BLOCK_H
        )
        tl.store(at + 2 * plane, z_label, mask=mask_n)

    # Phase 2: the last split of this row block to arrive merges all of them. The barrier orders
    # the whole program's stores before the one thread that takes the ticket; .cg loads below
    # bypass L1, which may hold what another program has since overwritten.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + 1 + block, 1, sem="acq_rel", scope="gpu")
    if ticket != splits - 1:
        return
    tl.debug_barrier()
    m = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    for i in range(0, splits):
        at = partials + i * N64 + offs_n
        m = tl.maximum(m, tl.load(at, mask=mask_n, other=0.0, cache_modifier=".cg"))
    m_safe = finite_max(m)
    s = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for i in range(0, splits):
        at = partials + i * N64 + offs_n
        m_i = tl.load(at, mask=mask_n, other=0.0, cache_modifier=".cg")
        s_i = tl.load(at + plane, mask=mask_n, other=1.0, cache_modifier=".cg")
        s += s_i * tl.exp2(m_i - m_safe)
    at = partials + 2 * plane + offs_n
    z_label = tl.load(at, mask=mask_n, other=0.0, cache_modifier=".cg")
    loss = token_loss(m_safe, s, z_label)
    if lse is not None:
        # Beside +inf, or -inf alone, a loss is NaN but its log-sum-exp is not.
        infinite = tl.maximum(s, z_label, propagate_nan=tl.PropagateNan.ALL)
        infinite = tl.where(s == 0.0, z_label, infinite)
        total = tl.where(loss == loss, (z_label + loss).to(tl.float32), infinite)
        tl.store(lse + row, total, mask=mask_n)
    block_loss = tl.sum(tl.where(mask_n, loss, 0.0), axis=0)
    tl.store(block_losses + block, block_loss)

    # Phase 3: the last row block to arrive adds up the losses.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu")
    if ticket != tl.cdiv(n_valid, BLOCK_N) - 1:
        return
    tl.debug_barrier()
    total = tl.zeros((), dtype=tl.float64)
    for start in range(0, tl.cdiv(n_valid, BLOCK_N), 128):
        offs = start + tl.arange(0, 128)
        mask = offs < tl.cdiv(n_valid, BLOCK_N)
        some = tl.load(block_losses + offs, mask=mask, other=0.0, cache_modifier=".cg")
        total += tl.sum(some, axis=0)
    tl.store(loss_sum, total.to(tl.float32))
