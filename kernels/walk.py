"""The walk over the vocabulary: logits of a block of rows, tile by tile, and an epilogue for each.

A program owns ``BLOCK_N`` rows and one split of the vocabulary. It makes one product after another
(:func:`fusedce.kernels.tile.logits_tile`: the main loop, over H). A tile's logits stay in
registers, and one of three epilogues, chosen at compile time, takes what it needs of them:

* ``SUMS``, of a loss without gradients, adds up the exponentials of all logits but the label's. The
  reference follows the row's maximum from tile to tile (online softmax, Milakov and Gimelshein,
  arXiv:1805.02867), rounded up to a whole power of two: rescaling a sum, and merging the splits'
  sums, is then exact. One launch returns the sum of the losses: each program takes a ticket; the
  one that draws the last ticket of a row block merges its splits, and the one that draws the last
  of all adds up the losses. No program waits for another.
* ``STATISTICS``, of every row, carries along, relative to the running maximum ``m``, the sum of the
  exponentials; where the entropy is asked, ``others``: that sum without the maximum's own 1, and
  ``moment``: the sum of ``exp(z - m) * (m - z)``. Both are sums of what is not negative, and
  entropy and loss are functions of them without cancellation where one class has nearly all the
  probability: ``entropy = log1p(others) + moment / (1 + others)``. `merge_stats_kernel` merges the
  splits, in float64 and in their order.
* ``EXPONENTIALS``, of training with a small hidden size, stores them in two bytes, with each tile's
  maximum and sum. The numbers are those of a product by cuBLAS and ``exp_tile_kernel`` after it.

The first split also computes the label's logit, a dot product a row; for ``EXPONENTIALS`` it is
known. Bits do not depend on which program comes last: splits are merged in their order, rows are
added in theirs, in float64. The split depends on V alone, so a row's results do not depend on the
batch around it.
"""

import triton
import triton.language as tl

from .tile import (
    LOG2E,
    block_reference,
    exp,
    finite_max,
    label_logits,
    log1p,
    logits_slope,
    logits_tile,
    others_of_tile,
    place_of_largest,
    program_of_grid,
    token_loss,
)

SUMS: tl.constexpr = tl.constexpr(0)
STATISTICS: tl.constexpr = tl.constexpr(1)
EXPONENTIALS: tl.constexpr = tl.constexpr(2)
# The reference of a row whose tiles so far are empty. (-inf - -inf would be NaN.)
NO_REFERENCE: tl.constexpr = tl.constexpr(-1e30)
# References stay finite beside a logit of +inf, so that its exponential is +inf and not NaN.
HIGHEST: tl.constexpr = tl.constexpr(2.0**127)


@triton.jit
def add_sums(z, m, s):
    """Add a tile's exponentials to the sums ``s``, in units of 2 ** m (m whole, no logit above)."""
    highest = tl.maximum(m, tl.ceil(tl.max(z, axis=1) * LOG2E))
    highest = tl.minimum(highest, HIGHEST)
    return highest, s * tl.exp2(m - highest) + tl.sum(exp(z, highest[:, None]), axis=1)


@triton.jit
def add_logits(z, zsum, class_weight, start_v, V, BLOCK_V: tl.constexpr):
    """Add a tile's logits, each times its class's weight, to ``zsum``."""
    offs_v = start_v + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    if class_weight is not None:
        c = tl.load(class_weight + offs_v, mask=mask_v, other=0.0)[None, :]
        return zsum + tl.sum(tl.where(c != 0.0, c * z, 0.0), axis=1)  # 0 * inf is 0 here
    else:
        return zsum + tl.sum(tl.where(mask_v[None, :], z, 0.0), axis=1)


@triton.jit
def add_statistics(z, m, others, moment, index, start_v, moments, best):
    """Update the maximum, ``others``, ``moment`` and the maximum's index by a tile."""
    m_tile = tl.max(z, axis=1)
    if best is not None:
        # A tile of NaN is never larger, so its place is not taken.
        index = tl.where(m_tile > m, start_v + tl.argmax(z, axis=1), index)
    m_new = tl.maximum(m, m_tile)
    m_safe = finite_max(m_new)
    a = tl.exp2((m - m_safe) * LOG2E)
    if moments is not None:
        empty = m_tile == float("-inf")
        d = z - finite_max(m_tile)[:, None]  # of -inf e is 0, and 0 * inf would be NaN
        d = tl.maximum(d, -1e30, propagate_nan=tl.PropagateNan.ALL)
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
    return m_new, others, moment, index


@triton.jit
def store_exponentials(
    z, slope, row, mask_n, exps, maxima, sums, best, z_label, factors, start_v, width, stride_ec,
    stride_split, GRAD_SCALE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store a tile's exponentials, and its maximum and sum of each row."""
    m_tile = tl.max(z, axis=1)
    own = None
    if z_label is not None:
        own = tl.load(z_label + row)
    e = exp(z, block_reference(m_tile, own)[:, None])
    at = start_v // BLOCK_V * stride_split + row
    tl.store(maxima + at, m_tile, mask=mask_n)
    tl.store(sums + at, tl.sum(e, axis=1), mask=mask_n)
    if best is not None:
        tl.store(best + at, start_v + place_of_largest(z, 1), mask=mask_n)
    g = e * slope
    if factors is not None:
        g *= tl.load(factors + row)[:, None]
    if GRAD_SCALE != 1.0:
        g *= GRAD_SCALE
    offs_v = start_v + tl.arange(0, BLOCK_V)
    mask = mask_n[:, None] & (offs_v < width)[None, :]
    out = exps + row[:, None] * stride_ec + offs_v[None, :]
    tl.store(out, g.to(exps.dtype.element_ty), mask=mask)


@triton.jit
def finish_sums(
    block, offs_n, mask_n, row, n, maxima, sums, z_label, block_losses, tickets, loss_sum, lse,
    stride_split, splits, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a row block, and add up the losses, if all others have arrived."""
    # Phase 2: the last split of this row block to arrive merges all of them. The barrier orders
    # the whole program's stores before the one thread that takes the ticket; .cg loads below
    # bypass L1, which may hold what another program has since overwritten.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + 1 + block, 1, sem="acq_rel", scope="gpu")
    if ticket != splits - 1:
        return
    tl.debug_barrier()  # no thread loads the other splits' sums before the last ticket is drawn
    m = tl.full((BLOCK_N,), float("-inf"), dtype=tl.float32)
    for i in range(0, splits):
        at = i * stride_split + offs_n
        m_i = tl.load(maxima + at, mask=mask_n, other=0.0, cache_modifier=".cg")
        m = tl.maximum(m, m_i)
    m_safe = finite_max(m)
    s = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for i in range(0, splits):
        at = i * stride_split + offs_n
        m_i = tl.load(maxima + at, mask=mask_n, other=0.0, cache_modifier=".cg")
        s_i = tl.load(sums + at, mask=mask_n, other=1.0, cache_modifier=".cg")
        s += s_i * tl.exp2(m_i - m_safe)
    z = tl.load(z_label + offs_n, mask=mask_n, other=0.0, cache_modifier=".cg")
    loss = token_loss(m_safe, s, z)
    if lse is not None:
        # The log-sum-exp is the loss and the label's logit. Where the loss is NaN, it may be inf or
        # -inf: `infinite` has no other use than to tell these from NaN.
        infinite = tl.maximum(s, z, propagate_nan=tl.PropagateNan.ALL)
        infinite = tl.where(s == 0.0, z, infinite)
        total = tl.where(loss == loss, (z + loss).to(tl.float32), infinite)
        tl.store(lse + row, total, mask=mask_n)
    tl.store(block_losses + block, tl.sum(tl.where(mask_n, loss, 0.0), axis=0))

    # Phase 3, of the last row block to arrive.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets, 1, sem="acq_rel", scope="gpu")
    if ticket != tl.cdiv(n, BLOCK_N) - 1:
        return
    tl.debug_barrier()
    total = tl.zeros((), dtype=tl.float64)
    for start in range(0, tl.cdiv(n, BLOCK_N), 128):
        offs = start + tl.arange(0, 128)
        mask = offs < tl.cdiv(n, BLOCK_N)
        some = tl.load(block_losses + offs, mask=mask, other=0.0, cache_modifier=".cg")
        total += tl.sum(some, axis=0)
    tl.store(loss_sum, total.to(tl.float32))


@triton.jit(
    do_not_specialize=[
        "N", "labels", "maxima", "sums", "best", "z_label", "factors", "stride_split",
    ]
)  # fmt: skip
def walk_kernel(
    hidden,  # (N, H), as weight with rows at multiples of 16 bytes
    weight,  # (V, H)
    hidden_tiles,  # tensor descriptor of hidden, or None
    weight_tiles,  # tensor descriptor of weight, or None
    bias,  # (V,) or None
    labels,  # (N,) int
    rows,  # (N,) int32: valid rows, from compact_kernel; None: all
    count,  # () int32: how many; or None
    maxima,  # (splits, N) fp32 out, the label's logit left out; SUMS: references
    sums,  # (splits, N) fp32 out: sums of the exponentials relative to maxima
    best,  # (splits, N) int32 out, or None: argmax. EXPONENTIALS: these three are (tiles, N)
    z_label,  # (N,) fp32 out; EXPONENTIALS: in, or None: every tile has references of its own
    factors,  # (N,) fp32 or None: of EXPONENTIALS, what a row's are multiplied by
    block_losses,  # (blocks,) fp64 scratch of SUMS: a row block's loss
    tickets,  # (1 + blocks,) int32, all 0: one that counts finished row blocks, one per row block
    loss_sum,  # () fp32 out
    lse,  # (N,) fp32 out at valid rows, or None
    class_weight,  # (V,) fp32 or None: of STATISTICS, weights of the sum of the logits
    temperature,  # (N,) fp32 or None: divisor of the logits of a row
    moments,  # (splits, N) fp32 out, or None: no entropy
    zsums,  # (splits, N) fp32 out, or None
    exps,  # (N, width) out of EXPONENTIALS, times the slope of their logits; 0 at the label
    width,  # V rounded up to a multiple of 16
    stride_ec,
    N,
    H,
    V,
    stride_hn,
    stride_wv,
    stride_split,  # of maxima, sums, best, moments and zsums
    scale,  # None for 1
    softcap,  # or None
    tiles_per_split,
    splits,
    EPILOGUE: tl.constexpr,
    GRAD_SCALE: tl.constexpr,  # a power of two on what is stored: small numbers underflow in fp16
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,  # divides H
    GROUP_N: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Walk over the tiles of one split for a block of rows, and store what is merged afterwards."""
    block, split = program_of_grid(tl.program_id(0), N, splits, BLOCK_N, GROUP_N)
    n = N
    if count is not None:
        n = tl.load(count)
        if block * BLOCK_N >= n:
            return
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < n
    row = tl.where(mask_n, offs_n, 0).to(tl.int64)
    if rows is not None:
        row = tl.load(rows + offs_n, mask=mask_n, other=0).to(tl.int64)
    # A bad label must not read out of bounds. In 32 bits comparing it costs half the registers.
    label = tl.load(labels + row, mask=mask_n, other=-1)
    label = tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)
    hidden_rows = hidden + row * stride_hn
    stride_split = tl.cast(stride_split, tl.int64)
    t_row = None
    if temperature is not None:
        t_row = tl.load(temperature + row, mask=mask_n, other=1.0)

    # Phase 1: the tiles of this split. Blocks of rows alone would not fill a GPU; and programs that
    # run at a time read the same rows of the head, from L2.
    begin = split * tiles_per_split * BLOCK_V
    end = tl.minimum(begin + tiles_per_split * BLOCK_V, V)
    m = tl.full((BLOCK_N,), NO_REFERENCE if EPILOGUE == SUMS else float("-inf"), dtype=tl.float32)
    s = tl.zeros((BLOCK_N,), dtype=tl.float32)
    moment = tl.zeros((BLOCK_N,), dtype=tl.float32)
    zsum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    index = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for start_v in tl.range(begin, end, BLOCK_V):
        z = logits_tile(
            hidden_rows, weight, hidden_tiles, block * BLOCK_N, weight_tiles, bias, start_v, H, V,
            stride_wv, scale, softcap, BLOCK_N, BLOCK_V, BLOCK_H, INPUT_PRECISION, UPCAST,
        )  # fmt: skip
        if t_row is not None:
            z /= t_row[:, None]
        if zsums is not None:
            zsum = add_logits(z, zsum, class_weight, start_v, V, BLOCK_V)
        if EPILOGUE == SUMS:
            m, s = add_sums(others_of_tile(z, label, start_v, V, BLOCK_V), m, s)
        elif EPILOGUE == STATISTICS:
            z = others_of_tile(z, label, start_v, V, BLOCK_V)
            m, s, moment, index = add_statistics(z, m, s, moment, index, start_v, moments, best)
        else:
            slope = logits_slope(z, scale, softcap)
            z = others_of_tile(z, label, start_v, V, BLOCK_V)
            store_exponentials(
                z, slope, row, mask_n, exps, maxima, sums, best, z_label, factors, start_v, width,
                stride_ec, stride_split, GRAD_SCALE, BLOCK_V,
            )  # fmt: skip
    # The label's logit is a product of its own: every tile would have to look for it otherwise.
    if EPILOGUE != EXPONENTIALS:
        at = split * stride_split + offs_n
        tl.store(maxima + at, m, mask=mask_n)
        tl.store(sums + at, s, mask=mask_n)
        if moments is not None:
            tl.store(moments + at, moment, mask=mask_n)
        if zsums is not None:
            tl.store(zsums + at, zsum, mask=mask_n)
        if best is not None:
            tl.store(best + at, index, mask=mask_n)
        if split == 0:
            z = label_logits(
                hidden_rows, weight, bias, label, H, stride_wv, scale, softcap, BLOCK_N, BLOCK_H
            )
            if EPILOGUE == STATISTICS:
                if t_row is not None:
                    z /= t_row
                z = tl.where(z != float("inf"), z, float("nan"))
            tl.store(z_label + offs_n, z, mask=mask_n)
        if EPILOGUE == SUMS:
            finish_sums(
                block, offs_n, mask_n, row, n, maxima, sums, z_label, block_losses, tickets,
                loss_sum, lse, stride_split, splits, BLOCK_N,
            )  # fmt: skip


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
    lse,  # fp64, or None
    entropy,  # where there are moments
    zmean,  # where there are zsums
    argmax,  # (N,) int64 out, where there is best
    highest,  # (N,) fp32 out, or None: the largest logit
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

    # The label is one more split, with one logit: that is its maximum, and `others` is 0.
    z = tl.load(z_labels + offs_n, mask=mask_n, other=0.0).to(tl.float64)
    none = tl.zeros((BLOCK_N,), dtype=tl.float64)
    label = tl.load(labels + row, mask=mask_n, other=0).to(tl.int64)
    if best is not None:
        tl.store(argmax + row, tl.where(z > m, label, index.to(tl.int64)), mask=mask_n)
    if highest is not None:
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
    bad = z != z  # a bad label, or a label's logit of +inf: tl.maximum may drop a NaN
    tl.store(nll + row, tl.where(bad, z, loss).to(tl.float32), mask=mask_n)
    if lse is not None:
        tl.store(lse + row, tl.where(bad, z, total), mask=mask_n)
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
