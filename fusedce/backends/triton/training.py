"""Host side of the training pass: a chunk's exponentials, a factor a row, two more products.

A chunk holds its exponentials in the inputs' dtype; float32 logits exist for one tile of the
vocabulary at a time. The number of valid tokens is read once, since the host sets the sizes of
cuBLAS's products; inside a CUDA graph, which nothing may wait for, all rows are computed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedce.backends import two_passes
from fusedce.backends.gradients import Gradients, call_of, waiting
from fusedce.backends.plan import TILES, way_of
from fusedce.backends.protocol import Summed
from fusedce.backends.triton.chunks import Chunks, RowFactors
from fusedce.backends.triton.exponentials import gemm_blocks
from fusedce.backends.triton.forward import token_stats
from fusedce.backends.triton.head_gradients import add_head_gradients
from fusedce.backends.triton.launch import Rows, capturing, compact, on, raise_on_cpu, span
from fusedce.backends.triton.vocab_tiles import token_grads
from fusedce.contract.problem import Problem, Wanted


def loss_and_grads(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Summed:
    """The sum and its wanted gradients; holds the exponentials of one chunk."""
    N = len(problem.hidden)
    device = problem.hidden.device
    problem = walkable(problem)
    with on(device):
        packed, dtypes = compact(problem), waiting(problem)
        raise_on_cpu(packed.n_valid, problem)
        graph = capturing(device)
        if graph:
            n, outer, factor = N, 1.0, torch.ones_like(packed.loss_sum)
        else:
            n, outer, factor = rows_and_factor(problem, packed)
        gemm = gemm_blocks(problem)
        block = 0 if gemm is None else gemm.BLOCK_V
        way = way_of(
            call_of(problem, wanted, n, dtypes, triton=True, gemm_block=block),
            chunk_tokens=problem.chunk_tokens,
            memory_budget=problem.memory_budget,
        )
        if way.name == TILES:
            passes = token_stats, token_grads
            return two_passes.loss_and_grads(*passes, problem, wanted, argmax)
        C = min(way.tokens, n)
        every_row = n == N and not graph
        grads = Gradients(
            problem,
            wanted,
            dtypes=dtypes,
            chunks=-(-n // C) if n else 0,
            every_row=every_row,
        )
        if argmax is not None and not every_row:
            argmax.fill_(-1)
        if n == 0:
            return Summed(packed.loss_sum, packed.n_valid, factor, *grads.written())
        chunks = Chunks(problem, C, of_weight=wanted.weight)
        options = None if problem.plain() else RowFactors(problem)
        losses = add_chunks(
            problem, chunks, packed, n, C, grads, options, argmax,
            outer=outer, every_row=every_row, graph=graph,
        )  # fmt: skip
        total = losses.sum(dtype=torch.float64).float()
        return Summed(total, packed.n_valid, factor, *grads.written())


def walkable(problem: Problem) -> Problem:
    """The problem with contiguous labels, and hidden states whose rows have stride 1."""
    hidden, labels = problem.hidden, problem.labels.contiguous()
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    if labels is problem.labels and hidden is problem.hidden:
        return problem
    return problem.but(hidden=hidden, labels=labels)


def add_chunks(
    problem: Problem,  # whose labels are rows of the weight
    chunks: Chunks,
    packed: Rows,
    n: int,  # rows that are computed
    C: int,  # of a chunk
    grads: Gradients,  # to add to; hidden is written
    options: RowFactors | None,
    argmax: Tensor | None,  # (N,) int64 to fill
    *,
    outer: float,  # a factor
    every_row: bool,  # all are computed, in their order
    graph: bool = False,
    d_rows: Tensor | None = None,  # (n, H) fp32 to write, in place of grads.hidden
    written: Callable[[int], None] | None = None,  # called with the number of rows written so far
) -> Tensor:
    """``(n,)`` fp32 losses of the rows, chunk by chunk, with their gradients."""
    hidden, labels, device = problem.hidden, problem.labels, problem.hidden.device
    rows, count = packed.rows, packed.used
    losses = torch.empty(n, dtype=torch.float32, device=device)
    d_hidden, positions = grads.hidden, rows
    if d_rows is not None:
        d_hidden, positions = d_rows, torch.arange(n, dtype=torch.int32, device=device)
    for begin in range(0, n, C):
        end = min(begin + C, n)
        chunk: Tensor | slice = slice(begin, end)
        if every_row:
            h, y = span(hidden, begin, end), span(labels, begin, end)  # (C, H), (C,)
        else:
            chunk = rows[chunk].long()
            h, y = hidden[chunk], labels[chunk]
        nll = span(losses, begin, end)
        padding = None
        if graph:  # ignored rows take part, as zeros
            padding = torch.arange(begin, end, device=device) >= count
            h = h.masked_fill(padding[:, None], 0)
        factors = None if options is None else options.chunk(chunk, y, padding)
        gradient = chunks.gradient(h, y, nll, count, begin, factors, argmax, rows)
        if factors is not None:
            nll.copy_(factors.losses(nll))
        if d_hidden is not None:
            chunks.hidden_gradient(gradient, positions, begin, d_hidden, outer)
            if written is not None:
                written(end)
        add_head_gradients(chunks, grads, gradient, h, outer, first=begin == 0)
    return losses


def rows_and_factor(problem: Problem, packed: Rows) -> tuple[int, float, Tensor]:
    """Number of rows used, and :func:`expected_upstream` as a number and a tensor.

    This is the one host synchronisation. The factor of :meth:`LossSum.mean` is computed on the host
    from the count that is read: the same number as on the device, without a launch to wait for.
    """
    expected = problem.expected_upstream
    if expected is None:
        n, n_valid = torch.stack([packed.used, packed.n_valid]).tolist()
        outer = 1.0 / max(n_valid, 1)
        return n, outer, torch.full_like(packed.loss_sum, outer)
    n, outer = torch.stack([packed.used, expected.double()]).tolist()
    return int(n), outer, expected.clone()
