"""A chunk of logits of the training pass, turned into its gradient and that of the hidden state.

The seam is :meth:`Chunks.gradient`: exponentials are made by products of cuBLAS with a kernel after
each, or by one product of ours; the architecture's row says by which. What follows knows nothing of
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.triton import archs
from fusedce.backends.triton.operands import (
    has_options,
    multiple,
    operands,
    padded,
    pointwise,
    power_of_2,
)
from fusedce.backends.triton.products import mm
from fusedce.backends.triton.relaunch import Relaunch
from fusedce.backends.triton.row_factors import ChunkFactors
from fusedce.contract.problem import Problem
from fusedce.kernels.exp_gemm import exp_gemm_kernel
from fusedce.kernels.softmax_grad import exp_tile_kernel, hidden_grad_kernel, softmax_grad_kernel
from fusedce.kernels.token_grad import token_grad_kernel


class Tile(NamedTuple):
    """Float32 products of some rows of a chunk with some rows of weight."""

    first: int  # of the chunk's rows
    rows: int
    begin: int  # its first vocabulary entry
    T: int
    products: Tensor  # (rows, T), rows padded


class Chunks:
    """The logits of one chunk after another, in the same buffers."""

    def __init__(self, problem: Problem, C: int) -> None:
        weight, bias = problem.weight, problem.bias
        V, H = weight.shape
        device = weight.device
        self.arch = archs.architecture(device)
        self.weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.pointwise = pointwise(problem) | {"bias": None if bias is None else padded(bias)}
        self.amplify = amplification(weight.dtype, problem.logit_scale)
        self.block = min(power_of_2(V), self.arch.exp_block_v)
        self.blocks = -(-V // self.block)
        self.tile = self.arch.tile_shape(C, V, H, self.block)
        rows, most = self.tile
        self.step = max(self.arch.tile_elements[0] // H // 128 * 128, 128)  # rows of d_hidden
        self.room = torch.empty(  # of float32 products
            max(rows * multiple(most), min(self.step, C) * H), dtype=torch.float32, device=device
        )
        # Rows start at multiples of what the kernels and the products that read them move at once.
        self.grads = torch.empty(C, multiple(V), dtype=weight.dtype, device=device)
        self.exps = self.grads
        if problem.label_smoothing and problem.softcap is None:
            # What smoothing leaves of a probability is rounded, not the probability itself.
            self.exps = torch.empty(C, multiple(V), dtype=torch.float32, device=device)
        walks = self.arch.walks(weight.element_size())
        self.problem = problem
        self.gemm = None
        if walks.by_gemm:
            self.gemm = walks.gemm_with_options if has_options(problem) else walks.gemm
        self.exp_block = self.block if self.gemm is None else self.gemm.BLOCK_V
        of_blocks = (2, -(-V // self.exp_block), C)
        self.maxima, self.sums = torch.empty(of_blocks, device=device).unbind()
        self.z_label = torch.empty(C, dtype=torch.float32, device=device)
        self.residuals = torch.empty(C, dtype=torch.float32, device=device)

    def tiles(self, h: Tensor) -> Iterator[Tile]:
        """Products of ``h (C, H)`` and weight, tile by tile, in one buffer."""
        V, C, (most_rows, most) = self.weight.shape[0], len(h), self.tile
        columns, products = self.weight.t().split(most, 1), self.room
        some_rows = [(0, C, h)]
        if most_rows < C:
            some_rows = [
                (number * most_rows, len(some), some)
                for number, some in enumerate(h.split(most_rows))
            ]
        shape = (0, 0)
        for begin, w in zip(range(0, V, most), columns, strict=True):
            T = w.shape[1]
            for first, rows, some in some_rows:
                if shape != (rows, T):
                    shape = (rows, T)
                    products = self.room.as_strided(shape, (multiple(T), 1))
                mm(some, w, products)
                yield Tile(first, rows, begin, T, products)

    def gradient(
        self,
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,)
        losses: Tensor,  # (C,) fp32 to fill
        count: Tensor,  # () int32: valid rows
        first: int,  # number of the chunk's first row
        factors: ChunkFactors | None,
        argmax: Tensor | None,  # (N,) int64 to fill at `rows`
        rows: Tensor,  # (N,) int32
    ) -> Tensor:
        """``(C, V)``: ``amplify`` times the derivative of the losses by ``h @ weight.T``.

        With ``factors``, each row still waits for its factor ``factors.rows``.
        """
        V, C = self.weight.shape[0], len(h)
        exps, grads, blocks = self.exps, self.grads, self.sums.shape[0]
        best = None if argmax is None else torch.empty_like(self.sums, dtype=torch.int32)
        make = self.exps_of_gemm if self.gemm is not None else self.exps_of_tiles
        make(h, y, exps, best)
        terms = None if factors is None else factors.terms
        softmax_grad_kernel[(C, self.blocks)](
            exps=exps,
            grads=grads,
            class_weight=None if factors is None else factors.class_weight,
            labels=y,
            maxima=self.maxima,
            sums=self.sums,
            z_label=self.z_label,
            losses=losses,
            residuals=self.residuals,
            count=count,
            terms=terms,
            shifts=None if terms is None or self.exps is self.grads else terms[3],
            lse=None if factors is None else factors.lse,
            row_factors=None if factors is None else factors.rows,
            best=best,
            argmax=argmax,
            rows=None if argmax is None else rows,
            first=first,
            V=V,
            width=multiple(V),
            blocks=blocks,
            stride_ec=exps.stride(0),
            stride_gc=grads.stride(0),
            stride_block=self.sums.stride(0),
            stride_terms=C,
            scale=self.pointwise["scale"],
            softcap=self.pointwise["softcap"],
            BLOCKS=power_of_2(blocks),
            EXP_BLOCK_V=self.exp_block,
            AMPLIFY=self.amplify,
            BLOCK_V=self.block,
            num_warps=self.arch.exp_warps,
        )
        return grads[:C, :V]

    def exps_of_tiles(self, h: Tensor, y: Tensor, exps: Tensor, best: Tensor | None) -> None:
        """Exponentials, their maxima and sums: products by cuBLAS, a kernel after each."""
        launch = Relaunch(
            exp_tile_kernel,
            exps=exps,
            labels=y,
            maxima=self.maxima,
            sums=self.sums,
            z_label=self.z_label,
            best=best,
            stride_ec=exps.stride(0),
            stride_block=self.sums.stride(0),
            AMPLIFY=self.amplify,
            BLOCK_V=self.block,
            num_warps=self.arch.exp_warps,
            **self.pointwise,
        )
        for first, rows, begin, T, products in self.tiles(h):
            width = multiple(T)
            launch(
                (rows, -(-T // self.block), 1),
                products=products,
                first=first,
                first_block=begin // self.block,
                T=T,
                width=width,
                stride_pc=width,
            )

    def exps_of_gemm(self, h: Tensor, y: Tensor, exps: Tensor, best: Tensor | None) -> None:
        """The same by one product whose epilogue makes them."""
        blocks = self.gemm
        assert blocks is not None
        problem = self.problem._replace(hidden=h, weight=self.weight, labels=y)
        shared = operands(problem, blocks) | self.pointwise
        tiles = -(-len(h) // blocks.BLOCK_N) * shared["splits"]
        for name in ("tiles_per_split", "splits"):
            del shared[name]
        exp_gemm_kernel[(min(tiles, archs.processors(h.device)),)](
            exps=exps,
            maxima=self.maxima,
            sums=self.sums,
            z_label=self.z_label,
            best=best,
            width=multiple(shared["V"]),
            stride_ec=exps.stride(0),
            stride_block=self.sums.stride(0),
            AMPLIFY=self.amplify,
            **shared,
        )

    def known_gradient(
        self,
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,)
        lse: Tensor,  # (C,) fp32, as all down to at_label
        temperature: Tensor | None,  # divisor of the logits in p
        alpha: Tensor,  # g = p * (alpha - beta * log p) + gamma * class_weight
        beta: Tensor | None,
        gamma: Tensor | None,
        at_label: Tensor,  # g at the label
        class_weight: Tensor | None,  # (V,) fp32, padded
        count: Tensor,  # () int32: used rows
        first: int,  # number of the chunk's first row
    ) -> Tensor:
        """``(C, V)``: ``amplify`` times ``g``, times the derivative of z by ``h @ weight.T``."""
        V, C = self.weight.shape[0], len(h)
        grads = self.grads[:C]
        self.residuals.zero_()
        bias = self.pointwise["bias"]
        for first_row, n_rows, begin, T, products in self.tiles(h):
            rows = slice(first_row, first_row + n_rows)
            token_grad_kernel[(n_rows, -(-T // self.block))](
                products=products,
                grads=grads[rows, begin:],
                class_weight=None if class_weight is None else class_weight[begin:],
                labels=y[rows],
                lse=lse[rows],
                temperature=None if temperature is None else temperature[rows],
                alpha=alpha[rows],
                beta=None if beta is None else beta[rows],
                gamma=None if gamma is None else gamma[rows],
                at_label=at_label[rows],
                residuals=self.residuals[rows],
                count=count,
                first=first + first_row,
                begin=begin,
                T=T,
                width=multiple(T),
                stride_pc=products.stride(0),
                stride_gc=grads.stride(0),
                bias=None if bias is None else bias[begin:],
                scale=self.pointwise["scale"],
                softcap=self.pointwise["softcap"],
                AMPLIFY=self.amplify,
                BLOCK_V=self.block,
                num_warps=self.arch.exp_warps,
            )
        return grads[:, :V]

    def hidden_gradient(
        self,
        g: Tensor,  # (C, V), from `gradient`
        y: Tensor,  # (C,)
        rows: Tensor,  # (N,) int32
        first: int,
        d_hidden: Tensor,  # (N, H) to fill at rows[first : first + C]
        factors: Tensor | None,  # (C,) fp32: of the rows of g
        outer: float,  # of all of them
    ) -> None:
        V, H = self.weight.shape
        C, step = len(g), self.step
        block = min(power_of_2(H), 1024)
        launch = Relaunch(
            hidden_grad_kernel,
            products=self.room,
            weight=self.weight,
            d_hidden=d_hidden,
            H=H,
            V=V,
            stride_wv=self.weight.stride(0),
            stride_dn=d_hidden.stride(0),
            factor=outer,
            AMPLIFY=self.amplify,
            BLOCK_H=block,
            num_warps=self.arch.exp_warps,
        )
        for begin in range(0, C, step):
            n = min(step, C - begin)
            mm(g[begin : begin + n], self.weight, self.room.as_strided((n, H), (H, 1)))
            launch(
                (n, -(-H // block), 1),
                labels=y[begin:],
                residuals=self.residuals[begin:],
                row_factors=None if factors is None else factors[begin:],
                rows=rows[first + begin :],
            )


def amplification(dtype: torch.dtype, logit_scale: float) -> float:
    """The power of two by which the gradient of the logits, at most |logit_scale|, is stored.

    A probability below 6e-5 loses bits in float16 and one below 6e-8 is lost, and a vocabulary has
    little else. bfloat16 and float32 have the range.
    """
    if dtype != torch.float16:
        return 1.0
    return 2.0 ** (14 - max(math.ceil(math.log2(max(abs(logit_scale), 1.0))), 0))
