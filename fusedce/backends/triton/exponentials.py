"""A chunk's exponentials, and a reference and sum of each block.

They are made by products of cuBLAS with a kernel after each, or by one product of ours with an
epilogue; the architecture's row decides. Callers see no difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.backends.plan import multiple_of_16
from fusedce.backends.triton import archs
from fusedce.backends.triton.launch import (
    CachedLaunch,
    alignment,
    has_options,
    operands,
    power_of_2,
)
from fusedce.backends.triton.products import Tiles
from fusedce.contract.problem import Problem
from fusedce.kernels.exp_gemm import exp_gemm_kernel
from fusedce.kernels.softmax_grad import exp_tile_kernel, label_logit_kernel


def gemm_blocks(problem: Problem) -> archs.Blocks | None:
    """Blocks of the one GEMM that makes the exponentials; ``None`` where cuBLAS makes tiles."""
    weight = problem.weight
    walks = archs.architecture(weight.device).walks(weight.element_size())
    if not archs.by_one_gemm(walks, weight.shape[1]):
        return None
    if alignment(problem) == 1:
        return walks.unaligned
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

    def fill(self, h: Tensor, y: Tensor, best: Tensor | None) -> None:
        """Compute logits and exponentials of a chunk from ``h (C, H)`` and its labels."""
        C = h.shape[0]
        label_logits(h, self.tiles.weight, y, self.z_label, self.pointwise)
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
        walk = operands(problem, blocks, alignment(problem)) | self.pointwise
        tiles = -(-len(h) // blocks.BLOCK_N) * walk["splits"]
        for name in ("tiles_per_split", "splits"):
            del walk[name]
        exp_gemm_kernel[(min(tiles, archs.processors(h.device)),)](
            width=multiple_of_16(walk["V"]), **(walk | shared)
        )


def label_logits(
    h: Tensor,  # (C, H)
    weight: Tensor,  # (V, H)
    y: Tensor,  # (C,) int
    z_label: Tensor,  # (C,) fp32 to fill; NaN where y is no class
    pointwise: dict[str, Any],
) -> None:
    """Compute the logits of the labels."""
    (V, H), C = weight.shape, y.shape[0]
    block_c, block_h = archs.architecture(h.device).label_block
    label_logit_kernel[(-(-C // block_c),)](
        hidden=h,
        weight=weight,
        labels=y,
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
