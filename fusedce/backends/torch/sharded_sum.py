"""The sum of the losses on a sharded vocabulary, in plain torch; it tests the Triton path.

Ranks see the same tokens. Per chunk of tokens each takes the logits of its own rows, a tile
``(real, C)`` and never more, and sends the others two numbers a token: the log-sum-exp of all but
the label's logit, and that logit where it lies here; with label smoothing also the sum of logits.
From these every rank knows log-sum-exp and loss, turns its tile into gradients of the logits, and
multiplies: its rows of the weight gradient are complete, its part of ``d_hidden`` is added to the
others' while the next chunk is computed. In float32: bfloat16 halves the traffic, and makes the
error 1.4 times that of torch's whole bfloat16 loss on 2 ranks, 1.8 on 4, 2.3 on 8.

Logits, buffers of gradients and valid rows are those of the unsharded path. Its statistics are not:
:class:`fusedce.backends.torch.logit_tiles.TileStats` reads sums on the host, tile by tile, and here
the host does not wait for the device once the ranks have agreed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients, waiting
from fusedce.backends.held import Call
from fusedce.backends.plan import way_of
from fusedce.backends.protocol import Summed
from fusedce.backends.shards.collectives import (
    RunningSums,
    all_tokens,
    of_classes,
    sharded_call,
)
from fusedce.backends.shards.merge import nll_and_lse, of_ranks
from fusedce.backends.torch.logit_tiles import Logits, clear_labels, label_entry
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import chunks_of, counted_rows
from fusedce.contract.objective import expected_upstream, slopes, token_losses
from fusedce.contract.problem import Problem, Projection, Wanted
from fusedce.contract.rounding import acc_dtype
from fusedce.contract.task import Shard


class Here(NamedTuple):
    """The tokens of all ranks, and the classes that lie here."""

    problem: Problem  # its weight has rows of classes alone; labels are among all classes
    rows: Tensor  # (n,) the tokens that count
    n_valid: Tensor  # () int64
    call: Call
    n: int  # tokens of this rank's own
    shard: Shard

    @classmethod
    def of(cls, problem: Problem, shard: Shard) -> Here:
        """Collectives: those of :func:`all_tokens` where each rank has tokens of its own."""
        n, real = len(problem.hidden), shard.real(problem)
        if shard.tokens is not None:
            problem = all_tokens(problem, max(shard.tokens), shard.group)
        rows, n_valid = counted_rows(problem, shard)
        call = sharded_call(problem, shard, len(problem.hidden))
        bias = None if problem.bias is None else problem.bias[:real]
        problem = problem.but(weight=problem.weight[:real], bias=bias)
        return cls(problem, rows, n_valid, call, n, shard)

    def d_rows(self, wanted: Wanted) -> Tensor | None:
        """``(n, H)`` zeros for the gradients of the tokens that count."""
        if not wanted.hidden:
            return None
        hidden = self.problem.hidden
        return hidden.new_zeros(len(self.rows), hidden.shape[1], dtype=acc_dtype(hidden.dtype))

    def d_hidden(self, d_rows: Tensor | None, sums: RunningSums) -> Tensor:
        """``(n, H)`` of this rank's tokens; ``(0,)`` where not wanted."""
        if d_rows is None:
            return self.problem.hidden.new_empty(0, dtype=acc_dtype(self.problem.hidden.dtype))
        return sums.d_hidden(self.rows, len(self.problem.hidden), self.n)


def loss_and_grads(problem: Problem, shard: Shard, wanted: Wanted) -> Summed:
    """The sum over all ranks' tokens in nats, and the wanted gradients of this rank's inputs."""
    here = Here.of(problem, shard)
    asked, problem = problem, here.problem
    hidden, real = problem.hidden, len(problem.weight)
    way = way_of(here.call, chunk_tokens=problem.chunk_tokens, memory_budget=problem.memory_budget)
    by_chunk = chunks_of(here.rows, way.tokens)
    grads = Gradients(asked, wanted.but(hidden=False), dtypes=waiting(asked), chunks=len(by_chunk))
    products, of_head = Products.of(hidden), of_classes(grads, real)
    gemm = products.gradients
    logits = Logits(Projection.of(problem), products)
    total = torch.where(here.n_valid < 0, math.nan, 0.0).double()  # a bad label: see LossSum
    d_rows = here.d_rows(wanted)
    sums = RunningSums(d_rows, shard)
    factor = expected_upstream(problem, here.n_valid)
    begin = 0
    for number, chunk in enumerate(by_chunk):
        h = hidden[chunk]
        tile = _Tile(logits, problem.rows(chunk), shard, h, problem.labels[chunk].long())
        sums.start(begin)  # after the tile's own small messages, which must not wait for it
        total += tile.losses.sum()
        if real and any(wanted.gradients()):
            g = tile.gradient(factor)  # (real, C)
            if of_head.bias is not None:
                of_head.bias += g.sum(1)
            g = g.to(gemm)
            if d_rows is not None:
                w = logits.rows(0, real, gemm)
                products(g.t(), w, d_rows[begin : begin + len(chunk)])
            if of_head.weight is not None:
                products(g, h.to(gemm), of_head.weight, add=number > 0)
        begin += len(chunk)
    _, d_weight, d_bias = grads.written()
    d_hidden = here.d_hidden(d_rows, sums)
    return Summed(total.to(products.acc), here.n_valid, factor, d_hidden, d_weight, d_bias)


class _Tile:
    """A chunk's exponentials of the logits here; holds its losses, and becomes their gradient."""

    def __init__(
        self,
        logits: Logits,  # of the classes here
        problem: Problem,  # its weights of tokens are the chunk's
        shard: Shard,
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,) int64 labels among all classes
    ) -> None:
        head, real = logits.head, len(logits.head.weight)
        self.problem, self.y, self.V = problem, y, shard.V
        k, s, z_sum = (h.new_full((len(h),), x, dtype=torch.float64) for x in (0, 0, 0))
        z_label = torch.full_like(k, -math.inf)
        if real:
            z = logits.tile(logits.operand(h), 0, real)
            self.at, self.inside = label_entry(y, shard.first, real)
            z_label = z.gather(0, self.at)[0].masked_fill(~self.inside, -math.inf)
            k = z.amax(0).clamp_(min=torch.finfo(head.acc).min)  # all -inf: exp must give 0
            z_sum = z.sum(0, dtype=torch.float64) if problem.label_smoothing else z_sum
            self.slope = head.slope(z)
            self.e = z.sub_(k).exp_()
            clear_labels(self.e, self.at, self.inside)
            s = self.e.sum(0)
        self.k = k.double()
        mine = [self.k + s.double().log(), z_label, *([z_sum] if problem.label_smoothing else [])]
        others, z_labels, *z_sums = of_ranks(mine, shard)
        known = (y >= 0) & (y < shard.V)
        self.nll, self.lse = nll_and_lse(others.logsumexp(0), z_labels, known)
        zmean = z_sums[0].sum(0) / shard.V if z_sums else None
        self.losses = token_losses(problem, y, self.nll, self.lse, zmean)  # (C,) float64

    def gradient(self, factor: Tensor) -> Tensor:
        """``(real, C)``: ``factor`` times that of the sum of ``losses`` in the raw products."""
        by = slopes(self.problem, self.y, self.lse)
        outer = factor * self.problem.logit_scale
        of_p = outer * (by.nll + by.lse) * (self.k - self.lse).exp()
        shift = outer * by.zmean / self.V * torch.ones_like(self.lse)
        of_label = by.nll * torch.expm1(-self.nll) + by.lse * (-self.nll).exp()
        g = self.e.mul_(of_p.to(self.e.dtype))
        if self.problem.label_smoothing:
            g += shift.to(g.dtype)
        at_label = (outer * of_label + shift).to(g.dtype)
        g.scatter_(0, self.at, torch.where(self.inside, at_label, g.gather(0, self.at)[0])[None])
        return g if self.slope is None else g.mul_(self.slope)
