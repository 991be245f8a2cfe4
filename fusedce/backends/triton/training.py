"""Host side of the training pass: a chunk's exponentials, a factor a row, two more products.

A chunk holds its exponentials in the inputs' dtype; float32 logits exist for one tile of the
vocabulary at a time. The number of valid tokens is read once, since the host sets the sizes of
cuBLAS's products; inside a CUDA graph, which nothing may wait for, all rows are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.backends import two_passes
from fusedce.backends.gradients import Gradients, call_of, waiting
from fusedce.backends.plan import TILES, way_of
from fusedce.backends.protocol import Summed
from fusedce.backends.triton.chunks import Chunks, Losses, gemm_blocks
from fusedce.backends.triton.forward import token_stats
from fusedce.backends.triton.head_gradients import add_head_gradients
from fusedce.backends.triton.launch import Rows, capturing, compact, on, raise_on_cpu, span
from fusedce.backends.triton.vocab_tiles import token_grads
from fusedce.contract.problem import Problem, Wanted


def loss_and_grads(problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Summed:
    """The sum and its wanted gradients; holds the exponentials of one chunk."""
    hidden, labels = problem.hidden, problem.labels.contiguous()
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    problem, N, device = problem.but(hidden=hidden, labels=labels), len(hidden), hidden.device
    with on(device):
        packed, dtypes = compact(problem), waiting(problem)
        raise_on_cpu(packed.n_valid, problem)
        n, outer, factor = rows_and_factor(problem, packed)
        gemm = gemm_blocks(problem, wanted)
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
        every_row = n == N and not capturing(device)
        grads = Gradients(
            problem, wanted, dtypes=dtypes, chunks=-(-n // C) if n else 0, every_row=every_row
        )
        if argmax is not None and not every_row:
            argmax.fill_(-1)
        total = packed.loss_sum
        if n:
            chunks = Chunks(problem, C, wanted)
            total = _add_chunks(chunks, packed, n, C, grads, argmax, outer=outer)
        return Summed(total, packed.n_valid, factor, *grads.written())


def _add_chunks(
    chunks: Chunks,
    packed: Rows,
    n: int,  # rows that are computed
    C: int,  # of a chunk
    grads: Gradients,  # to add to; hidden is written
    argmax: Tensor | None,  # (N,) int64 to fill
    *,
    outer: float,  # a factor
) -> Tensor:
    """``()`` fp32 sum of the rows' losses, with their gradients, chunk by chunk."""
    problem, rows = chunks.problem, packed.rows
    hidden, labels, device = problem.hidden, problem.labels, rows.device
    graph = capturing(device)
    used: Tensor | None = None
    if graph or n < len(rows):
        used = rows[:n].long()
        labels = labels[used]
        problem = problem.rows(used)
    # Inside a graph ignored rows take part, as zeros.
    padding = torch.arange(n, device=device) >= packed.used if graph else None
    losses = Losses(problem, labels, packed, argmax, chunks)
    for begin in range(0, n, C):
        end = min(begin + C, n)
        y = span(labels, begin, end)  # (C,)
        h = span(hidden, begin, end) if used is None else hidden[used[begin:end]]  # (C, H)
        if padding is not None:
            h = h.masked_fill(padding[begin:end, None], 0)
        gradient = chunks.gradient(h, y, losses, begin)
        if grads.hidden is not None:
            chunks.hidden_gradient(gradient, rows, begin, grads.hidden, outer)
        add_head_gradients(chunks, grads, gradient, h, outer, first=begin == 0)
    return losses.total(padding)


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
