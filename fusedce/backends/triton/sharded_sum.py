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
from fusedce.backends.triton.chunks import Chunks, RowFactors
from fusedce.backends.triton.exponentials import Peers, label_logits
from fusedce.backends.triton.launch import Rows, compact, on, pointwise, raise_on_cpu
from fusedce.backends.triton.training import add_chunks, walkable
from fusedce.contract.objective import expected_upstream
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.task import Shard

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
        grads = Gradients(
            problem,
            wanted.but(hidden=False),
            dtypes=waiting(problem),
            chunks=-(-n // C) if n else 0,
        )
        every = None
        if argmax is not None:  # of all ranks' tokens
            every = argmax if shard.tokens is None else argmax.new_empty(N)
            every.fill_(-1)
        rows = packed.rows[:n].long()
        d_rows = problem.hidden.new_empty(n, H, dtype=torch.float32) if wanted.hidden else None
        sums = RunningSums(d_rows, shard)
        total = packed.loss_sum
        if n:
            peers = _peers(problem, local, rows, shard)
            chunks = Chunks(local, C, of_weight=wanted.weight, peers=peers)
            options = None if problem.plain() else RowFactors(local, shard.V)
            real = shard.real(problem)
            head_gradients = of_classes(grads, real)
            if not real:  # the row of zeros needs memory for a gradient, which is not read
                of_zeros = problem.hidden.new_empty(1, H)
                head_gradients.weight = of_zeros if grads.weight is not None else None
                head_gradients.bias = None
            losses = add_chunks(
                local, chunks, packed, n, C, head_gradients, options, every,
                outer=1.0 / max(shard.valid, 1), every_row=n == N, d_rows=d_rows,
                written=sums.start,
            )  # fmt: skip
            total = losses.sum(dtype=torch.float64).float()
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
    bias = None if bias is None else bias.contiguous()
    here = (y >= shard.first) & (y < shard.first + real)
    return problem, problem.but(
        weight=weight[:real] if real else weight.new_zeros(1, weight.shape[1]),
        bias=bias[:real] if real and bias is not None else None,
        labels=torch.where(here, y - shard.first, _NOWHERE),
    )


def _peers(problem: Problem, local: Problem, rows: Tensor, shard: Shard) -> Peers:
    """The labels' logits of all ranks. Collectives: one all-reduce of a float32 a token."""
    y, empty = problem.labels[rows], not shard.real(problem)
    z_label = torch.zeros(len(rows), dtype=torch.float32, device=y.device)
    if not empty:
        of_rows = local.labels[rows]
        label_logits(local.hidden, local.weight, of_rows, z_label, pointwise(local), rows.int())
        z_label.masked_fill_(of_rows == _NOWHERE, 0)
    all_reduce(z_label, shard.group)  # of one number and zeros: exact
    return Peers(shard, y, _known(z_label, y, shard), empty=empty)


def _known(z_label: Tensor, y: Tensor, shard: Shard) -> Tensor:
    """``z_label`` with NaN where a label is no class; the sums over ranks have 0 there."""
    return z_label.masked_fill((y < 0) | (y >= shard.V), math.nan)


def _total(total: Tensor, packed: Rows) -> Tensor:
    """``total``, or NaN where a label is bad."""
    return torch.where(packed.n_valid < 0, math.nan, total)
