"""The sum of the losses on a sharded vocabulary, in plain torch; it tests the Triton path.

Ranks see the same tokens. Per chunk of tokens each takes the logits of its own rows, a tile
``(real, C)`` and never more, and sends the others four numbers a token: the largest logit, the sum
of the other exponentials, the label's logit where it lies here, and (for label smoothing) the sum
of logits. From these every rank knows log-sum-exp and loss, turns its tile into gradients of the
logits, and multiplies: its rows of the weight gradient are complete, its part of ``d_hidden`` is
added to the others' while the next chunk is computed. In float32: bfloat16 halves the traffic, and
makes the error 1.4 times that of torch's whole bfloat16 loss on 2 ranks, 1.8 on 4, 2.3 on 8.

Logits, buffers of gradients and valid rows are those of the unsharded path. Its statistics are not:
:class:`fusedce.backends.torch.logit_tiles.TileStats` reads maxima on the host, tile by tile, and
here the host does not wait for the device once the ranks have agreed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients, waiting
from fusedce.backends.protocol import Summed
from fusedce.backends.sharded.collectives import (
    RunningSums,
    Shard,
    all_gather,
    all_tokens,
    counted_rows,
    of_all_tokens,
    of_classes,
    sharded_way,
)
from fusedce.backends.sharded.merged_stats import nll_and_lse
from fusedce.backends.torch.logit_tiles import Logits, clear_labels, label_entry
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import chunks_of
from fusedce.contract.objective import expected_upstream, slopes, token_losses
from fusedce.contract.problem import Problem, Projection, Wanted
from fusedce.contract.rounding import acc_dtype


def loss_and_grads(problem: Problem, shard: Shard, wanted: Wanted) -> Summed:
    """The sum over all ranks' tokens in nats, and the wanted gradients of this rank's inputs."""
    n_here = len(problem.hidden)
    if shard.tokens is not None:
        problem = all_tokens(problem, max(shard.tokens), shard.group)
    hidden, labels = problem.hidden, problem.labels
    N, H = hidden.shape
    acc = acc_dtype(hidden.dtype)
    rows, n_valid = counted_rows(problem, shard)
    way = sharded_way(problem, shard)
    by_chunk = chunks_of(rows, way.tokens)
    grads = Gradients(
        problem, wanted.but(hidden=False), dtypes=waiting(problem), chunks=len(by_chunk)
    )
    real = shard.real(problem)
    classes = problem.but(
        weight=problem.weight[:real], bias=None if problem.bias is None else problem.bias[:real]
    )
    products, of_head = Products.of(hidden), of_classes(grads, real)
    gemm = products.gradients
    logits = Logits(Projection.of(classes), products)
    total = torch.where(n_valid < 0, math.nan, 0.0).double()  # a bad label: see LossSum
    d_rows = hidden.new_zeros(len(rows), H, dtype=acc) if wanted.hidden else None
    factor = expected_upstream(problem, n_valid)
    sums = RunningSums(d_rows if shard.tokens is None else None, shard.group)
    begin = 0
    for number, chunk in enumerate(by_chunk):
        h = hidden[chunk]
        tile = _Tile(logits, problem.rows(chunk), shard, h, labels[chunk].long())
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
    d_hidden = hidden.new_empty(0, dtype=acc)
    if d_rows is not None:
        sums.wait()
        d_hidden = of_all_tokens(d_rows, rows, N, n_here, shard)
    return Summed(total.to(acc), n_valid, factor, d_hidden, d_weight, d_bias)


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
        lowest = torch.finfo(head.acc).min
        k, s, z_sum = (h.new_full((len(h),), x, dtype=head.acc) for x in (lowest, 0, 0))
        z_label = torch.full_like(k, -math.inf)
        if real:
            z = logits.tile(logits.operand(h), 0, real)
            self.at, self.inside = label_entry(y, shard.first, real)
            z_label = z.gather(0, self.at)[0].masked_fill(~self.inside, -math.inf)
            k = z.amax(0).clamp_(min=lowest)  # all -inf: exp must give 0
            z_sum = z.sum(0, dtype=torch.float64) if problem.label_smoothing else z_sum
            self.slope = head.slope(z)
            self.e = z.sub_(k).exp_()
            clear_labels(self.e, self.at, self.inside)
            s = self.e.sum(0)
        mine = [k, s, z_label, *([z_sum] if problem.label_smoothing else [])]
        table = all_gather(torch.stack([x.double() for x in mine]), shard.group)
        ks, sums, z_labels, *z_sums = table.view(-1, len(mine), len(h)).unbind(1)

        top = ks.amax(0)
        others = top + (sums * (ks - top).exp()).sum(0).log()
        self.nll, self.lse = nll_and_lse(others, z_labels, y, shard)
        self.k = k.double()
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
