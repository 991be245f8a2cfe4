"""The loss where every rank holds some rows of the vocabulary, in plain torch.

Ranks see the same tokens. Per chunk of tokens each takes the logits of its own rows, ``(C, real)``
and never more, and tells the others four numbers a token: the largest logit, the sum of the other
exponentials, the label's logit where it is here, and (for label smoothing) the sum of logits. From
these every rank knows log-sum-exp and loss, turns its tile into gradients of the logits, and
multiplies: its rows of the weight gradient are complete, its part of ``d_hidden`` is added to the
others' while the next chunk is computed. In float32: bfloat16 halves the traffic, and makes the
error 1.4 times that of torch's whole bfloat16 loss on 2 ranks, 1.8 on 4, 2.3 on 8, 3.5 on 16.

As in `chunked`, the label's own exponential stays out of the sums: nothing cancels at p -> 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.agreement import ALL_GATHER
from fusedce.backends.gradients import call_of, waiting
from fusedce.backends.plan import Call, way_of
from fusedce.backends.protocol import Summed
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import chunks_of, valid_rows
from fusedce.contract.labels import bad_label_codes
from fusedce.contract.objective import expected_upstream, slopes, token_losses
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.rounding import acc_dtype

# torch 2.13 gave this one a new name
REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


class Shard(NamedTuple):
    """Which rows of the vocabulary lie here, and who has the others."""

    group: dist.ProcessGroup
    first: int  # the class of the first row here
    V: int  # rows that are classes, over all ranks; rows beyond are padding
    largest: int  # rows of the largest shard: chunks must be the same on all ranks
    tokens: tuple[int, ...] | None  # tokens of each rank where they are sharded as well
    counted: int  # tokens with a label to predict and a weight other than 0, over all of those


def sharded_call(problem: Problem, shard: Shard, N: int) -> Call:
    """Sizes for a plan, those of the largest shard, hence the same on all ranks.

    ``N``: of all ranks' tokens.
    """
    hidden, H = problem.hidden, problem.hidden.shape[1]
    acc = acc_dtype(hidden.dtype).itemsize
    fixed = N * (acc * H + 64)  # d_hidden, of all tokens beside those that count
    if shard.tokens is not None:
        fixed += N * H * hidden.element_size()
    wanted = Wanted(hidden=True, weight=True)
    call = call_of(problem, wanted, shard.counted, logit=acc)
    return call._replace(N=N, V=max(shard.largest, 1), fixed=fixed, copies=3)


def loss_and_grads(problem: Problem, shard: Shard, wanted: Wanted) -> Summed:
    """The sum over all ranks' tokens, and the wanted gradients of what lies here."""
    n_here = len(problem.hidden)
    if shard.tokens is not None:
        problem = all_tokens(problem, max(shard.tokens), shard.group)
    hidden, labels = problem.hidden, problem.labels
    N, H = hidden.shape
    acc = acc_dtype(hidden.dtype)
    rows, n_valid = _rows(problem, shard)
    way = way_of(
        sharded_call(problem, shard, N),
        chunk_tokens=problem.chunk_tokens,
        memory_budget=problem.memory_budget,
    )
    local = LocalRows(problem, shard)
    total = torch.where(n_valid < 0, math.nan, 0.0).double()  # a bad label: see LossSum
    d_rows = hidden.new_empty(len(rows), H, dtype=acc) if wanted.hidden else None
    d_weight = hidden.new_zeros(problem.weight.shape, dtype=acc) if wanted.weight else None
    d_bias = hidden.new_zeros(len(problem.weight), dtype=acc) if wanted.bias else None
    factor = expected_upstream(problem, n_valid)
    sums = _RunningSums(d_rows if shard.tokens is None else None, shard.group)
    begin = 0
    for chunk in chunks_of(rows, way.tokens):
        h = hidden[chunk]
        tile = _Tile(local, problem.rows(chunk), h, labels[chunk].long())
        sums.start(begin)  # after the tile's own small messages, which must not wait for it
        total += tile.losses.sum()
        if any(wanted.gradients()):
            g = tile.gradient(factor)  # (C, real)
            if d_bias is not None:
                d_bias[: local.real] += g.sum(0)
            g = g.to(local.gemm)
            if d_rows is not None:
                rows_here = d_rows[begin : begin + len(chunk)]
                local.products(g, local.weight.to(local.gemm), rows_here)
            if d_weight is not None:
                local.products(g.t(), h.to(local.gemm), d_weight[: local.real], add=True)
        begin += len(chunk)

    d_hidden = None
    if d_rows is not None:
        sums.wait()
        d_hidden = _of_all_tokens(d_rows, rows, N, n_here, shard)
    grads = (
        hidden.new_empty(0, dtype=dtype) if d is None else d.to(dtype)
        for d, dtype in zip((d_hidden, d_weight, d_bias), waiting(problem), strict=True)
    )
    return Summed(total.to(acc), n_valid, factor, *grads)


def _rows(problem: Problem, shard: Shard) -> tuple[Tensor, Tensor]:
    """As :func:`valid_rows`; away from the CPU without waiting, since their number is known."""
    labels = problem.labels
    if labels.device.type == "cpu":
        return valid_rows(problem, shard.V)
    return device_rows(problem, shard.V, shard.counted)


def device_rows(problem: Problem, V: int, n: int) -> tuple[Tensor, Tensor]:
    """The ``n`` positions that are computed, and the count or a bad label's code."""
    labels, valid = problem.labels.long(), problem.valid()
    bad = valid & ((labels < 0) | (labels >= V))
    count = valid.sum()
    if len(bad):
        first = bad.int().argmax(0)
        value = labels.gather(0, first[None])[0]
        count = torch.where(bad.any(), bad_label_codes(first, value), count)
    if problem.token_weight is not None:
        valid = valid & (problem.token_weight != 0)
    return valid.int().argsort(descending=True, stable=True)[:n], count


class LocalRows:
    """The rows of the output projection that are classes and lie here."""

    def __init__(self, problem: Problem, shard: Shard) -> None:
        weight, bias = problem.weight, problem.bias
        self.acc = acc_dtype(weight.dtype)
        self.real = min(max(shard.V - shard.first, 0), len(weight))
        self.weight = weight[: self.real]
        self.bias = None if bias is None else bias[: self.real].to(self.acc)
        self.problem, self.shard = problem, shard
        self.products = Products.of(weight)
        # A product rounded to bfloat16 would be rounded on every rank. fp16 cannot hold small
        # probabilities.
        self.gemm = self.products.gradients if self.products.exact_bf16 else self.acc

    def logits(self, h: Tensor) -> Tensor:
        """``(C, real)`` in fp32 or better."""
        dtype = self.products.logits
        z = torch.empty(len(h), self.real, dtype=self.acc, device=h.device)
        self.products(h.to(dtype), self.weight.t().to(dtype), z)
        if self.bias is not None:
            z += self.bias
        if self.problem.logit_scale != 1.0:
            z *= self.problem.logit_scale
        if self.problem.softcap is not None:
            z.div_(self.problem.softcap).tanh_().mul_(self.problem.softcap)
        return z


class _Tile:
    """A chunk's logits here; knows the losses of its tokens, and becomes their gradient."""

    def __init__(
        self,
        local: LocalRows,
        problem: Problem,  # its weights of tokens are the chunk's
        h: Tensor,  # (C, H)
        y: Tensor,  # (C,) int64
    ) -> None:
        shard = local.shard
        z = local.logits(h)
        place = y - shard.first
        self.inside = (place >= 0) & (place < local.real)
        self.at = place.clamp(0, max(local.real - 1, 0))[:, None]
        self.local, self.problem, self.y = local, problem, y
        if local.real:
            z_label = z.gather(1, self.at)[:, 0].masked_fill(~self.inside, -math.inf)
            k = z.amax(1).clamp_(min=torch.finfo(z.dtype).min)  # all -inf: exp must give 0
        else:
            z_label = z.new_full((len(z),), -math.inf)
            k = z.new_full((len(z),), torch.finfo(z.dtype).min)
        z_sum = z.sum(1, dtype=torch.float64) if problem.label_smoothing else None
        cap = problem.softcap
        self.slope = None if cap is None else 1 - (z / cap).square_()
        self.e = z.sub_(k[:, None]).exp_()
        self._set_label(torch.zeros_like(k))
        mine = [k, self.e.sum(1), z_label, *([] if z_sum is None else [z_sum])]
        ks, sums, z_labels, *z_sums = _gather(torch.stack([x.double() for x in mine]), shard.group)

        top = ks.amax(0)
        others = (sums * (ks - top).exp()).sum(0)
        # A label that is no class (NaN, see valid_rows) must not index anywhere.
        z_label = z_labels.amax(0).masked_fill((y < 0) | (y >= shard.V), math.nan)
        log_others = top + others.log()
        gap = log_others - z_label
        self.nll = torch.logaddexp(gap, torch.zeros_like(gap))  # (C,) float64
        self.lse = torch.logaddexp(log_others, z_label)
        self.k = k.double()
        zmean = z_sums[0].sum(0) / shard.V if z_sums else None
        self.losses = token_losses(problem, y, self.nll, self.lse, zmean)  # (C,) float64

    def gradient(self, factor: Tensor) -> Tensor:
        """``(C, real)``: ``factor`` times that of the sum of ``losses`` in the raw products."""
        by = slopes(self.problem, self.y, self.lse)
        outer = factor * self.problem.logit_scale
        of_p = outer * (by.nll + by.lse) * (self.k - self.lse).exp()
        g = self.e.mul_(of_p.to(self.e.dtype)[:, None])
        shift = outer * by.zmean / self.local.shard.V * torch.ones_like(self.lse)
        if self.problem.label_smoothing:
            g += shift.to(g.dtype)[:, None]
        of_label = by.nll * torch.expm1(-self.nll) + by.lse * (-self.nll).exp()
        self._set_label((outer * of_label + shift).to(g.dtype))
        return g if self.slope is None else g.mul_(self.slope)

    def _set_label(self, values: Tensor) -> None:
        """Write the labels' own entries, where they lie here."""
        if self.local.real:
            old = self.e.gather(1, self.at)[:, 0]
            self.e.scatter_(1, self.at, torch.where(self.inside, values, old)[:, None])


def _gather(numbers: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``(k, C)`` of every rank, as ``(k, ranks, C)``."""
    k, C = numbers.shape
    return all_gather(numbers, group).view(-1, k, C).transpose(0, 1)


def all_tokens(problem: Problem, most: int, group: dist.ProcessGroup) -> Problem:
    """The problem of every rank's tokens, each rank's filled up to ``most`` ignored ones.

    Weights and temperatures travel in float64: ranks may hold them in different dtypes.
    """
    token_weight, temperature = problem.token_weight, problem.temperature
    assert problem.ignore_index is not None
    return problem.but(
        hidden=_gather_tokens(problem.hidden, most, 0, group),
        labels=_gather_tokens(problem.labels, most, problem.ignore_index, group),
        token_weight=(
            None if token_weight is None else _gather_tokens(token_weight.double(), most, 0, group)
        ),
        temperature=(
            None if temperature is None else _gather_tokens(temperature.double(), most, 1, group)
        ),
    )


def _gather_tokens(x: Tensor, most: int, value: float, group: dist.ProcessGroup) -> Tensor:
    """``(n, ...)`` of every rank, each filled up to ``most`` tokens, one after the other."""
    padded = x.new_full((most, *x.shape[1:]), value)
    padded[: len(x)] = x
    return all_gather(padded, group)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x (n, ...)`` of every rank, one after the other: ``(ranks * n, ...)``."""
    out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    getattr(dist, ALL_GATHER)(out, x.contiguous(), group=group)
    return out


class _RunningSums:
    """Adds up the ranks' ``d_rows (N_valid, H)`` piece by piece, while others are computed."""

    def __init__(self, d_rows: Tensor | None, group: dist.ProcessGroup) -> None:
        self._d_rows, self._group = d_rows, group
        self._started = 0  # rows
        self._works: list[dist.Work] = []

    def start(self, end: int) -> None:
        """With the rows up to ``end`` that have not been started yet."""
        if self._d_rows is not None and end > self._started:
            rows = self._d_rows[self._started : end]
            self._works.append(dist.all_reduce(rows, group=self._group, async_op=True))
            self._started = end

    def wait(self) -> None:
        """For all of them."""
        if self._d_rows is not None:
            self.start(len(self._d_rows))
        for work in self._works:
            work.wait()


def sum_over_ranks(d_rows: Tensor, rows: Tensor, N: int, n_here: int, shard: Shard) -> Tensor:
    """``d_hidden`` of this rank's tokens from every rank's part of the valid rows."""
    _RunningSums(d_rows if shard.tokens is None else None, shard.group).wait()
    return _of_all_tokens(d_rows, rows, N, n_here, shard)


def _of_all_tokens(d_rows: Tensor, rows: Tensor, N: int, n_here: int, shard: Shard) -> Tensor:
    """``d_hidden`` of this rank's tokens, from that of the valid rows."""
    H = d_rows.shape[1]
    d_hidden = d_rows.new_zeros(N, H)
    d_hidden[rows] = d_rows
    if shard.tokens is None:
        return d_hidden
    mine = d_rows.new_empty(max(shard.tokens), H)
    if N:
        getattr(dist, REDUCE_SCATTER)(mine, d_hidden, group=shard.group)
    return mine[:n_here]
