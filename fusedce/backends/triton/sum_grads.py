"""Host side of the training pass: a chunk's exponentials, a factor a row, two more products.

A chunk holds its exponentials in the inputs' dtype. They are made by products of cuBLAS with a
kernel after each, float32 logits existing for one tile of the vocabulary at a time, or by one
product of ours with an epilogue; the architecture's row decides.

Where the plan has no room for a chunk's exponentials, they exist for one tile of the vocabulary.
The rows' log-sum-exps then come from a pass of their own, a fourth product: exponentials relative
to them are probabilities up to a power of two, and the rows' factors are known before the first
tile.

The number of valid tokens is read once, since the host sets the sizes of cuBLAS's products; inside
a CUDA graph, which nothing may wait for, all rows are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract.objective import slopes, token_losses
from ...contract.problem import Outputs, Problem, Projection
from ...kernels.softmax_grad import exp_tile_kernel, label_logit_kernel, softmax_rows_kernel
from ...kernels.tile import LOG2E
from ...kernels.walk import EXPONENTIALS
from ..devices import capturing
from ..gradients import Gradients, Summed, allocate, saved_grad_dtypes, sizes_of
from ..plan import FEW_CHUNKS, TILES, Plan, choose_plan, multiple_of_16, power_of_2
from . import archs
from .forward import token_stats
from .head_gradients import (
    Head,
    add_label_grads,
    add_to_bias,
    compile_for_sums,
)
from .launch import (
    Rows,
    compact,
    device_guard,
    has_options,
    has_whole_steps,
    launch_grid,
    padded,
    raise_on_cpu,
    walk,
)
from .products import add_product, product, scaled_by


def loss_and_grads(problem: Problem, wanted: Outputs, argmax: Tensor | None) -> Summed:
    """The sum and its wanted gradients; holds the exponentials of one chunk."""
    hidden, labels = problem.hidden, problem.labels.contiguous()
    if hidden.stride(1) != 1 or hidden.stride(0) % 16:
        hidden = hidden.contiguous()  # as gathered rows are: a graph's kernels know such strides
    problem, N, device = problem.replace(hidden=hidden, labels=labels), len(hidden), hidden.device
    with device_guard(device):
        packed, dtypes = compact(problem), saved_grad_dtypes(problem)
        raise_on_cpu(packed.n_valid, problem)
        # The count is worth a wait: of a padded batch half the rows are ignored, and cost nothing.
        n, outer, factor = rows_and_factor(problem, packed)
        gemm = _gemm_blocks(problem, wanted)
        blocks = {
            "gemm_block": 0 if gemm is None else gemm.BLOCK_V,
            "exp_block": archs.architecture(device).exp_block_v,
        }
        plan = choose_plan(
            sizes_of(problem, wanted, n, dtypes, triton=True, **blocks),
            chunk_tokens=problem.chunk_tokens,
            memory_budget=problem.memory_budget,
            small=False,  # `small_sums` leaves those with other options to chunks
        )
        C, graph = min(plan.tokens, n), capturing(device)
        every_row = n == N and not graph
        grads = Gradients(
            problem, wanted, dtypes=dtypes, chunks=-(-n // C) if n else 0, every_row=every_row,
            wide=plan.name not in (FEW_CHUNKS, TILES),
        )  # fmt: skip
        if argmax is not None and not every_row:
            argmax.fill_(-1)
        if n == 0:
            return Summed(packed.loss_sum, packed.n_valid, factor, *grads.cast_out())
        used: Tensor | slice = slice(None) if every_row else packed.rows[:n].long()
        # Inside a graph ignored rows take part, as zeros.
        padding = torch.arange(n, device=device) >= packed.used if graph else None
        labels = labels[used]
        made = _Chunks if plan.name != TILES else _TiledChunks
        chunks = made(problem.rows(used), labels, packed, plan, gemm, argmax, outer, padding)
        for first in range(0, n, C):
            some = slice(first, min(first + C, n))
            h = hidden[some] if isinstance(used, slice) else hidden[used[some]]  # (C, H)
            if padding is not None:
                h = h.masked_fill(padding[some, None], 0)
            chunks.add(h, labels[some], first, grads)
        chunks.add_labels(hidden, grads)
        return Summed(chunks.total(), packed.n_valid, factor, *grads.cast_out())


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
        plan: Plan,
        gemm: archs.Blocks | None,
        argmax: Tensor | None,  # (N,) int64 to fill at `packed.rows`
        outer: float,  # a factor of the gradients
        padding: Tensor | None,  # (n,) bool: rows that do not count
    ) -> None:
        super().__init__(problem)
        weight, dtype, device = self.weight, self.weight.dtype, self.weight.device
        (V, H), n = weight.shape, len(labels)
        C, self.classes = min(plan.tokens, n), plan.classes
        self.problem, self.packed, self.argmax, self.outer = problem, packed, argmax, outer
        self.labels, self.padding = labels, padding
        self.gemm, self.multiply = gemm, product(device, dtype)
        made = {
            name: allocate(plan, name, dtype if buffer.element < 4 else torch.float32, device)
            for name, buffer in plan.buffers.items()
        }
        # It holds products of a tile of the logits, and of rows of d_hidden.
        self.products = made["tile of products"]
        self.exps = made["logits of a tile" if plan.name == TILES else "logits of a chunk"]
        most = min(self.exps.shape[1], V)  # classes whose exponentials exist at a time
        # At least the 16 that rows are padded to.
        block = min(max(power_of_2(most), 16), self.arch.exp_block_v)
        self.block = block if gemm is None else gemm.BLOCK_V
        self.blocks = -(-most // self.block)
        processors = archs.processors(device)
        self.tile = self.arch.tile_shape(C, most, H, self.block, processors)
        self.rows_of_hidden = self.arch.rows_of_hidden(C, H, processors)
        self.scaled, self.d_hidden = map(made.get, ("scaled hidden states", "d_hidden of a chunk"))
        self.frequent = None
        if (total := made.get("rows of frequent labels")) is not None:
            self.frequent = _FrequentRows(total, labels, V)
        # Every block has a reference of its own then, not the labels' logits.
        self.store_probs = dtype == torch.float16
        sizes = (self.blocks * C, self.blocks * C, C, C)
        of_rows = made["statistics"].view(-1).split_with_sizes(sizes)
        self.maxima, self.sums, self.z_label, self.factors = of_rows
        self.losses, self.label_grads = torch.empty(2, n, dtype=torch.float32, device=device)
        self.loss_slopes = self.lse = None
        if not problem.is_plain_ce():
            self.y = labels.long().clamp(0, V - 1)
            zero = torch.zeros(n, dtype=torch.float64, device=device)
            self.lse = torch.empty_like(self.losses)
            # The kernel finds the lse. Slopes are `a + b * lse`, so that two values tell them.
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
        """Compute the chunk's losses, and add its gradients to ``grads``, but for the labels'."""
        (V, H), C, outer = self.weight.shape, len(h), self.outer
        best = None if self.argmax is None else torch.empty_like(self.sums, dtype=torch.int32)
        self._label_logits(h, y)
        self._exponentials(h, y, self.weight, None if self.store_probs else self.z_label, best)
        # `grad_scale` times the derivative by the products is now `factors * exps`; at the labels
        # `label_grads` more, without `grad_scale`.
        factors = None if self.store_probs and self.loss_slopes is None else self.factors[:C]
        self._merge(h, y, first, factors, best)
        g, alpha = self.exps[:C, :V], outer / self.grad_scale
        if grads.hidden is not None:
            step = self.rows_of_hidden
            for begin in range(0, C, step):
                some = g[begin : begin + step]
                products = self.products.as_strided((len(some), H), (H, 1))
                self.multiply(some, self.weight, out=products)
                self._finish_hidden(products, y, factors, grads.hidden, begin, first)
        if grads.bias is not None:
            add_to_bias(grads.bias, g, factors, alpha, self.products)
        if grads.weight is not None:
            if self.scaled is None:  # float16, whose factors may leave its range
                scaled, largest = scaled_by(h, factors)
            else:
                scaled, largest = self.scaled[:C], None
            add_product(
                grads.weight, g.t(), scaled, alpha, largest, first=first == 0, scratch=self.products
            )
            if (rows := self.frequent) is not None:
                some = g.index_select(1, rows.classes).t()  # (never float16: no `largest`)
                add_product(
                    rows.total, some, scaled, alpha, first=first == 0, scratch=self.products
                )

    def add_labels(self, hidden: Tensor, grads: Gradients) -> None:
        """Add the labels' entries of all chunks to the head's gradients, which rounds them once.

        Chunk by chunk, each would be rounded again with every later one.
        """
        V, H = self.weight.shape
        # Rows that do not count may hold anything.
        y = self.labels if self.padding is None else self.labels.masked_fill(self.padding, -1)
        entries, positions = (self.label_grads, hidden), self.packed.rows
        add_label_grads(grads.weight, grads.bias, y, *entries, V, self.outer, positions)
        if grads.weight is not None and (rows := self.frequent) is not None:
            K, columns = len(rows.classes), rows.columns(y)
            add_label_grads(rows.total, None, columns, *entries, K, self.outer, positions)
            grads.weight[rows.classes] = rows.total.to(grads.weight.dtype)
        if grads.weight is not None and grads.weight.element_size() == 2:
            compile_for_sums(hidden.device, hidden.dtype, y.dtype, V, H, grads.bias is not None)

    def total(self) -> Tensor:
        """``()`` fp32 sum of the losses; of rows that are padding they are 0."""
        losses = self.losses
        if self.lse is not None:
            nll, lse = losses.double(), self.lse.double()
            losses = token_losses(self.problem, self.y, nll, lse).float()
            losses = losses if self.padding is None else losses.masked_fill(self.padding, 0)
        return losses.sum(dtype=torch.float64).float()

    def _finish_hidden(
        self, products: Tensor, y: Tensor, factors: Tensor | None, d_hidden: Tensor, begin: int,
        first: int,
    ) -> None:  # fmt: skip
        entries = self.label_grads[first:]
        self.finish_hidden(
            products, y, entries, factors, self.packed.rows, d_hidden, begin, first, self.outer
        )

    def _label_logits(self, h: Tensor, y: Tensor) -> None:
        """Fill the labels' logits; NaN for a bad label."""
        (V, H), C = self.weight.shape, len(h)
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

    def _exponentials(
        self,
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,) labels, counted from the first row of weight
        weight: Tensor,  # (T, H) the head, or a tile of it
        reference: Tensor | None,  # (C,) fp32 logits; None: every block has one of its own
        best: Tensor | None = None,  # (blocks * C,) int32 to fill
        factors: Tensor | None = None,  # (C,) fp32: what a row's exponentials are multiplied by
        bias: Tensor | None = None,  # (T,) of a tile
    ) -> None:
        """Fill the exponentials and their statistics."""
        T, C, block = len(weight), len(h), self.block
        shared: dict[str, Any] = self.pointwise | {
            "exps": self.exps,
            "labels": y,
            "z_label": reference,
            "factors": factors,
            "maxima": self.maxima,
            "sums": self.sums,
            "best": best,
            "stride_ec": self.exps.stride(0),
            "GRAD_SCALE": self.grad_scale,
        }
        if bias is not None:
            shared["bias"] = bias
        if self.gemm is not None:
            problem, width = self.problem.replace(hidden=h, weight=weight), multiple_of_16(T)
            walk(problem, self.gemm, EXPONENTIALS, stride_split=C, width=width, **shared)
            return
        most_rows, most = self.tile
        for begin in range(0, T, most):
            w = weight[begin : begin + most]
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
                    V=T,
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
            label_grads=self.label_grads[first:],
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
            STORE_PROBS=self.store_probs,
            BLOCKS=power_of_2(self.blocks),
            BLOCK_V=self.block,
            BLOCK_H=min(power_of_2(H), 1024),
            num_warps=archs.ROW_WARPS,
        )


class _FrequentRows:
    """The most frequent labels, whose rows of the head's gradient are summed in float32.

    In such a row the part of the probabilities and that of the labels nearly cancel where hidden
    states share a mean and the head knows how frequent the class is. A product rounded to two bytes
    before would then err by many roundings of what is left: the more, the more labels a class has.
    """

    def __init__(self, total: Tensor, labels: Tensor, V: int) -> None:
        self.total = total  # (K, H) fp32
        at = labels.long().clamp(0, V - 1)
        # By the number of labels, and where that is equal by the class: no two keys are equal, so
        # that the choice is the same in every run.
        keys = torch.arange(V, device=at.device)
        keys.index_put_((at,), torch.full_like(at, V), accumulate=True)
        self.classes = keys.topk(len(total)).indices.sort().values  # (K,)

    def columns(self, labels: Tensor) -> Tensor:
        """The row of ``total`` of each label, -1 where it has none."""
        at = torch.searchsorted(self.classes, labels.long()).clamp_(max=len(self.classes) - 1)
        return at.masked_fill_(self.classes[at] != labels, -1)


# log2(e) as the kernels' float32 has it.
_LOG2E = float(LOG2E.value)


class _TiledChunks(_Chunks):
    """Chunks of tokens of whose exponentials a tile of the vocabulary exists at a time.

    Exponentials are multiplied by their row's factor before they are rounded, but in float16, whose
    range the factors may leave.
    """

    def add(self, h: Tensor, y: Tensor, first: int, grads: Gradients) -> None:
        """Compute the chunk's losses, and add its gradients to ``grads``, but for the labels'."""
        V, C, T = len(self.weight), len(h), self.classes
        # Known before the first tile: with a running maximum, as attention has, both gradients
        # would be rescaled tile by tile.
        lse = self._statistics(h, y, first)
        alpha = self.outer / self.grad_scale
        factors = self.factors[:C]
        inside, late = (None, factors) if self.store_probs else (factors, None)
        total = None if self.d_hidden is None else self.d_hidden[:C]
        scaled, largest = scaled_by(h, late if grads.weight is not None else None)
        for begin in range(0, V, T):
            w = self.weight[begin : begin + T]
            tile = slice(begin, begin + len(w))
            bias = self.pointwise["bias"]
            bias = None if bias is None else padded(bias[tile])
            self._exponentials(h, y - begin, w, lse, factors=inside, bias=bias)
            g = self.exps[:C, : len(w)]
            if total is not None:
                add_product(total, g, w, first=begin == 0, scratch=self.products)
            if grads.bias is not None:
                add_to_bias(grads.bias[tile], g, late, alpha, self.products)
            if grads.weight is not None:
                add_product(
                    grads.weight[tile], g.t(), scaled, alpha, largest, first=first == 0,
                    scratch=self.products,
                )  # fmt: skip
        if total is not None and grads.hidden is not None:
            self._finish_hidden(total, y, late, grads.hidden, 0, first)
        if (rows := self.frequent) is not None:  # one more tile, of their classes
            w, bias = self.weight.index_select(0, rows.classes), self.pointwise["bias"]
            bias = None if bias is None else padded(bias.index_select(0, rows.classes))
            self._exponentials(h, rows.columns(y), w, lse, factors=inside, bias=bias)
            g = self.exps[:C, : len(w)]
            # (never float16, so that `inside` has all factors)
            add_product(rows.total, g.t(), h, alpha, first=first == 0, scratch=self.products)

    def _statistics(self, h: Tensor, y: Tensor, first: int) -> Tensor:
        """Fill losses, factors and labels' entries; return the log-sum-exps ``(C,)`` fp32."""
        C, some = len(h), slice(first, first + len(h))
        weights = self.problem.token_weight
        problem = self.problem.replace(
            hidden=h, labels=y, memory_budget=None,
            token_weight=None if weights is None else weights[some],
        )  # fmt: skip
        best = None if self.argmax is None else torch.empty(C, dtype=torch.int64, device=h.device)
        # Inside a graph some rows do not count.
        stats = token_stats(problem, Outputs(lse=True), best, every_row=self.padding is None)
        nll, lse = stats.nll.double(), stats.lse
        head = Projection.of(problem)
        of_cap = head.slope(lse - nll)  # at the label's logit: `Stats` does not have it itself
        slope = head.scale if of_cap is None else head.scale * of_cap
        a: Tensor | float = 1.0
        b: Tensor | float = 0.0
        if self.loss_slopes is not None and self.lse is not None:
            a, b, by_lse = self.loss_slopes[:, some].double()
            b = b + by_lse * lse
            self.lse[some] = lse.float()
        of_label = (a * torch.expm1(-nll) + b * torch.exp(-nll)) * slope
        rounded = lse.float()
        # The kernel makes the same reference, to the bit: see `block_reference`.
        reference = (rounded * _LOG2E).floor().double()
        factors = (a + b) * torch.exp2(reference - lse * _LOG2E)
        factors = factors + 0 * of_label  # NaN of a bad label
        if self.padding is not None:
            of_label, factors = (x.masked_fill(self.padding[some], 0) for x in (of_label, factors))
        self.losses[some], self.label_grads[some], self.factors[:C] = stats.nll, of_label, factors
        if self.argmax is not None and best is not None:
            self.argmax[self.packed.rows[some].long()] = best
        return rounded
