"""The gradient of a chunk of logits, that of its hidden states, and the options behind both."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.plan import multiple_of_16
from fusedce.backends.triton import archs
from fusedce.backends.triton.exponentials import Exponentials, Peers, gemm_blocks
from fusedce.backends.triton.launch import (
    CachedLaunch,
    padded,
    pointwise,
    power_of_2,
    run,
    span,
)
from fusedce.backends.triton.products import Tiles
from fusedce.contract.objective import slopes, token_losses
from fusedce.contract.problem import Problem
from fusedce.kernels.input_grads import hidden_grad_kernel
from fusedce.kernels.softmax_grad import softmax_rows_kernel


class ChunkGradient(NamedTuple):
    """``amplify`` times the derivative of the losses by ``h @ weight.T``, in pieces for products.

    Row ``c`` is ``factors[c] * logits[c]``, and ``entries[c]`` (without ``amplify``) more at the
    column ``labels[c]``.
    """

    logits: Tensor  # (C, V)
    factors: Tensor | None  # (C,) fp32
    labels: Tensor  # (C,) int; out of range: none
    entries: Tensor  # (C,) fp32
    scaled: Tensor | None  # (C, H): hidden states times `factors`; None: they are powers of two


class Chunks:
    """The logits of one chunk after another, in the same buffers."""

    def __init__(
        self, problem: Problem, C: int, *, of_weight: bool = False, peers: Peers | None = None
    ) -> None:
        """``peers``: the ranks that hold other rows of the vocabulary."""
        weight, bias = problem.weight, problem.bias
        self.peers = peers
        V, H = weight.shape
        device = weight.device
        self.arch = archs.architecture(device)
        self.weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self.pointwise = pointwise(problem) | {"bias": None if bias is None else padded(bias)}
        self.amplify = amplification(weight.dtype, problem.logit_scale)
        self.tiles = Tiles(self.weight, C, self.arch, of_logits=gemm_blocks(problem) is None)
        # Rows start at multiples of what the kernels and the products that read them move at once.
        self.grads = torch.empty(C, multiple_of_16(V), dtype=weight.dtype, device=device)
        self.normalise = weight.dtype == torch.float16
        self.exponentials = Exponentials(
            problem,
            C,
            self.tiles,
            pointwise=self.pointwise,
            out=self.grads,
            amplify=self.amplify,
            own_references=self.normalise,
        )
        self.entries, self.factors = torch.empty(2, C, dtype=torch.float32, device=device).unbind()
        self.scaled = None
        if of_weight and not self.normalise:
            self.scaled = torch.empty(C, H, dtype=weight.dtype, device=device)

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
        """Compute the chunk's logits, losses and gradient."""
        (V, H), C = self.weight.shape, h.shape[0]
        exponentials, grads = self.exponentials, self.grads
        best = merged = None
        if self.peers is None:
            if argmax is not None:
                best = torch.empty_like(exponentials.sums, dtype=torch.int32)
            exponentials.fill(h, y, best)
        else:
            lse = None if options is None else options.lse
            of_chunk = slice(first, first + C)
            likeliest = None if argmax is None else torch.empty_like(y)
            merged = self.peers.merged(exponentials, h, y, of_chunk, losses, lse, likeliest)
            if argmax is not None and likeliest is not None:
                argmax[rows[of_chunk].long()] = likeliest
        gradient = ChunkGradient(
            logits=span(span(grads, 0, C), 0, V, dim=1),
            factors=None if self.normalise and options is None else span(self.factors, 0, C),
            labels=y,
            entries=span(self.entries, 0, C),
            scaled=None if self.scaled is None else span(self.scaled, 0, C),
        )
        run(
            softmax_rows_kernel,
            (C,),
            exps=grads,
            hidden=h,
            scaled=gradient.scaled,
            labels=y,
            maxima=exponentials.maxima,
            sums=exponentials.sums,
            z_label=exponentials.z_label,
            merged=merged,
            losses=losses,
            entries=gradient.entries,
            count=count,
            terms=None if options is None else options.terms,
            lse=None if options is None else options.lse,
            row_factors=gradient.factors,
            best=best,
            argmax=None if best is None else argmax,
            rows=None if best is None else rows,
            first=first,
            H=H,
            V=V,
            width=multiple_of_16(V),
            stride_hn=h.stride(0),
            stride_row=C,
            stride_terms=C,
            scale=self.pointwise["scale"],
            softcap=self.pointwise["softcap"],
            AMPLIFY=self.amplify,
            NORMALISE=self.normalise,
            BLOCKS=power_of_2(exponentials.blocks),
            BLOCK_V=exponentials.block,
            BLOCK_H=min(power_of_2(H), 1024),
            num_warps=self.arch.exp_warps,
        )
        return gradient

    def hidden_gradient(
        self,
        gradient: ChunkGradient,
        rows: Tensor,  # (N,) int32
        first: int,
        d_hidden: Tensor,  # (N, H) to fill at rows[first : first + C]
        outer: float,  # a factor
    ) -> None:
        """Write the chunk's rows of ``outer * gradient @ weight`` into ``d_hidden``."""
        (V, H), C = self.weight.shape, gradient.logits.shape[0]
        block = min(power_of_2(H), 1024)
        launch = CachedLaunch(
            hidden_grad_kernel,
            products=self.tiles.products,
            weight=self.weight,
            columns=gradient.labels,
            entries=gradient.entries,
            row_factors=gradient.factors,
            rows=rows,
            d_hidden=d_hidden,
            first=first,
            H=H,
            V=V,
            stride_wv=self.weight.stride(0),
            stride_dn=d_hidden.stride(0),
            stride_row=C,
            factor=outer,
            AMPLIFY=self.amplify,
            ENTRIES=1,
            BLOCK_H=block,
            num_warps=self.arch.exp_warps,
        )
        for begin, n in self.tiles.of_hidden(gradient.logits):
            launch((n, -(-H // block), 1), begin=begin)


def amplification(dtype: torch.dtype, logit_scale: float) -> float:
    """The power of two by which the gradient of the logits, at most |logit_scale|, is stored.

    In float16 a probability below 6e-5 loses bits and one below 6e-8 is lost, and most classes of a
    large vocabulary have such probabilities. bfloat16 and float32 have the range.
    """
    if dtype != torch.float16:
        return 1.0
    return 2.0 ** (14 - max(math.ceil(math.log2(max(abs(logit_scale), 1.0))), 0))


class ChunkFactors(NamedTuple):
    """Options of one chunk of tokens, and the log-sum-exps that the kernel fills."""

    problem: Problem  # token weights are the chunk's
    y: Tensor  # (C,) labels, in range
    padding: Tensor | None  # (C,) bool: rows that are none, inside a CUDA graph
    terms: Tensor  # (3, C) fp32: derivatives by nll, by lse, and of the latter by lse
    lse: Tensor  # (C,) fp32, for the kernel to fill

    def losses(self, nll: Tensor) -> Tensor:
        """``(C,)`` losses from the kernel's ``nll (C,)`` and log-sum-exps."""
        losses = token_losses(self.problem, self.y, nll.double(), self.lse.double())
        return losses if self.padding is None else losses.masked_fill(self.padding, 0)


class RowFactors:
    """Options of a loss as factors per row; :meth:`chunk` gives those of one chunk."""

    def __init__(self, problem: Problem, V: int | None = None) -> None:
        """``V``: the number of all ranks' classes, where ``weight`` has only some of them."""
        self.problem, self.V = problem, problem.weight.shape[0] if V is None else V

    def chunk(
        self,
        rows: Tensor | slice,
        y: Tensor,  # (C,)
        padding: Tensor | None,  # (C,) bool
    ) -> ChunkFactors:
        """Factors of the tokens ``rows``, from their labels."""
        problem = self.problem.rows(rows)
        y = y.long().clamp(0, self.V - 1)
        zero = torch.zeros(len(y), dtype=torch.float64, device=y.device)
        at_0, at_1 = slopes(problem, y, zero), slopes(problem, y, zero + 1)
        terms = torch.stack([zero + at_0.nll, zero + at_0.lse, at_1.lse - at_0.lse + zero])
        lse = torch.empty(len(y), dtype=torch.float32, device=y.device)
        return ChunkFactors(problem, y, padding, terms.float(), lse)
