"""The sum of the losses on a sharded vocabulary, by the Triton kernels.

Each rank runs the kernels of a whole vocabulary on its own rows. The rank that holds a token's
label sends its logit to the others before the first chunk, and all ranks store exponentials
relative to it. Per chunk they exchange one reference and one sum a token, from which each of them
computes the loss and the factors of the gradient.

Each rank's addend of ``d_hidden`` is a product with its own rows. The all-reduce in float32 runs
while the chunk's product for the weight and the next chunk are computed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedce.backends.gradients import Gradients, waiting
from fusedce.backends.protocol import Summed
from fusedce.backends.shards.collectives import (
    RunningSums,
    all_reduce,
    all_tokens,
    of_classes,
    sharded_way,
)
from fusedce.backends.shards.merge import nll_and_lse, of_ranks
from fusedce.backends.triton.chunks import Chunks, Losses
from fusedce.backends.triton.launch import Rows, compact, on, raise_on_cpu
from fusedce.backends.triton.training import add_chunks, walkable
from fusedce.contract.objective import expected_upstream
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.task import Shard
from fusedce.kernels.tile import LOG2E

_NOWHERE = -1  # the row of a label that lies on another rank


def loss_and_grads(
    problem: Problem, shard: Shard, wanted: Wanted, argmax: Tensor | None = None
) -> Summed:
    """The sum over all ranks' tokens in nats, and the wanted gradients of this rank's inputs."""
    n_here, n = len(problem.hidden), shard.counted
    problem, local = _problems(problem, shard)
    (N, H), device = problem.hidden.shape, problem.hidden.device
    way = sharded_way(problem, shard)
    with on(device):
        packed = compact(problem, V=shard.V)
        raise_on_cpu(packed.n_valid, problem, shard.V)
        factor = expected_upstream(problem, packed.n_valid)
        C = min(way.tokens, n)
        asked, chunks_of_rows = wanted.but(hidden=False), -(-n // C) if n else 0
        grads = Gradients(problem, asked, dtypes=waiting(problem), chunks=chunks_of_rows)
        every = None
        if argmax is not None:  # of all ranks' tokens
            every = argmax if shard.tokens is None else argmax.new_empty(N)
            every.fill_(-1)
        rows = packed.rows[:n].long()
        d_rows = problem.hidden.new_empty(n, H, dtype=torch.float32) if wanted.hidden else None
        sums = RunningSums(d_rows, shard)
        total = packed.loss_sum
        if n:
            chunks = _ShardedChunks(problem, local, C, wanted, rows, shard)
            real = shard.real(problem)
            head_gradients = of_classes(grads, real)
            head_gradients.hidden = d_rows
            if not real:  # the row of zeros needs memory for a gradient, which is not read
                of_zeros = problem.hidden.new_empty(1, H)
                head_gradients.weight = of_zeros if grads.weight is not None else None
                head_gradients.bias = None
            total = add_chunks(
                chunks, packed, n, C, head_gradients, every,
                outer=1.0 / max(shard.valid, 1), written=sums.start,
            )  # fmt: skip
        if argmax is not None and every is not None and shard.tokens is not None:
            argmax.copy_(shard.own(every, n_here))
        d_hidden, d_weight, d_bias = grads.written()
        if d_rows is not None:
            d_hidden = sums.d_hidden(rows, N, n_here)
        return Summed(_total(total, packed), packed.n_valid, factor, d_hidden, d_weight, d_bias)


def _problems(problem: Problem, shard: Shard) -> tuple[Problem, Problem]:
    """The problem of all tokens, and that of the classes here, whose labels are local rows.

    Where there are none, a row of zeros stands in for them.
    """
    if shard.tokens is not None:
        problem = all_tokens(problem, max(shard.tokens), shard.group)
    problem = walkable(problem)
    real = shard.real(problem)
    weight, bias, y = problem.weight, problem.bias, problem.labels
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    here = (y >= shard.first) & (y < shard.first + real)
    return problem, problem.but(
        weight=weight[:real] if real else weight.new_zeros(1, weight.shape[1]),
        bias=bias[:real] if real and bias is not None else None,
        labels=torch.where(here, y - shard.first, _NOWHERE),
    )


class _ShardedChunks(Chunks):
    """Chunks of this rank's classes, whose references and sums are merged with other ranks'."""

    def __init__(
        self,
        problem: Problem,  # labels are among all classes
        local: Problem,
        C: int,
        wanted: Wanted,
        rows: Tensor,  # (n,) int64 that count
        shard: Shard,
    ) -> None:
        """Collectives: one all-reduce of a float32 a token, the labels' logits."""
        super().__init__(local, C, wanted)
        self.shard, self.classes = shard, shard.V
        self.labels, self.empty = problem.labels[rows], not shard.real(problem)
        z_label = torch.zeros(len(rows), dtype=torch.float32, device=rows.device)
        if not self.empty:
            of_rows = local.labels[rows]
            self.label_logits(local.hidden, of_rows, z_label, rows.int())
            z_label.masked_fill_(of_rows == _NOWHERE, 0)
        all_reduce(z_label, shard.group)  # of one number and zeros: exact
        bad = (self.labels < 0) | (self.labels >= shard.V)  # the sums over ranks have 0 there
        self.z_labels = z_label.masked_fill(bad, math.nan)

    def exponentials(
        self, h: Tensor, y: Tensor, best: Tensor | None, of: Losses, first: int
    ) -> Tensor:
        """Collectives: one all-gather of a float64 a row, 3 with argmax."""
        C, here = len(h), slice(first, first + len(h))
        self.z_label = self.z_labels[here]
        if self.empty:  # as for a weight without rows
            self.maxima.fill_(-math.inf)
            self.sums.zero_()
            self.exps.zero_()
        else:
            self.fill(h, y, best)
        maxima, sums = (x[: self.blocks * C].view(-1, C) for x in (self.maxima, self.sums))
        own = None if self.normalise else self.z_label
        references = _block_references(maxima, own).double() / LOG2E.value
        mine = [(sums.double().log() + references).logsumexp(0)]
        if best is not None:
            top, block = maxima.max(0, keepdim=True)
            classes = best[: self.blocks * C].view(-1, C).gather(0, block)
            mine += [top[0], classes[0] + self.shard.first]
        of_all, *more = of_ranks(mine, self.shard)
        others, z = of_all.logsumexp(0), self.z_label.double()
        nll, log_sum = nll_and_lse(others, z[None], z == z)
        of.losses[here] = nll
        if of.lse is not None:
            of.lse[here] = log_sum
        if of.argmax is not None:
            tops, classes = more
            top, rank = tops.max(0, keepdim=True)
            likeliest = classes.gather(0, rank)[0].long()
            likeliest = torch.where(z > top[0], self.labels[here], likeliest)
            of.argmax[of.packed.rows[here].long()] = likeliest
        reference = (torch.fmax(others, z) * LOG2E.value).float()
        reference = reference.nan_to_num(0, 0, 0)  # finite, as a kernel's
        total = torch.exp2(others * LOG2E.value - reference.double()).float()
        return torch.stack([reference, total])


def _block_references(maxima: Tensor, z_label: Tensor | None) -> Tensor:
    """References of blocks' sums, as the kernels take them (:func:`tile.block_reference`)."""
    own = maxima.nan_to_num(neginf=0.0, posinf=math.inf, nan=math.nan) * LOG2E.value
    if z_label is None:
        return own
    own, label = own.ceil(), (z_label * LOG2E.value).floor()
    return torch.where(own > label + 30.0, own, label)


def _total(total: Tensor, packed: Rows) -> Tensor:
    """``total``, or NaN where a label is bad."""
    return torch.where(packed.n_valid < 0, math.nan, total)
