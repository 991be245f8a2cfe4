"""Host side of the training pass: a chunk's exponentials, a factor a row, two more products.

A chunk holds its exponentials in the inputs' dtype. They are made by products of cuBLAS with a
kernel after each, float32 logits existing for one tile of the vocabulary at a time, or by one
product of ours with an epilogue; the architecture's row decides. The number of valid tokens is read
once, since the host sets the sizes of cuBLAS's products; inside a CUDA graph, which nothing may
wait for, all rows are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients, Summed, saved_grad_dtypes, sizes_of
from fusedce.backends.plan import TILES, choose_plan, multiple_of_16
from fusedce.backends.triton import archs
from fusedce.backends.triton.forward import token_stats
from fusedce.backends.triton.head_gradients import (
    Head,
    add_label_grads,
    add_to_bias,
    compile_for_sums,
)
from fusedce.backends.triton.launch import (
    Rows,
    capturing,
    compact,
    device_guard,
    has_options,
    has_whole_steps,
    launch_grid,
    power_of_2,
    raise_on_cpu,
    walk,
)
from fusedce.backends.triton.products import add_product, product, scaled_by
from fusedce.backends.triton.vocab_tiles import token_grads
from fusedce.backends.upstream import loss_in_two_passes
from fusedce.contract.objective import slopes, token_losses
from fusedce.contract.problem import Outputs, Problem
from fusedce.kernels.softmax_grad import exp_tile_kernel, label_logit_kernel, softmax_rows_kernel
from fusedce.kernels.walk import EXPONENTIALS


def loss_and_grads(problem: Problem, wanted: Outputs, argmax: Tensor | None) -> Summed:
    """The sum and its wanted gradients; holds the exponentials of one chunk."""
    hidden, labels = problem.hidden, problem.labels.contiguous()
    if hidden.stride(1) != 1 or hidden.stride(0) % 16:
        hidden = hidden.contiguous()  # as gathered rows are: a graph's kernels know such strides
    problem, N, device = problem.replace(hidden=hidden, labels=labels), len(hidden), hidden.device
    with device_guard(device):
        packed, dtypes = compact(problem), saved_grad_dtypes(problem)
        raise_on_cpu(packed.n_valid, problem)
        n, outer, factor = rows_and_factor(problem, packed)
        gemm = _gemm_blocks(problem, wanted)
        block = 0 if gemm is None else gemm.BLOCK_V
        plan = choose_plan(
            sizes_of(problem, wanted, n, dtypes, triton=True, gemm_block=block),
            chunk_tokens=problem.chunk_tokens,
            memory_budget=problem.memory_budget,
        )
        if plan.name == TILES:
            passes = token_stats, token_grads
            return loss_in_two_passes(*passes, problem, wanted, argmax)
        C, graph = min(plan.tokens, n), capturing(device)
        every_row = n == N and not graph
        grads = Gradients(
            problem, wanted, dtypes=dtypes, chunks=-(-n // C) if n else 0, every_row=every_row
        )
        if argmax is not None and not every_row:
            argmax.fill_(-1)
        if n == 0:
            return Summed(packed.loss_sum, packed.n_valid, factor, *grads.cast_out())
        used: Tensor | slice = slice(None) if every_row else packed.rows[:n].long()
        # Inside a graph ignored rows take part, as zeros.
        padding = torch.arange(n, device=device) >= packed.used if graph else None
        labels = labels[used]
        chunks = _Chunks(problem.rows(used), labels, packed, C, wanted, gemm, argmax, outer)
        for first in range(0, n, C):
            some = slice(first, min(first + C, n))
            h = hidden[some] if isinstance(used, slice) else hidden[used[some]]  # (C, H)
            if padding is not None:
                h = h.masked_fill(padding[some, None], 0)
            chunks.add(h, labels[some], first, grads)
        return Summed(chunks.total(padding), packed.n_valid, factor, *grads.cast_out())


def rows_and_factor(problem: Problem, packed: Rows) -> tuple[int, float, Tensor]:
    """Number of rows used, and :func:`expected_upstream` as a number and a tensor.

    This is the one host synchronisation; inside a CUDA graph all rows are used, by a factor of 1.
    That of :meth:`LossSum.mean` is computed on the host from the count that is read: the same
    number as on the device, without a launch to wait for.
    """
    if capturing(packed.rows.device):
        return len(packed.rows), 1.0, torch.ones_like(packed.loss_sum)
    expected = problem.expected_upstream
    if expected is None:
        n, n_valid = torch.stack([packed.used, packed.n_valid]).tolist()
        outer = 1.0 / max(n_valid, 1)
        return n, outer, torch.full_like(packed.loss_sum, outer)
    n, outer = torch.stack([packed.used, expected.double()]).tolist()
    return int(n), outer, expected.clone()


def _gemm_blocks(problem: Problem, wanted: Outputs) -> archs.Blocks | None:
    """Blocks of the one GEMM that makes the exponentials; ``None`` where cuBLAS makes tiles."""
    weight = problem.weight
    (V, H), walks = weight.shape, archs.architecture(weight.device).walks(weight.element_size())
    # The likeliest class, and stores that are not aligned, take registers as options do.
    options = has_options(problem) or wanted.argmax or V % 16
    blocks = walks.gemm_with_options if options else walks.gemm
    if blocks is None or not has_whole_steps(weight, blocks.BLOCK_H):
        return None  # cuBLAS reads other rows better
    return blocks if walks.gemm_up_to >= H else None


class _Chunks(Head):
    """Loss and gradients of one chunk after another, of at most ``C`` tokens, in the same buffers.

    A row of ``maxima`` and ``sums``, one a block of classes, is as long as the chunk at hand.
    """

    def __init__(
        self,
        problem: Problem,  # whose token weights are those of the rows that are computed
        labels: Tensor,  # (n,) of those rows
        packed: Rows,
        C: int,
        wanted: Outputs,
        gemm: archs.Blocks | None,
        argmax: Tensor | None,  # (N,) int64 to fill at `packed.rows`
        outer: float,  # a factor of the gradients
    ) -> None:
        super().__init__(problem)
        weight, dtype, device = self.weight, self.weight.dtype, self.weight.device
        (V, H), n = weight.shape, len(labels)
        self.problem, self.packed, self.argmax, self.outer = problem, packed, argmax, outer
        self.gemm, self.multiply = gemm, product(device, dtype)
        # At least the 16 that rows are padded to.
        block = min(max(power_of_2(V), 16), self.arch.exp_block_v)
        self.block = block if gemm is None else gemm.BLOCK_V
        self.blocks = -(-V // self.block)
        # Products of a tile of the logits, and of rows of d_hidden, share a buffer.
        processors = archs.processors(device)
        self.tile = self.arch.tile_shape(C, V, H, self.block, processors)
        self.rows_of_hidden = self.arch.rows_of_hidden(C, H, processors)
        of_tile = self.tile[0] * multiple_of_16(self.tile[1]) if gemm is None else 0
        size = max(of_tile, min(self.rows_of_hidden, C) * H)
        self.products = torch.empty(size, dtype=torch.float32, device=device)
        # Rows start at multiples of what the kernels and the products that read them move at once.
        self.exps = torch.empty(C, multiple_of_16(V), dtype=dtype, device=device)
        # Every block has a reference of its own then, not the labels' logits.
        self.store_probs = dtype == torch.float16
        sizes = (self.blocks * C, self.blocks * C, C, C, C)
        of_rows = torch.empty(sum(sizes), dtype=torch.float32, device=device)
        self.maxima, self.sums, *rest = of_rows.split_with_sizes(sizes)
        self.z_label, self.label_grads, self.factors = rest
        self.scaled = None
        if wanted.weight and not self.store_probs:
            self.scaled = torch.empty(C, H, dtype=dtype, device=device)
        self.losses = torch.empty(n, dtype=torch.float32, device=device)
        self.loss_slopes = self.lse = None
        if not problem.is_plain_ce():
            self.y = labels.long().clamp(0, V - 1)
            zero = torch.zeros(n, dtype=torch.float64, device=device)
            self.lse = torch.empty_like(self.losses)
            at_0, at_1 = (slopes(problem, self.y, x) for x in (zero, zero + 1))
            by = at_0.nll, at_0.lse, at_1.lse - at_0.lse  # nll, lse, and of the latter by lse
            self.loss_slopes = torch.stack([zero + x for x in by]).float()  # (3, n)

    def add(
        self,
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,)
        first: int,  # number of the chunk's first row
        grads: Gradients,
    ) -> None:
        """Compute the chunk's losses, and add its gradients to ``grads``."""
        (V, H), C, outer = self.weight.shape, len(h), self.outer
        best = None if self.argmax is None else torch.empty_like(self.sums, dtype=torch.int32)
        self._exponentials(h, y, best)
        # `grad_scale` times the derivative by the products is now `factors * exps`; at the labels
        # `label_grads` more, without `grad_scale`.
        factors = None if self.store_probs and self.loss_slopes is None else self.factors[:C]
        self._merge(h, y, first, factors, best)
        g, alpha = self.exps[:C, :V], outer / self.grad_scale
        label_grads, rows = self.label_grads[:C], self.packed.rows
        if grads.hidden is not None:
            step = self.rows_of_hidden
            for begin in range(0, C, step):
                some = g[begin : begin + step]
                products = self.products.as_strided((len(some), H), (H, 1))
                self.multiply(some, self.weight, out=products)
                self.finish_hidden(
                    products, y, label_grads, factors, rows, grads.hidden, begin, first, outer
                )  # fmt: skip
        if grads.bias is not None:
            add_to_bias(grads.bias, g, factors, alpha, self.products)
        if grads.weight is not None:
            if self.scaled is None:
                scaled, largest = scaled_by(h, factors)
            else:
                scaled, largest = self.scaled[:C], None
            add_product(
                grads.weight, g.t(), scaled, alpha, largest, first=first == 0, scratch=self.products
            )
        add_label_grads(grads.weight, grads.bias, y, label_grads, h, V, outer)
        if grads.weight is not None and grads.weight.element_size() == 2:
            compile_for_sums(h.device, h.dtype, y.dtype, V, H, grads.bias is not None)

    def total(self, padding: Tensor | None) -> Tensor:
        """``()`` fp32 sum of the losses; of rows that are ``padding (n,)`` they are 0."""
        losses = self.losses
        if self.lse is not None:
            nll, lse = losses.double(), self.lse.double()
            losses = token_losses(self.problem, self.y, nll, lse).float()
            losses = losses if padding is None else losses.masked_fill_(padding, 0)
        return losses.sum(dtype=torch.float64).float()

    def _exponentials(self, h: Tensor, y: Tensor, best: Tensor | None) -> None:
        """Fill the exponentials and their statistics, and ``best (blocks * C,)`` int32.

        They are relative to the labels' logits, which are computed first: NaN for a bad label.
        """
        (V, H), C, block = self.weight.shape, len(h), self.block
        block_c, block_h = archs.LABEL_LOGIT_BLOCK
        launch_grid(
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
        shared: dict[str, Any] = self.pointwise | {
            "exps": self.exps,
            "labels": y,
            "z_label": None if self.store_probs else self.z_label,
            "maxima": self.maxima,
            "sums": self.sums,
            "best": best,
            "stride_ec": self.exps.stride(0),
            "GRAD_SCALE": self.grad_scale,
        }
        if self.gemm is not None:
            problem, width = self.problem.replace(hidden=h, weight=self.weight), self.exps.shape[1]
            walk(problem, self.gemm, EXPONENTIALS, stride_split=C, width=width, **shared)
            return
        most_rows, most = self.tile
        for begin in range(0, V, most):
            w = self.weight[begin : begin + most]
            for first in range(0, C, most_rows):
                some = h[first : first + most_rows]
                shape = len(some), len(w)
                logits = self.products.as_strided(shape, (multiple_of_16(len(w)), 1))
                self.multiply(some, w.t(), out=logits)
                launch_grid(
                    exp_tile_kernel,
                    (len(some), -(-len(w) // block)),
                    products=self.products,
                    first=first,
                    first_block=begin // block,
                    most=most,
                    V=V,
                    stride_block=C,
                    BLOCK_V=block,
                    num_warps=archs.ROW_WARPS,
                    **shared,
                )

    def _merge(
        self, h: Tensor, y: Tensor, first: int, factors: Tensor | None, best: Tensor | None
    ) -> None:
        """Losses, factors and labels' entries of the rows, from the statistics of their blocks."""
        (V, H), C = self.weight.shape, len(h)
        some = slice(first, first + C)
        loss_slopes = None if self.loss_slopes is None else self.loss_slopes[:, some]
        launch_grid(
            softmax_rows_kernel,
            (C,),
            exps=self.exps,
            hidden=h,
            scaled=self.scaled,
            labels=y,
            maxima=self.maxima,
            sums=self.sums,
            z_label=self.z_label,
            losses=self.losses[some],
            label_grads=self.label_grads,
            count=self.packed.used,
            loss_slopes=loss_slopes,
            lse=None if self.lse is None else self.lse[some],
            row_factors=factors,
            best=best,
            argmax=self.argmax,
            rows=self.packed.rows,
            first=first,
            H=H,
            V=V,
            width=self.exps.shape[1],
            stride_hn=h.stride(0),
            stride_row=C,
            stride_slopes=0 if loss_slopes is None else loss_slopes.stride(0),
            scale=self.pointwise["scale"],
            softcap=self.pointwise["softcap"],
            GRAD_SCALE=self.grad_scale,
            STORE_PROBS=self.store_probs,
            BLOCKS=power_of_2(self.blocks),
            BLOCK_V=self.block,
            BLOCK_H=min(power_of_2(H), 1024),
            num_warps=archs.ROW_WARPS,
        )
