"""A chunk's exponentials, and their reference and sum over the ranks of a sharded vocabulary.

They are made by products of cuBLAS with a kernel after each, or by one product of ours with an
epilogue; the architecture's row decides. Callers see no difference.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedce.backends.plan import multiple_of_16
from fusedce.backends.shards.merge import nll_and_lse, of_ranks
from fusedce.backends.triton import archs
from fusedce.backends.triton.launch import (
    CachedLaunch,
    aligned,
    has_options,
    power_of_2,
    run,
    walk,
)
from fusedce.backends.triton.products import Tiles
from fusedce.contract.problem import Problem
from fusedce.contract.task import Shard
from fusedce.kernels.softmax_grad import exp_tile_kernel, label_logit_kernel
from fusedce.kernels.tile import LOG2E
from fusedce.kernels.walk import EXPONENTIALS


def gemm_blocks(problem: Problem) -> archs.Blocks | None:
    """Blocks of the one GEMM that makes the exponentials; ``None`` where cuBLAS makes tiles."""
    weight = problem.weight
    walks = archs.architecture(weight.device).walks(weight.element_size())
    blocks = walks.gemm_with_options if has_options(problem) else walks.gemm
    H = weight.shape[1]
    if blocks is None or weight.stride(1) != 1 or not aligned(weight) or H % blocks.BLOCK_H:
        return None  # cuBLAS reads other rows better
    return blocks if archs.by_one_gemm(walks, H) else None


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
        """Launch one walk, whose epilogue makes the exponentials."""
        problem = self.problem.but(hidden=h, weight=self.tiles.weight, labels=shared["labels"])
        stride = shared.pop("stride_block")
        width = multiple_of_16(len(self.tiles.weight))
        walk(
            problem, blocks, EXPONENTIALS, stride_split=stride, width=width,
            **(shared | self.pointwise),
        )  # fmt: skip


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
        y: Tensor,  # (n,) int64 labels among all classes
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
        rows: slice,  # the chunk's among those that count
        losses: Tensor,  # (C,) fp32 to fill
        lse: Tensor | None,  # (C,) fp32 to fill
        argmax: Tensor | None,  # (C,) int64 to fill
    ) -> Tensor:
        """``(2, C)`` fp32: reference and sum of the rows' exponentials over all ranks.

        ``exponentials.z_label`` becomes that of all ranks, which the gradient kernel reads next.
        One all-gather of a float64 a row, 3 with argmax.
        """
        C, z_label = len(h), self.z_label[rows]
        maxima, sums = (
            x[: exponentials.blocks * C].view(-1, C)
            for x in (exponentials.maxima, exponentials.sums)
        )
        best = None if argmax is None else torch.zeros_like(maxima, dtype=torch.int32)
        if self.empty:
            exponentials.clear()
            exponentials.z_label = z_label
        else:
            exponentials.fill(h, y, best, z_label)
        own = None if exponentials.own_references else z_label
        references = block_references(maxima, own).double() / LOG2E.value
        mine = [(sums.double().log() + references).logsumexp(0)]
        if best is not None:
            top, block = maxima.max(0, keepdim=True)
            mine += [top[0], best.gather(0, block)[0] + self.shard.first]
        of_all, *more = of_ranks(mine, self.shard)
        others, z = of_all.logsumexp(0), z_label.double()
        nll, log_sum = nll_and_lse(others, z[None], z == z)
        losses.copy_(nll)
        if lse is not None:
            lse.copy_(log_sum)
        if argmax is not None:
            tops, classes = more
            top, rank = tops.max(0, keepdim=True)
            likeliest = classes.gather(0, rank)[0].long()
            argmax.copy_(torch.where(z > top[0], self.y[rows], likeliest))
        reference = (torch.fmax(others, z) * LOG2E.value).float()
        reference = reference.nan_to_num(0, 0, 0)  # finite, as a kernel's
        return torch.stack(
            [reference, torch.exp2(others * LOG2E.value - reference.double()).float()]
        )


def block_references(maxima: Tensor, z_label: Tensor | None) -> Tensor:
    """References of blocks' sums, as the kernels take them (:func:`tile.block_reference`)."""
    own = maxima.nan_to_num(neginf=0.0, posinf=math.inf, nan=math.nan) * LOG2E.value
    if z_label is None:
        return own
    own, label = own.ceil(), (z_label * LOG2E.value).floor()
    return torch.where(own > label + 30.0, own, label)
