"""The sum of the losses on a sharded vocabulary, in plain torch; it tests the Triton path.

It is the walk of an unsharded sum over this rank's rows, with an all-gather of each chunk's
statistics in between: a rank is merged as a tile is. Its rows of the weight gradient are complete,
its part of ``d_hidden`` is added to the others' while the next chunk is computed. In float32:
bfloat16 halves the traffic, and makes the error 1.4 times that of torch's whole bfloat16 loss on 2
ranks, 1.8 on 4, 2.3 on 8.
"""

from __future__ import annotations

import functools
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
from fusedce.backends.torch.cross_entropy import Seen, SumOfLosses, merged
from fusedce.backends.torch.logit_tiles import Logits
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.walk import by_chunks
from fusedce.contract.objective import expected_upstream
from fusedce.contract.problem import Problem, Projection, Wanted


def loss_and_grads(problem: Problem, shard: Shard, wanted: Wanted) -> Summed:
    """The sum over all ranks' tokens in nats, and the wanted gradients of this rank's inputs."""
    n_here = len(problem.hidden)
    if shard.tokens is not None:
        problem = all_tokens(problem, max(shard.tokens), shard.group)
    rows, n_valid = counted_rows(problem, shard)
    way, real = sharded_way(problem, shard), shard.real(problem)
    counted = problem.rows(rows).but(hidden=problem.hidden[rows], labels=problem.labels[rows])
    here = counted.but(
        weight=problem.weight[:real], bias=None if problem.bias is None else problem.bias[:real]
    )
    chunks = [slice(i, min(i + way.tokens, len(rows))) for i in range(0, len(rows), way.tokens)]
    grads = Gradients(counted, wanted, dtypes=waiting(problem), chunks=len(chunks))
    factor = expected_upstream(problem, n_valid)
    total = torch.where(n_valid < 0, math.nan, 0.0).double()  # a bad label: see LossSum
    sums = RunningSums(grads.hidden if shard.tokens is None else None, shard.group)

    def objective(chunk: slice, h: Tensor) -> SumOfLosses:
        def merge(seen: Seen) -> None:
            over_ranks(seen, shard)
            sums.start(chunk.start)  # after small messages, which must not wait for it

        labels = counted.labels[chunk].long()
        return SumOfLosses(
            here.rows(chunk), chunk, labels, factor, first=shard.first, V=shard.V, merge=merge
        )

    def written(of: SumOfLosses) -> None:
        total.add_(of.losses.sum())

    logits = Logits(Projection.of(here), Products.of(here.hidden))
    by_chunks(here, logits, chunks, way, of_classes(grads, real), objective, written)
    sums.wait()
    d_hidden, d_weight, d_bias = grads.written()
    if wanted.hidden:
        d_hidden = of_all_tokens(d_hidden, rows, len(problem.hidden), n_here, shard)
    return Summed(total.to(logits.head.acc), n_valid, factor, d_hidden, d_weight, d_bias)


def over_ranks(seen: Seen, shard: Shard) -> None:
    """Merge the ranks' statistics. Collectives: one all-gather of 3 float64 a token, or 4."""
    mine = [*seen.mass[:2], seen.z_label.double(), *([] if seen.zsum is None else [seen.zsum])]
    table = all_gather(torch.stack(mine), shard.group).view(-1, len(mine), len(seen.y))
    masses = (seen.mass._replace(top=one[0], rest=one[1]) for one in table)
    seen.mass = functools.reduce(merged, masses)
    seen.z_label = table[:, 2].amax(0)
    if seen.zsum is not None:
        seen.zsum = table[:, 3].sum(0)
