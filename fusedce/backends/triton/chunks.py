"""A chunk's logits as exponentials, their gradient, and the options behind both.

The exponentials are made by products of cuBLAS with a kernel after each, or by one product of ours
with an epilogue; the architecture's row decides. Callers see no difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.backends.plan import multiple_of_16
from fusedce.backends.triton import archs
from fusedce.backends.triton.head_gradients import ChunkGradient, Head
from fusedce.backends.triton.launch import (
    CachedLaunch,
    Rows,
    aligned,
    has_options,
    power_of_2,
    run,
    span,
    walk,
)
from fusedce.backends.triton.products import Tiles
from fusedce.contract.objective import slopes, token_losses
from fusedce.contract.problem import Problem, Wanted
from fusedce.kernels.softmax_grad import (
    exp_tile_kernel,
    label_logit_kernel,
    softmax_rows_kernel,
)
from fusedce.kernels.walk import EXPONENTIALS


def gemm_blocks(problem: Problem, wanted: Wanted) -> archs.Blocks | None:
    """Blocks of the one GEMM that makes the exponentials; ``None`` where cuBLAS makes tiles."""
    weight = problem.weight
    (V, H), walks = weight.shape, archs.architecture(weight.device).walks(weight.element_size())
    # The likeliest class, and stores that are not aligned, take registers as options do.
    options = has_options(problem) or wanted.argmax or V % 16
    blocks = walks.gemm_with_options if options else walks.gemm
    if blocks is None or weight.stride(1) != 1 or not aligned(weight) or H % blocks.BLOCK_H:
        return None  # cuBLAS reads other rows better
    return blocks if archs.by_one_gemm(walks, H) else None


class Chunks(Head):
    """The logits of one chunk after another, of at most ``C`` tokens, in the same buffers.

    A row of ``maxima`` and ``sums``, one a block of classes, is as long as the chunk at hand.
    """

    def __init__(self, problem: Problem, C: int, wanted: Wanted) -> None:
        super().__init__(problem)
        weight, dtype, device = self.weight, self.weight.dtype, self.weight.device
        V, H = weight.shape
        self.problem = problem
        self.gemm = gemm_blocks(problem, wanted)
        self.tiles = Tiles(weight, C, self.arch, of_logits=self.gemm is None)
        # Rows start at multiples of what the kernels and the products that read them move at once.
        self.width = multiple_of_16(V)
        self.exps = torch.empty(C, self.width, dtype=dtype, device=device)
        # Every block has a reference of its own then, not the labels' logits.
        self.normalise = dtype == torch.float16
        self.block = self.tiles.block if self.gemm is None else self.gemm.BLOCK_V
        self.blocks = -(-V // self.block)
        sizes = (self.blocks * C, self.blocks * C, C, C, C)
        of_rows = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        self.maxima, self.sums, *rest = of_rows.split_with_sizes(sizes)
        self.z_label, self.entries, self.factors = rest
        self.scaled = None
        if wanted.weight and not self.normalise:
            self.scaled = torch.empty(C, H, dtype=dtype, device=device)

    def gradient(
        self,
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,)
        of: Losses,  # to fill
        first: int,  # number of the chunk's first row
    ) -> ChunkGradient:
        """Compute the chunk's logits, losses and gradient."""
        (V, H), C = self.weight.shape, h.shape[0]
        losses = span(of.losses, first, first + C)
        terms = lse = None
        if of.terms is not None and of.lse is not None:
            terms = span(of.terms, first, first + C, dim=1)
            lse = span(of.lse, first, first + C)
        best = None if of.argmax is None else torch.empty_like(self.sums, dtype=torch.int32)
        self.label_logits(h, y)
        self.exponentials(h, y, best)
        gradient = ChunkGradient(
            logits=span(span(self.exps, 0, C), 0, V, dim=1),
            factors=None if self.normalise and terms is None else span(self.factors, 0, C),
            labels=y,
            entries=span(self.entries, 0, C),
            scaled=None if self.scaled is None else span(self.scaled, 0, C),
        )
        run(
            softmax_rows_kernel,
            (C,),
            exps=self.exps,
            hidden=h,
            scaled=gradient.scaled,
            labels=y,
            maxima=self.maxima,
            sums=self.sums,
            z_label=self.z_label,
            losses=losses,
            entries=gradient.entries,
            count=of.packed.used,
            terms=terms,
            lse=lse,
            row_factors=gradient.factors,
            best=best,
            argmax=None if best is None else of.argmax,
            rows=None if best is None else of.packed.rows,
            first=first,
            H=H,
            V=V,
            width=self.width,
            stride_hn=h.stride(0),
            stride_row=C,
            stride_terms=0 if terms is None else terms.stride(0),
            scale=self.pointwise["scale"],
            softcap=self.pointwise["softcap"],
            AMPLIFY=self.amplify,
            NORMALISE=self.normalise,
            BLOCKS=power_of_2(self.blocks),
            BLOCK_V=self.block,
            BLOCK_H=min(power_of_2(H), 1024),
            num_warps=self.arch.exp_warps,
        )
        return gradient

    def label_logits(self, h: Tensor, y: Tensor) -> None:
        """Compute the logits of the labels; NaN where ``y`` is no class."""
        (V, H), C = self.weight.shape, y.shape[0]
        block_c, block_h = self.arch.label_block
        run(
            label_logit_kernel,
            (-(-C // block_c),),
            hidden=h,
            weight=self.weight,
            labels=y,
            z_label=self.z_label,
            C=C,
            H=H,
            V=V,
            stride_hn=h.stride(0),
            stride_wv=self.weight.stride(0),
            BLOCK_C=block_c,
            BLOCK_H=min(power_of_2(H), block_h),
            num_warps=4,
            **self.pointwise,
        )

    def exponentials(self, h: Tensor, y: Tensor, best: Tensor | None) -> None:
        """Fill the exponentials, relative to the labels' logits, and their statistics.

        ``best (blocks * C,)`` int32 is filled, too.
        """
        shared: dict[str, Any] = self.pointwise | {
            "exps": self.exps,
            "labels": y,
            "z_label": None if self.normalise else self.z_label,
            "maxima": self.maxima,
            "sums": self.sums,
            "best": best,
            "stride_ec": self.exps.stride(0),
            "AMPLIFY": self.amplify,
        }
        C, block = h.shape[0], self.block
        if self.gemm is not None:
            problem = self.problem.but(hidden=h, weight=self.weight)
            walk(problem, self.gemm, EXPONENTIALS, stride_split=C, width=self.width, **shared)
            return
        launch = CachedLaunch(
            exp_tile_kernel,
            products=self.tiles.products,
            most=self.tiles.most,
            V=self.weight.shape[0],
            stride_block=C,
            BLOCK_V=block,
            num_warps=self.arch.exp_warps,
            **shared,
        )
        for first, rows, begin, T, _ in self.tiles.logits(h):
            launch((rows, -(-T // block), 1), first=first, first_block=begin // block)

    def hidden_gradient(
        self,
        gradient: ChunkGradient,
        rows: Tensor,  # (N,) int32
        first: int,
        d_hidden: Tensor,  # (N, H) to fill at rows[first : first + C]
        outer: float,  # a factor
    ) -> None:
        """Write the chunk's rows of ``outer * gradient @ weight`` into ``d_hidden``."""
        g, products = gradient, self.tiles.products
        C, H = len(g.labels), d_hidden.shape[1]
        launch = self.finish_hidden(
            products, g.labels, g.entries, g.factors, rows, d_hidden, first, C, outer
        )
        for begin, n in self.tiles.of_hidden(g.logits):
            launch((n, -(-H // 1024), 1), begin=begin)


class Losses:
    """Losses of the rows that are computed, (n,) each, and the options behind them."""

    def __init__(
        self,
        problem: Problem,  # whose token weights are the rows'
        y: Tensor,  # (n,) labels
        packed: Rows,
        argmax: Tensor | None,  # (N,) int64 to fill at `packed.rows`
        chunks: Chunks,
    ) -> None:
        n, V, device = len(y), len(chunks.weight), y.device
        self.problem, self.packed, self.argmax = problem, packed, argmax
        self.losses = torch.empty(n, dtype=torch.float32, device=device)
        self.terms = self.lse = None
        if problem.plain():
            return
        self.y = y.long().clamp(0, V - 1)
        zero = torch.zeros(n, dtype=torch.float64, device=device)
        self.lse = torch.empty_like(self.losses)  # the kernel fills it
        at_0, at_1 = (slopes(problem, self.y, x) for x in (zero, zero + 1))
        terms = torch.stack([zero + at_0.nll, zero + at_0.lse, at_1.lse - at_0.lse + zero])
        self.terms = terms.float()  # (3, n): derivatives by nll, by lse, and of the latter by lse

    def total(self, padding: Tensor | None) -> Tensor:
        """``()`` fp32 sum of the losses; of rows that are ``padding (n,)`` they are 0."""
        losses = self.losses
        if self.lse is not None:  # of nll and lse, which the kernel has filled
            nll, lse = losses.double(), self.lse.double()
            losses = token_losses(self.problem, self.y, nll, lse).float()
            losses = losses if padding is None else losses.masked_fill_(padding, 0)
        return losses.sum(dtype=torch.float64).float()
