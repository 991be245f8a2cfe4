"""Gradients with an upstream factor per token, by tiles of the vocabulary.

The log-sum-exp is known, so one kernel turns a tile of logits into its gradient, and one product of
that with the hidden states gives these rows of the weight gradient, complete and rounded once: no
sum over chunks is held. The tiles' parts of ``d_hidden`` are added up in float32.

The label's entry of a token leaves the tiles and reaches the gradients in float32, as in training.
Those of further classes are added to the tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...contract.objective import LogitGrad
from ...contract.problem import Outputs, Problem
from ...kernels.softmax_grad import token_grad_kernel
from ..devices import capturing
from ..gradients import Dtypes, Gradients, allocate, sizes_of
from ..plan import Plan, multiple_of_16, plan_tiles, power_of_2
from .head_gradients import Head, add_label_grads, add_to_bias
from .launch import (
    compact,
    device_guard,
    launch_grid,
    padded,
)
from .products import add_product, product, scaled_by


def token_grads(
    problem: Problem,
    wanted: Outputs,
    lse: Tensor,  # (N,)
    upstream: LogitGrad,
    dtypes: Dtypes,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The wanted gradients; reads the number of used tokens once, since cuBLAS needs it."""
    assert kept is None
    N, device, asked = len(problem.labels), problem.hidden.device, dtypes
    if upstream.at_classes is not None and problem.memory_budget is None:
        dtypes = Dtypes(*[torch.float32] * 3)  # so that their entries are rounded with the rest
    problem = problem.replace(labels=problem.labels.contiguous())
    with device_guard(device):
        rows, count, *_ = compact(problem, used=upstream.used.float())
        n = N if capturing(device) else int(count)
        plan = plan_tiles(
            sizes_of(problem, wanted, n, dtypes, triton=True),
            chunk_tokens=problem.chunk_tokens,
            memory_budget=problem.memory_budget,
        )
        every_row = n == N and not capturing(device)
        grads = Gradients(
            problem, wanted, dtypes=dtypes, chunks=min(n, 1), every_row=every_row, by_tiles=True
        )
        grads.dtypes = asked
        if n == 0:
            return grads.cast_out()
        walk = _Walk(problem, rows, count, n, lse, upstream, every_row=every_row)
        dh = None
        if grads.hidden is not None:  # float32, too
            dh = grads.hidden if every_row else torch.empty_like(walk.h, dtype=torch.float32)
        walk.add_tiles(grads, dh, plan)
        y, at = walk.own_label_grads(upstream)
        if grads.hidden is not None and dh is not None:
            walk.finish_hidden(dh, y, at, walk.factors, rows, grads.hidden, 0, 0, 1.0)
        add_label_grads(grads.weight, grads.bias, y, at, walk.h, len(problem.weight), 1.0)
        return grads.cast_out()


class _Walk(Head):
    """The tokens that are used, (n, ...) each, and the buffers of one tile after another."""

    def __init__(
        self,
        problem: Problem,
        rows: Tensor,  # (N,) int32
        count: Tensor,  # () int32: rows from here on are padding
        n: int,
        lse: Tensor,
        upstream: LogitGrad,
        *,
        every_row: bool,
    ) -> None:
        super().__init__(problem)
        weight, c = problem.weight, problem.class_weight
        self.count = count
        self.class_weight = None if c is None else padded(c.float())
        self.chosen = chosen = slice(None) if every_row else rows[:n].long()
        self.h = problem.hidden[chosen]
        if self.h.stride(1) != 1:
            self.h = self.h.contiguous()
        if capturing(weight.device):  # unused rows take part, as zeros
            padding = torch.arange(n, device=weight.device) >= count
            self.h = self.h.masked_fill(padding[:, None], 0)
        labels = problem.labels[chosen]
        self.factors, of_rows = _factors(upstream, chosen, self.class_weight, weight.dtype)
        temperature = problem.temperature
        self.of_rows = of_rows | {
            "labels": labels,
            "lse": lse[chosen].float(),
            "top": None if upstream.top is None else upstream.top[chosen],
            "temperature": None if temperature is None else temperature[chosen].float(),
            "classes": None if upstream.classes is None else upstream.classes[chosen].contiguous(),
        }
        self.label_grads = torch.zeros(n, dtype=torch.float32, device=weight.device)  # the labels'

    def add_tiles(self, grads: Gradients, dh: Tensor | None, plan: Plan) -> None:
        """Blocks of tokens by tiles of classes."""
        V, n, R, T = len(self.weight), len(self.h), plan.tokens, plan.classes
        dtype, device = self.weight.dtype, self.weight.device
        products = allocate(plan, "tile of products", torch.float32, device)
        stored = allocate(plan, "gradient of a tile", dtype, device)
        sums = None  # (T, H), where several blocks add to a tile's rows of the weight gradient
        if grads.weight is not None and n > R and grads.weight.dtype != torch.float32:
            sums = allocate(plan, "d_weight of a tile", torch.float32, device)
        h, largest = scaled_by(self.h, self.factors)
        for begin in range(0, V, T):
            end = min(begin + T, V)
            of_tile = None if grads.weight is None else grads.weight[begin:end]
            d_weight = of_tile if sums is None else sums[: end - begin]
            w = self.weight[begin:end]
            for first in range(0, n, R):
                rows = slice(first, min(first + R, n))
                g = self._gradient(products, stored, rows, begin, end)
                if dh is not None:
                    add_product(dh[rows], g, w, first=begin == 0, scratch=products)
                if d_weight is not None:
                    alpha = 1.0 / self.grad_scale
                    begins = first == 0
                    add_product(
                        d_weight, g.t(), h[rows], alpha, largest, first=begins, scratch=products
                    )
                if grads.bias is not None:
                    factors = None if self.factors is None else self.factors[rows]
                    bias = grads.bias[begin:end]
                    add_to_bias(bias, g, factors, 1.0 / self.grad_scale, products)
            if of_tile is not None and d_weight is not None and d_weight is not of_tile:
                of_tile.copy_(d_weight)  # rounded once

    def own_label_grads(self, upstream: LogitGrad) -> tuple[Tensor, Tensor]:
        """Labels ``(n,)`` and the values of their entries."""
        y = self.of_rows["labels"]
        assert y is not None
        own = self.label_grads if self.factors is None else self.label_grads * self.factors
        if upstream.classes is not None and upstream.at_classes is not None:
            classes, at = (x[self.chosen] for x in (upstream.classes, upstream.at_classes))
            own = own + at.masked_fill(classes != y[:, None], 0).sum(1).float()
        return y, own

    def _gradient(
        self, products: Tensor, stored: Tensor, rows: slice, begin: int, end: int
    ) -> Tensor:
        """``(R, T)``: ``grad_scale`` times the derivative by the products of rows and classes."""
        C, T = rows.stop - rows.start, end - begin
        width = multiple_of_16(T)
        block = min(power_of_2(T), self.arch.exp_block_v)
        logits = products.as_strided((C, T), (width, 1))
        w = self.weight[begin:end]
        product(w.device, w.dtype)(self.h[rows], w.t(), out=logits)
        cut = {name: None if x is None else x[rows] for name, x in self.of_rows.items()}
        bias = self.pointwise["bias"]
        launch_grid(
            token_grad_kernel,
            (C, -(-width // block)),
            products=products,
            grads=stored,
            class_weight=None if self.class_weight is None else self.class_weight[begin:],
            label_grads=self.label_grads[rows.start :],
            count=self.count,
            first=rows.start,
            begin=begin,
            T=T,
            width=width,
            K=0 if cut["classes"] is None else cut["classes"].shape[1],
            stride_pc=width,
            stride_gc=stored.stride(0),
            GRAD_SCALE=self.grad_scale,
            BLOCK_V=block,
            num_warps=self.arch.token_warps,
            **(self.pointwise | {"bias": None if bias is None else bias[begin:]} | cut),
        )
        return stored[:C, :T]


def _factors(
    upstream: LogitGrad, rows: Tensor | slice, class_weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, dict[str, Tensor | None]]:
    """Factors of the rows in fp32, and the upstream factors by name, divided by them.

    Only float16 has factors of rows, so that the kernel stores at most about 2 times the scale of
    the logits, whatever comes from upstream.
    """
    at_label = upstream.at_label[rows].double()
    alpha = upstream.alpha[rows].double()
    beta = None if upstream.beta is None else upstream.beta[rows].double()
    gamma = None if upstream.gamma is None else upstream.gamma[rows].double()
    at_classes = None if upstream.at_classes is None else upstream.at_classes[rows].double()
    size = None
    if dtype == torch.float16:
        size = alpha.abs() + at_label.abs()
        if beta is not None:
            size += beta.abs()
        if gamma is not None:
            size += gamma.abs() * (1.0 if class_weight is None else class_weight.abs().amax())
        if at_classes is not None:
            size += at_classes.abs().sum(1)  # a class may stand twice
        # A power of two, which multiplies the products' other operand without rounding it again.
        size = size.masked_fill_(size == 0, 1).log2_().floor_().exp2_()
    given = {"alpha": alpha, "beta": beta, "gamma": gamma, "at_label": at_label}
    divided = {
        name: None if x is None else (x if size is None else x / size).float()
        for name, x in given.items()
    }
    if at_classes is not None:
        at_classes = at_classes if size is None else at_classes / size[:, None]
        at_classes = at_classes.float().contiguous()
    return None if size is None else size.float(), divided | {"at_classes": at_classes}
