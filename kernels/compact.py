"""Kernel that finds the valid rows of a batch on the device: the host waits for nothing.

One program reads the labels, block by block. It is latency-bound, about a microsecond per 1024
labels, and saves the other kernels every ignored row. It also clears the tickets of the forward
kernel and writes the result of a batch without valid rows, so that its launch needs no memset.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N", "n_tickets"])
def compact_kernel(
    labels,  # (N,) int
    rows,  # (N,) int32 out: valid positions, in order, then the ignored ones from the end
    count,  # () int32 out: rows that are used, valid and of a weight other than 0
    n_valid,  # () int64 out: valid rows, whatever their weight; negative code of a bad label
    loss_sum,  # () fp32 out: set to 0
    tickets,  # (n_tickets,) int32 out, set to 0; or None
    token_weight,  # (N,) fp32 or None: rows of weight 0 are packed with the ignored ones
    N,
    V,
    ignore_index,
    n_tickets,
    BLOCK_N: tl.constexpr,
):
    """Pack the valid rows, count them, and look for the first label that is out of range."""
    found = tl.zeros((), dtype=tl.int32)
    if token_weight is not None:
        counted = tl.zeros((), dtype=tl.int32)
    # A bad label is reported as position * 2^32 + (value + 2^31); the minimum is the first one.
    none_bad = tl.full((), 0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
    first_bad = none_bad
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        y = tl.load(labels + offs_n, mask=mask_n, other=0).to(tl.int64)
        valid = mask_n & (y != ignore_index)
        left = mask_n & (y == ignore_index)
        used = valid
        if token_weight is not None:
            w = tl.load(token_weight + offs_n, mask=mask_n, other=0.0)
            used = valid & ((w != 0.0) | (y < 0) | (y >= V))
            left = mask_n & (used == 0)
            counted += tl.sum(valid.to(tl.int32), axis=0)
        rank = found + tl.cumsum(used.to(tl.int32), axis=0) - 1
        tl.store(rows + rank, offs_n, mask=used)
        ignored_before = offs_n - 1 - rank  # of an ignored row, whose rank is the last used one's
        tl.store(rows + (N - 1 - ignored_before), offs_n, mask=left)
        found += tl.sum(used.to(tl.int32), axis=0)

        clamped = tl.minimum(tl.maximum(y, -0x80000000), 0x7FFFFFFF)
        code = (offs_n.to(tl.int64) << 32) | (clamped + 0x80000000)
        bad = valid & ((y < 0) | (y >= V))
        first_bad = tl.minimum(first_bad, tl.min(tl.where(bad, code, none_bad), axis=0))

    tl.store(count, found)
    if token_weight is not None:
        found = counted
    tl.store(n_valid, tl.where(first_bad == none_bad, found.to(tl.int64), -1 - first_bad))
    tl.store(loss_sum, 0.0)
    if tickets is not None:
        for start in range(0, n_tickets, BLOCK_N):
            offs = start + tl.arange(0, BLOCK_N)
            tl.store(tickets + offs, tl.zeros((BLOCK_N,), dtype=tl.int32), mask=offs < n_tickets)
