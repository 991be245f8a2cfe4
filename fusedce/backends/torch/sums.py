"""The torch backend: sums of losses with their gradients, by chunks of logits that are held.

Every loss goes this way, an :class:`Objective` each: of labels, beside a teacher, beside given
probabilities. With a sharded vocabulary the walk is over this rank's rows, and the ranks merge
between its two looks (:mod:`fusedce.backends.shards.merge`). Its rows of the weight gradient are
complete, its part of ``d_hidden`` is added to the others' while the next chunk is computed. In
float32: bfloat16 halves the traffic, and makes the error 1.4 times that of torch's whole bfloat16
loss on 2 ranks, 1.8 on 4, 2.3 on 8.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.backends import two_passes
from fusedce.backends.gradients import Gradients, call_of, waiting
from fusedce.backends.plan import TILES, Call, Way, way_of, way_of_divergence
from fusedce.backends.protocol import Summed
from fusedce.backends.shards.collectives import (
    RunningSums,
    all_tokens,
    gather_tokens,
    of_all_tokens,
    of_classes,
    sharded_call,
)
from fusedce.backends.shards.merge import Merge
from fusedce.backends.torch.cross_entropy import SumOfLosses, token_grads, token_stats
from fusedce.backends.torch.divergence import compared
from fusedce.backends.torch.logit_tiles import Logits
from fusedce.backends.torch.products import Products
from fusedce.backends.torch.rows import Rows, as_slice, chunks_of, counted_rows, valid_rows
from fusedce.backends.torch.walk import by_chunks
from fusedce.contract.divergence import Divergence
from fusedce.contract.objective import expected_upstream
from fusedce.contract.problem import Problem, Projection
from fusedce.contract.task import Shard, Task


class _Part(NamedTuple):
    """What this rank walks over: all of it, unless the vocabulary is sharded."""

    problem: Problem  # of the classes here
    divergence: Divergence | None
    rows: Tensor  # positions of the tokens that count, among all ranks'
    n_valid: Tensor
    call: Call
    chunks: list[Rows]  # of tokens as `problem` has them
    way: Way
    V: int
    first: int = 0


def loss_and_grads(task: Task, argmax: Tensor | None = None) -> Summed:
    """The sum and its wanted gradients; holds the logits of one chunk."""
    return _summed(task, argmax, None)


def divergence_and_grads(task: Task) -> Summed:
    """Each token's loss, and the wanted gradients of their sum; holds each head's logits."""
    losses = task.problem.hidden.new_zeros(len(task.problem.labels), dtype=_acc(task))
    summed = _summed(task, None, losses)
    return summed._replace(loss=losses)


def _acc(task: Task) -> torch.dtype:
    return Projection.of(task.problem).acc


def _kept(task: Task) -> torch.dtype:
    """Of what waits for its gradient: logits, or exponentials that the gradient rounds anyway."""
    problem, products = task.problem, Products.of(task.problem.hidden)
    exponentials = task.divergence is None and problem.softcap is None and not task.wanted.argmax
    return products.gradients if exponentials else products.acc


def _summed(task: Task, argmax: Tensor | None, losses: Tensor | None) -> Summed:
    asked, wanted, divergence, shard = task
    part = _whole(task) if shard is None else _here(task, shard)
    if part.way.name == TILES:
        return two_passes.loss_and_grads(token_stats, token_grads, asked, wanted, argmax)
    problem, way = part.problem, part.way
    grads = Gradients(
        problem.but(weight=asked.weight, bias=asked.bias), wanted, dtypes=waiting(asked),
        chunks=len(part.chunks),
    )  # fmt: skip
    factor = expected_upstream(asked, part.n_valid)
    total = torch.where(part.n_valid < 0, math.nan, 0.0).double()  # a bad label: see LossSum
    sums = None
    if shard is not None:
        sums = RunningSums(grads.hidden if shard.tokens is None else None, shard.group)
    n = len(problem.hidden)
    found = None if losses is None else losses.new_zeros(n)
    best = None if argmax is None else argmax.new_full((n,), -1)
    make: Any = SumOfLosses
    if part.divergence is not None:
        make = compared(part.divergence, part.call, way)

    def objective(chunk: Rows, h: Tensor) -> Any:
        merge = None
        if shard is not None and sums is not None:
            assert isinstance(chunk, slice)
            merge = Merge(shard, sums, chunk.start)
        return make(
            problem.rows(chunk), chunk, problem.labels[chunk].long(), factor,
            first=part.first, V=part.V, merge=merge, argmax=argmax is not None,
        )  # fmt: skip

    def written(of: Any) -> None:
        lost = of.losses()
        if found is None:
            total.add_(lost.sum())
        else:
            found[of.rows] = lost.to(found.dtype)
        if best is not None:
            best[of.rows] = of.seen.mass.best

    head = Projection.of(problem) if divergence is None else divergence.student(problem)
    logits = Logits(head, Products.of(problem.hidden))
    of_here = grads if shard is None else of_classes(grads, shard.real(asked))
    kept = _kept(task)
    by_chunks(problem, logits, part.chunks, way, of_here, objective, written, kept)
    if sums is not None:
        sums.wait()
    d_hidden, d_weight, d_bias = grads.written()
    if shard is None:
        of_tokens = [(losses, found), (argmax, best)]
    else:
        n_here, N = len(asked.hidden), _tokens(asked, shard)
        if wanted.hidden:
            d_hidden = of_all_tokens(d_hidden, part.rows, N, n_here, shard)
        of_tokens = [
            (out, None if x is None else _own(x, part.rows, N, n_here, shard, fill))
            for out, x, fill in ((losses, found, 0), (argmax, best, -1))
        ]
    for out, x in of_tokens:
        if out is not None and x is not None:
            out.copy_(x)
    return Summed(total.to(logits.head.acc), part.n_valid, factor, d_hidden, d_weight, d_bias)


def _tokens(problem: Problem, shard: Shard) -> int:
    """The number of all ranks' tokens, padding included."""
    if shard.tokens is None:
        return len(problem.hidden)
    return max(shard.tokens) * len(shard.tokens)


def _own(x: Tensor, rows: Tensor, N: int, n_here: int, shard: Shard, fill: int) -> Tensor:
    every = x.new_full((N,), fill)
    every[rows] = x
    return shard.own(every, n_here)


def _way(task: Task, call: Call) -> Way:
    problem, divergence = task.problem, task.divergence
    asked = {"chunk_tokens": problem.chunk_tokens, "memory_budget": problem.memory_budget}
    if divergence is None:
        return way_of(call, **asked)
    return way_of_divergence(call, divergence.teacher_size(), **asked)


def _whole(task: Task) -> _Part:
    problem, wanted, divergence, _ = task
    rows, n_valid = valid_rows(problem)
    logit = None if divergence is not None else _kept(task).itemsize
    call = call_of(problem, wanted, len(rows), waiting(problem), logit=logit)
    way = _way(task, call)
    way = way._replace(tokens=min(way.tokens, max(len(rows), 1)))
    chunks = [as_slice(chunk) for chunk in chunks_of(rows, way.tokens)]
    return _Part(problem, divergence, rows, n_valid, call, chunks, way, len(problem.weight))


def _here(task: Task, shard: Shard) -> _Part:
    """The tokens that count, of all ranks, and this rank's classes."""
    problem, _, divergence, _ = task
    real = shard.real(problem)
    if shard.tokens is not None:
        problem = all_tokens(problem, max(shard.tokens), shard.group)
    rows, n_valid = counted_rows(problem, shard)
    call = sharded_call(problem, shard, len(problem.hidden))
    way = _way(task, call)
    here = problem.rows(rows).but(
        hidden=problem.hidden[rows], labels=problem.labels[rows], weight=problem.weight[:real],
        bias=None if problem.bias is None else problem.bias[:real],
    )  # fmt: skip
    if divergence is not None and divergence.probabilities is not None:
        divergence = divergence.but(probabilities=divergence.probabilities[rows])
        if problem.class_weight is not None:
            here = here.but(class_weight=problem.class_weight[shard.first : shard.first + real])
    if divergence is not None and divergence.hidden is not None and divergence.weight is not None:
        hidden, bias = divergence.hidden, divergence.bias
        if shard.tokens is not None:
            hidden = gather_tokens(hidden, max(shard.tokens), 0, shard.group)
        divergence = divergence.but(
            hidden=hidden[rows], weight=divergence.weight[:real],
            bias=None if bias is None else bias[:real],
        )  # fmt: skip
    chunks: list[Rows] = [
        slice(i, min(i + way.tokens, len(rows))) for i in range(0, len(rows), way.tokens)
    ]
    return _Part(here, divergence, rows, n_valid, call, chunks, way, shard.V, shard.first)
