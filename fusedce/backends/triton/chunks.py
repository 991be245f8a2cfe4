"""A chunk of logits of the training pass, turned into its gradient and that of the hidden state.

The seam is :meth:`Chunks.exponentials`: they are made by products of cuBLAS with a kernel after
each, or by one product of ours; the architecture's row says by which. What follows knows nothing of
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

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
from fusedce.kernels.softmax_grad import (
    exp_tile_kernel,
    hidden_grad_kernel,
    label_logit_kernel,
    softmax_rows_kernel,
)
from fusedce.kernels.token_grad import token_grad_kernel

# Float32 products of some rows of a chunk with some rows of weight: the first row, how many; the
# first class, how many; and the products themselves, their rows padded.
Tile = tuple[int, int, int, int, Tensor]


class ChunkGradient(NamedTuple):
    """``amplify`` times the derivative of the losses by ``h @ weight.T``, as products want it.

    Row ``c`` is ``factors[c] * logits[c]``, and ``entries[k, c]`` (without ``amplify``) more at
    ``columns[k, c]``.
    """

    logits: Tensor  # (C, V)
    factors: Tensor | None  # (C,) fp32
    columns: Tensor  # (K, C) int; out of range: none
    entries: Tensor  # (K, C) fp32
    scaled: Tensor | None  # (C, H): hidden states times `factors`; None: they are powers of two


class Chunks:
    """The logits of one chunk after another, in the same buffers."""

    def __init__(self, problem: Problem, C: int, *, of_weight: bool = False) -> None:
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
        self.normalise = weight.dtype == torch.float16 or self.exps is not self.grads
        walks = self.arch.walks(weight.element_size())
        self.problem = problem
        self.gemm = None
        if walks.by_gemm:
            self.gemm = walks.gemm_with_options if has_options(problem) else walks.gemm
        self.exp_block = self.block if self.gemm is None else self.gemm.BLOCK_V
        blocks = -(-V // self.exp_block)
        of_rows = torch.empty(2 * blocks + 4, C, dtype=torch.float32, device=device)
        sizes = (blocks, blocks, 2, 1, 1)
        self.maxima, self.sums, self.entries, z_label, factors = of_rows.split_with_sizes(sizes)
        self.z_label, self.factors = z_label[0], factors[0]
        self.columns = torch.empty(2, C, dtype=problem.labels.dtype, device=device)
        self.scaled = None
        if of_weight and not self.normalise:
            self.scaled = torch.empty(C, H, dtype=weight.dtype, device=device)

    def tiles(self, h: Tensor) -> Iterator[Tile]:
        """Products of ``h (C, H)`` and weight, tile by tile, in one buffer."""
        V, C, (most_rows, most) = self.weight.shape[0], h.shape[0], self.tile
        sizes = [most] * (V // most) + ([V % most] if V % most else [])
        columns, products = self.weight.t().split_with_sizes(sizes, 1), self.room
        some_rows = [(0, C, h)]
        if most_rows < C:
            some_rows = [
                (number * most_rows, len(some), some)
                for number, some in enumerate(h.split(most_rows))
            ]
        shape = (0, 0)
        for begin, T, w in zip(range(0, V, most), sizes, columns, strict=True):
            for first, rows, some in some_rows:
                if shape != (rows, T):
                    shape = (rows, T)
                    products = self.room.as_strided(shape, (multiple(T), 1))
                mm(some, w, products)
                yield first, rows, begin, T, products

    def gradient(
        self,
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,)
        losses: Tensor,  # (C,) fp32 to fill
        count: Tensor,  # () int32: valid rows
        first: int,  # number of the chunk's first row
        options: ChunkFactors | None,
        argmax: Tensor | None,  # (N,) int64 to fill at `rows`
        rows: Tensor,  # (N,) int32
    ) -> ChunkGradient:
        """From the logits, which are made here."""
        (V, H), C = self.weight.shape, h.shape[0]
        exps, grads = self.exps, self.grads
        best = None if argmax is None else torch.empty_like(self.sums, dtype=torch.int32)
        self.exponentials(h, y, best)
        terms = None if options is None else options.terms
        factors = None if self.normalise and options is None else self.factors
        softmax_rows_kernel[(C,)](
            exps=exps,
            grads=grads,
            hidden=h,
            scaled=self.scaled,
            class_weight=None if options is None else options.class_weight,
            labels=y,
            maxima=self.maxima,
            sums=self.sums,
            z_label=self.z_label,
            losses=losses,
            columns=self.columns,
            entries=self.entries,
            count=count,
            terms=terms,
            shifts=None if terms is None or exps is grads else terms[3],
            lse=None if options is None else options.lse,
            row_factors=factors,
            best=best,
            argmax=argmax,
            rows=None if argmax is None else rows,
            first=first,
            H=H,
            V=V,
            width=multiple(V),
            stride_hn=h.stride(0),
            stride_row=self.entries.stride(0),
            stride_terms=C,
            scale=self.pointwise["scale"],
            softcap=self.pointwise["softcap"],
            AMPLIFY=self.amplify,
            NORMALISE=self.normalise,
            BLOCKS=power_of_2(self.sums.shape[0]),
            BLOCK_V=self.exp_block,
            BLOCK_H=min(power_of_2(H), 1024),
            num_warps=self.arch.exp_warps,
        )
        columns, entries = (x.narrow(1, 0, C) for x in (self.columns, self.entries))
        scaled = None if self.scaled is None else self.scaled.narrow(0, 0, C)
        return ChunkGradient(grads[:C, :V], factors, columns, entries, scaled)

    def exponentials(self, h: Tensor, y: Tensor, best: Tensor | None) -> None:
        """Into ``exps``, relative to the labels' logits if they are not to be normalised."""
        (V, H), C = self.weight.shape, h.shape[0]
        block_c, block_h = self.arch.label_block
        label_logit_kernel[(-(-C // block_c),)](
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
        shared = {
            "exps": self.exps,
            "labels": y,
            "z_label": None if self.normalise else self.z_label,
            "maxima": self.maxima,
            "sums": self.sums,
            "best": best,
            "stride_ec": self.exps.stride(0),
            "stride_block": self.sums.stride(0),
            "AMPLIFY": self.amplify,
        }
        if self.gemm is not None:
            self._by_gemm(h, self.gemm, shared)
        else:
            self._by_tiles(h, shared)

    def _by_tiles(self, h: Tensor, shared: dict[str, Any]) -> None:
        """Products by cuBLAS, a kernel after each."""
        launch = Relaunch(
            exp_tile_kernel,
            products=self.room,
            most=self.tile[1],
            V=self.weight.shape[0],
            BLOCK_V=self.block,
            num_warps=self.arch.exp_warps,
            **shared,
            **self.pointwise,
        )
        block = self.block
        for first, rows, begin, T, _ in self.tiles(h):
            launch((rows, -(-T // block), 1), first=first, first_block=begin // block)

    def _by_gemm(self, h: Tensor, blocks: archs.Blocks, shared: dict[str, Any]) -> None:
        """One product whose epilogue makes them."""
        problem = self.problem._replace(hidden=h, weight=self.weight, labels=shared["labels"])
        walk = operands(problem, blocks) | self.pointwise
        tiles = -(-len(h) // blocks.BLOCK_N) * walk["splits"]
        for name in ("tiles_per_split", "splits"):
            del walk[name]
        exp_gemm_kernel[(min(tiles, archs.processors(h.device)),)](
            width=multiple(walk["V"]), **(walk | shared)
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
        factors: Tensor,  # (C,) of g: it still waits for them
        count: Tensor,  # () int32: used rows
        first: int,  # number of the chunk's first row
    ) -> ChunkGradient:
        """From ``g``, the gradient of the logits."""
        V, C = self.weight.shape[0], len(h)
        grads = self.grads[:C]
        lost = torch.zeros(1, C, device=h.device)
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
                lost=lost[0, rows],
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
        return ChunkGradient(grads[:, :V], factors, y[None], lost.mul_(factors), None)

    def hidden_gradient(
        self,
        gradient: ChunkGradient,
        rows: Tensor,  # (N,) int32
        first: int,
        d_hidden: Tensor,  # (N, H) to fill at rows[first : first + C]
        outer: float,  # a factor
    ) -> None:
        V, H = self.weight.shape
        g, factors, columns, entries, _ = gradient
        (K, C), step = columns.shape, self.step
        block = min(power_of_2(H), 1024)
        launch = Relaunch(
            hidden_grad_kernel,
            products=self.room,
            weight=self.weight,
            columns=columns,
            entries=entries,
            row_factors=factors,
            rows=rows,
            d_hidden=d_hidden,
            first=first,
            H=H,
            V=V,
            stride_wv=self.weight.stride(0),
            stride_dn=d_hidden.stride(0),
            stride_row=columns.stride(0),
            factor=outer,
            AMPLIFY=self.amplify,
            ENTRIES=K,
            BLOCK_H=block,
            num_warps=self.arch.exp_warps,
        )
        for begin in range(0, C, step):
            n = min(step, C - begin)
            mm(g.narrow(0, begin, n), self.weight, self.room.as_strided((n, H), (H, 1)))
            launch((n, -(-H // block), 1), begin=begin)


def amplification(dtype: torch.dtype, logit_scale: float) -> float:
    """The power of two by which the gradient of the logits, at most |logit_scale|, is stored.

    A probability below 6e-5 loses bits in float16 and one below 6e-8 is lost, and a vocabulary has
    little else. bfloat16 and float32 have the range.
    """
    if dtype != torch.float16:
        return 1.0
    return 2.0 ** (14 - max(math.ceil(math.log2(max(abs(logit_scale), 1.0))), 0))
