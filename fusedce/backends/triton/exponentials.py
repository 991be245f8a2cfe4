"""A chunk's exponentials, and their reference and sum over the ranks of a sharded vocabulary.

They are made by products of cuBLAS with a kernel after each, or by one product of ours with an
epilogue; the architecture's row decides. Callers see no difference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from fusedce.backends.plan import multiple_of_16
from fusedce.backends.shards.collectives import all_gather
from fusedce.backends.triton import archs
from fusedce.backends.triton.launch import (
    CachedLaunch,
    aligned,
    has_options,
    operands,
    power_of_2,
    run,
)
from fusedce.backends.triton.products import Tiles
from fusedce.contract.problem import Problem
from fusedce.contract.task import Shard
from fusedce.kernels.exp_gemm import exp_gemm_kernel
from fusedce.kernels.shards import merge_shards_kernel, shard_sums_kernel
from fusedce.kernels.softmax_grad import exp_tile_kernel, label_logit_kernel


def gemm_blocks(problem: Problem) -> archs.Blocks | None:
    """Blocks of the one GEMM that makes the exponentials; ``None`` where cuBLAS makes tiles."""
    weight = problem.weight
    walks = archs.architecture(weight.device).walks(weight.element_size())
    wide = aligned(weight) and weight.shape[1] * weight.element_size() % 16 == 0
    if not wide or not archs.by_one_gemm(walks, weight.shape[1]):
        return None  # cuBLAS reads other rows better
    return walks.gemm_with_options if has_options(problem) else walks.gemm


class Exponentials:
    """Exponentials of one chunk after another, of at most ``C`` tokens, in the same buffers.

    A row of ``maxima`` and ``sums``, one a block, is as long as the chunk at hand.
    """

    def __init__(
        self,
        problem: Problem,
        C: int,
        tiles: Tiles,
        *,
        pointwise: dict[str, Any],  # bias padded
        out: Tensor,  # (C, V) to fill, rows padded
        amplify: float,  # a factor
        own_references: bool,  # of every block, not the labels' logits
    ) -> None:
        weight = tiles.weight
        self.arch = archs.architecture(weight.device)
        self.problem, self.tiles, self.pointwise = problem, tiles, pointwise
        self.out, self.amplify, self.own_references = out, amplify, own_references
        self.gemm = gemm_blocks(problem)
        self.block = tiles.block if self.gemm is None else self.gemm.BLOCK_V
        self.blocks = -(-weight.shape[0] // self.block)
        sizes = (self.blocks * C, self.blocks * C, C)
        of_rows = torch.empty(sum(sizes), dtype=torch.float32, device=weight.device)
        self.maxima, self.sums, self.z_label = of_rows.split_with_sizes(sizes)

    def fill(
        self, h: Tensor, y: Tensor, best: Tensor | None, z_label: Tensor | None = None
    ) -> None:
        """Compute logits and exponentials of a chunk from ``h (C, H)`` and its labels.

        ``z_label (C,)`` fp32: the labels' logits, where they are known.
        """
        C = h.shape[0]
        if z_label is None:
            label_logits(h, self.tiles.weight, y, self.z_label, self.pointwise)
        else:
            self.z_label = z_label
        shared = {
            "exps": self.out,
            "labels": y,
            "z_label": None if self.own_references else self.z_label,
            "maxima": self.maxima,
            "sums": self.sums,
            "best": best,
            "stride_ec": self.out.stride(0),
            "stride_block": C,
            "AMPLIFY": self.amplify,
        }
        if self.gemm is not None:
            self._by_gemm(h, self.gemm, shared)
        else:
            self._by_tiles(h, shared)

    def clear(self) -> None:
        """Fill the statistics as for a weight without rows."""
        self.maxima.fill_(-math.inf)
        self.sums.zero_()
        self.out.zero_()

    def _by_tiles(self, h: Tensor, shared: dict[str, Any]) -> None:
        """Make tiles of products by cuBLAS, and launch a kernel after each."""
        tiles, block = self.tiles, self.block
        launch = CachedLaunch(
            exp_tile_kernel,
            products=tiles.products,
            most=tiles.most,
            V=tiles.weight.shape[0],
            BLOCK_V=block,
            num_warps=self.arch.exp_warps,
            **shared,
            **self.pointwise,
        )
        for first, rows, begin, T, _ in tiles.logits(h):
            launch((rows, -(-T // block), 1), first=first, first_block=begin // block)

    def _by_gemm(self, h: Tensor, blocks: archs.Blocks, shared: dict[str, Any]) -> None:
        """Launch one product, whose epilogue makes the exponentials."""
        problem = self.problem._replace(hidden=h, weight=self.tiles.weight, labels=shared["labels"])
        walk = operands(problem, blocks) | self.pointwise
        tiles = -(-len(h) // blocks.BLOCK_N) * walk["splits"]
        for name in ("tiles_per_split", "splits"):
            del walk[name]
        run(
            exp_gemm_kernel,
            (min(tiles, archs.processors(h.device)),),
            width=multiple_of_16(walk["V"]),
            **(walk | shared),
        )


def label_logits(
    h: Tensor,  # (C, H), or (N, H) with rows
    weight: Tensor,  # (V, H)
    y: Tensor,  # (C,) int
    z_label: Tensor,  # (C,) fp32 to fill; NaN where y is no class
    pointwise: dict[str, Any],
    rows: Tensor | None = None,  # (C,) int32: the row of h of each label
) -> None:
    """Compute the logits of the labels."""
    (V, H), C = weight.shape, y.shape[0]
    block_c, block_h = archs.architecture(h.device).label_block
    run(
        label_logit_kernel,
        (-(-C // block_c),),
        hidden=h,
        weight=weight,
        labels=y,
        rows=rows,
        z_label=z_label,
        C=C,
        H=H,
        V=V,
        stride_hn=h.stride(0),
        stride_wv=weight.stride(0),
        BLOCK_C=block_c,
        BLOCK_H=min(power_of_2(H), block_h),
        num_warps=4,
        **pointwise,
    )


class Peers:
    """The other ranks of a shard, and the labels' logits of the rows that count."""

    def __init__(
        self,
        shard: Shard,
        y: Tensor,  # (n,) int labels among all classes
        z_label: Tensor,  # (n,) fp32 their logits, NaN for bad labels
        *,
        empty: bool,  # no class lies here
    ) -> None:
        self.shard, self.y, self.z_label, self.empty = shard, y, z_label, empty

    def merged(
        self,
        exponentials: Exponentials,  # of this rank's classes, to fill
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,) labels as rows here; -1 for those elsewhere
        first: int,  # number of the chunk's first row
        losses: Tensor,  # (C,) fp32 to fill
        lse: Tensor | None,  # (C,) fp32 to fill
        best: Tensor | None,  # (blocks * C,) int32 to overwrite; needed for argmax
        argmax: Tensor | None,  # (N,) int64 to fill at `rows`
        rows: Tensor,  # (N,) int32
    ) -> Tensor:
        """``(2, C)``: reference and sum of the rows' exponentials over all ranks.

        Fills ``exponentials`` with those of this rank's classes; its ``z_label`` becomes that of
        all ranks, which the gradient kernel reads next. Fills ``losses``, and ``lse`` and
        ``argmax`` where they are given, with values over all ranks.

        One all-gather of 2 float32 a row, 4 with argmax.
        """
        C = len(h)
        z_label = self.z_label[first : first + C]
        if self.empty:
            exponentials.clear()
            exponentials.z_label = z_label
            if best is not None:
                best.zero_()
        else:
            exponentials.fill(h, y, best, z_label)
        planes, block = 2 if best is None else 4, archs.architecture(h.device).merge_block_n
        mine = z_label.new_empty(planes * C)
        run(
            shard_sums_kernel,
            (triton.cdiv(C, block),),
            maxima=exponentials.maxima,
            sums=exponentials.sums,
            z_label=z_label,
            best=best,
            table=mine,
            C=C,
            blocks=exponentials.blocks,
            first_class=self.shard.first,
            OWN_REFERENCES=exponentials.own_references,
            BLOCK_C=block,
            num_warps=4,
        )
        table = all_gather(mine, self.shard.group)
        return merge(table, z_label, self.y, losses, lse, argmax, rows, first, self.shard)


def merge(
    table: Tensor,  # (ranks * planes * C,) fp32
    z_label: Tensor,  # (C,) fp32
    y: Tensor,  # (n,) int labels among all classes
    losses: Tensor,  # (C,) fp32 to fill
    lse: Tensor | None,  # (C,) fp32 to fill
    argmax: Tensor | None,  # (N,) int64 to fill at rows
    rows: Tensor | None,  # (N,) int32
    first: int,
    shard: Shard,
) -> Tensor:
    """``(2, C)`` reference and sum over all ranks; the losses, the same bits on each of them."""
    C, ranks = len(z_label), dist.get_world_size(shard.group)
    merged = torch.empty(2 * C, dtype=torch.float32, device=table.device)
    block = archs.architecture(table.device).merge_block_n
    run(
        merge_shards_kernel,
        (triton.cdiv(C, block),),
        table=table,
        z_label=z_label,
        labels=None if argmax is None else y[first : first + C],
        merged=merged,
        losses=losses,
        lse=lse,
        argmax=argmax,
        rows=None if argmax is None else rows,
        C=C,
        ranks=ranks,
        first=first,
        PLANES=len(table) // (ranks * C),
        BLOCK_C=block,
        num_warps=4,
    )
    return merged
