"""Kernel that makes the exponentials of a chunk in the epilogue of one product.

No float32 tile is in memory. The numbers are those of a product by cuBLAS and ``exp_tile_kernel``
after it, with maxima of smaller blocks; the tests compare the two.
"""

import triton
import triton.language as tl

from .tile import block_reference, exp, logits_slope, logits_tile, others_of_tile, program_of_grid


@triton.jit(do_not_specialize=["labels", "maxima", "sums", "z_label", "best", "N", "stride_block"])
def exp_gemm_kernel(
    hidden,  # (N, H)
    weight,  # (V, H)
    weight_tiles,  # tensor descriptor of weight, or None
    bias,  # (V,) or None
    labels,  # (N,) int
    exps,  # (N, V) out: exponentials times the slope of their logits, 0 at the label
    z_label,  # (N,) fp32, or None: every tile has references of its own
    maxima,  # (splits, rows) fp32 out, the label's logit left out
    sums,  # (splits, rows) fp32 out, the same, relative to the tile's references
    best,  # (splits, rows) int32 out, or None: where the maximum is
    N,
    H,
    V,
    width,  # V rounded up to a multiple of 16
    stride_hn,
    stride_wv,
    stride_ec,
    stride_block,  # of maxima, sums and best
    scale,  # None for 1
    softcap,  # or None
    AMPLIFY: tl.constexpr,  # a power of two on what is stored: small numbers underflow in fp16
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP_N: tl.constexpr,
    EVEN_H: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Exponentials, maxima and sums of every row and tile.

    The programs are persistent: each takes one tile after another, and the row blocks of a group
    are computed side by side.
    """
    splits = tl.cdiv(V, BLOCK_V)
    tiles = tl.cdiv(N, BLOCK_N) * splits
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        block, split = program_of_grid(tile, N, splits, BLOCK_N, GROUP_N)
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        row = tl.where(mask_n, offs_n, 0).to(tl.int64)
        start_v = split * BLOCK_V
        z = logits_tile(
            hidden + row * stride_hn, weight, weight_tiles, bias, start_v, H, V, stride_wv, scale,
            softcap, BLOCK_N, BLOCK_V, BLOCK_H, EVEN_H, INPUT_PRECISION, UPCAST,
        )  # fmt: skip
        label = tl.load(labels + row)
        label = tl.where((label >= 0) & (label < V), label, -1).to(tl.int32)
        slope = logits_slope(z, scale, softcap)
        z = others_of_tile(z, label, start_v, V, BLOCK_V)
        m = tl.max(z, axis=1)
        own = None
        if z_label is not None:
            own = tl.load(z_label + row)
        e = exp(z, block_reference(m, own)[:, None])
        of_block = split.to(tl.int64) * stride_block + row
        tl.store(maxima + of_block, m, mask=mask_n)
        tl.store(sums + of_block, tl.sum(e, axis=1), mask=mask_n)
        if best is not None:
            tl.store(best + of_block, start_v + tl.argmax(z, axis=1), mask=mask_n)
        g = e * slope
        if AMPLIFY != 1.0:
            g *= AMPLIFY
        offs_v = start_v + tl.arange(0, BLOCK_V)
        out = exps + row[:, None] * stride_ec + offs_v[None, :]
        mask = mask_n[:, None] & (offs_v < width)[None, :]
        tl.store(out, g.to(exps.dtype.element_ty), mask=mask)
