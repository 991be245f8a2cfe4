"""The torch backend, token by token: statistics of the logits, and their gradients.

Each token has an upstream factor of its own, known only in backward. So the logits are computed a
second time, unless all of them fit into what a chunk may hold: then forward keeps them. With the
log-sum-exp known, work goes by *tiles of the vocabulary*: a tile of logits becomes its
own gradient in place, and one product of it with the hidden states gives these rows of the weight
gradient, complete and rounded once. Parts of ``d_hidden`` are added up in float32 or better. Inside
a tile, work goes by blocks of tokens.

The label's entry, far larger than the others, leaves its tile before that is rounded to bfloat16:
what it adds to both gradients is added in float32.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.backends.gradients import (
    Dtypes,
    Gradients,
    add_rows,
    check_budget,
    memory_of,
    sizes_of,
)
from fusedce.backends.plan import CPU_BUDGET, device_budget, most_classes, plan_tiles
from fusedce.backends.torch.logit_tiles import (
    Logits,
    Rows,
    TileStats,
    blocks_of,
    column_sums,
    exp_,
    label_entry,
    tiles,
    write_labels,
)
from fusedce.contract.labels import used_tokens
from fusedce.contract.objective import LogitGrad, Stats
from fusedce.contract.problem import Outputs, Problem, Projection, acc_dtype

_LOWEST = -1e4  # nats: a probability of 0, in float64 too


_kept: collections.Counter[torch.device] = collections.Counter()  # bytes of live kept logits


def room_for_logits(problem: Problem) -> Tensor | None:
    """``(V, N)``, if finished logits of all positions take no more than a chunk's by default.

    What calls before it have kept counts as well: many may wait for one backward.
    """
    N, V, acc = len(problem.labels), len(problem.weight), acc_dtype(problem.hidden.dtype)
    device, size = problem.hidden.device, N * V * acc.itemsize
    limited = problem.memory_budget is not None or problem.chunk_tokens is not None
    budget = CPU_BUDGET if device.type == "cpu" else device_budget(memory_of(device))
    if limited or _kept[device] + size > budget:
        return None
    kept = torch.empty(V, N, dtype=acc, device=device)
    _kept[device] += size
    weakref.finalize(kept, _kept.subtract, {device: size})
    return kept


def token_stats(
    problem: Problem, wanted: Outputs, argmax: Tensor | None, kept: Tensor | None = None
) -> Stats:
    """One pass over the logits; holds one tile of them, and fills ``kept (V, N)``."""
    N, V = len(problem.labels), problem.weight.shape[0]
    used, n_valid = used_tokens(problem)
    rows = used.nonzero()[:, 0]
    logits = Logits(Projection.of(problem))
    head = logits.head
    device = problem.hidden.device

    def out(wanted: bool, dtype: torch.dtype = head.acc) -> Tensor:
        return torch.zeros(N if wanted else 0, dtype=dtype, device=device)

    lses = out(wanted.lse, torch.float64)
    stats = Stats(out(True), lses, out(wanted.entropy), out(wanted.zmean), n_valid)
    if argmax is not None:
        argmax.fill_(-1)
        stats = stats._replace(top=out(True))
    c = None if problem.class_weight is None else problem.class_weight.to(head.acc)
    check_budget(problem, sizes_of(problem, wanted, len(rows)))
    plan = plan_tiles(sizes_of(problem, Outputs(), len(rows)), memory_budget=problem.memory_budget)
    for block in blocks_of(rows, plan.tokens):
        h = logits.operand(problem.hidden[block])  # (R, H)
        y = problem.labels[block].long()
        seen = TileStats(y, head.acc, argmax=argmax is not None, entropy=wanted.entropy)
        zmean = torch.zeros(len(h), dtype=torch.float64, device=device)
        temperature = None if problem.temperature is None else problem.temperature[block]
        for begin, end in tiles(V, plan.classes):
            z = logits.tile(h, begin, end)  # (v, R)
            if kept is not None:
                kept[begin:end, block] = z
            if temperature is not None:
                z.div_(temperature)
            if wanted.zmean:
                zmean += column_sums(z, None if c is None else c[begin:end])
            seen.add(z, begin)
        if wanted.entropy:
            nll, lse, entropy = seen.with_entropy()
            stats.entropy[block] = entropy.to(head.acc)
        else:
            nll, lse = seen.losses(), seen.lse()
        stats.nll[block] = nll.to(head.acc)
        if wanted.lse:
            stats.lse[block] = lse
        if wanted.zmean:
            stats.zmean[block] = (zmean / V).to(head.acc)
        if argmax is not None and stats.top is not None:
            argmax[block], stats.top[block] = seen.likeliest()
    return stats


def token_grads(
    problem: Problem,
    wanted: Outputs,
    lse: Tensor,  # (N,)
    upstream: LogitGrad,
    dtypes: Dtypes,
    kept: Tensor | None = None,  # (V, N) finished logits
) -> tuple[Tensor, Tensor, Tensor]:
    """The wanted gradients, from logits ``kept`` or computed anew; holds one tile of them."""
    V, H = problem.weight.shape
    logits = Logits(Projection.of(problem))
    products = logits.products
    acc, gemm = products.acc, products.operands
    rows = (problem.valid() & upstream.used).nonzero()[:, 0]
    call = sizes_of(problem, wanted, len(rows), dtypes)
    plan = plan_tiles(call, chunk_tokens=problem.chunk_tokens, memory_budget=problem.memory_budget)
    classes = plan.classes
    if kept is not None:  # nothing is multiplied again, so no bits depend on the tile
        classes = most_classes(call.limits, min(plan.tokens, len(rows)))
    grads = Gradients(problem, wanted, dtypes=dtypes, chunks=len(rows), by_tiles=True)
    blocks = [_Block.of(problem, b, lse, upstream) for b in blocks_of(rows, plan.tokens)]
    sums = None  # (T, H), of a tile's rows of the weight gradient
    if grads.weight is not None and grads.weight.dtype != acc and blocks:
        sums = torch.empty(min(classes, V), H, dtype=acc, device=grads.weight.device)
    for begin, end in tiles(V, classes if blocks else V):
        of_tile = None if grads.weight is None else grads.weight[begin:end]
        d_weight = of_tile if sums is None else sums[: end - begin]
        for number, block in enumerate(blocks):
            hidden = problem.hidden[block.rows]  # (R, H)
            if kept is None:
                z = logits.tile(logits.operand(hidden), begin, end)  # (v, R)
            else:  # (a copy: the graph may be retained)
                z = logits.copy(kept[begin:end], block.rows)
            g = _gradient(problem, logits.head, block, z, begin)
            if grads.bias is not None:
                grads.bias[begin:end] += g.sum(1)
            tokens = ((block.y >= begin) & (block.y < end)).nonzero()[:, 0]
            y = block.y[tokens] - begin
            entries = g[y, tokens][:, None]  # of the labels, added apart
            g[y, tokens] = 0
            g = g.to(gemm)
            if grads.hidden is not None:
                w = logits.rows(begin, end, gemm)
                of_labels = w[y] * entries
                if isinstance(block.rows, slice):
                    products(g.t(), w, grads.hidden[block.rows], add=True)[tokens] += of_labels
                else:
                    added = torch.empty_like(hidden, dtype=acc)
                    products(g.t(), w, added)[tokens] += of_labels
                    grads.hidden.index_add_(0, block.rows, added)  # (some rows are there twice)
            if d_weight is not None:
                products(g, hidden.to(gemm), d_weight, add=number > 0)
                add_rows(d_weight, y, hidden[tokens] * entries)
        if of_tile is not None and d_weight is not None and d_weight is not of_tile:
            of_tile.copy_(d_weight)  # rounded once
    return grads.cast_out()


class _Block(NamedTuple):
    """A block of tokens: where they are, and the factors of their gradient, (R,) each."""

    rows: Rows
    y: Tensor  # labels; one that is no row of weight has no entry
    lse: Tensor
    by: LogitGrad  # of these tokens, in the dtype of logits; of further classes (K, R)
    temperature: Tensor | None

    @classmethod
    def of(cls, problem: Problem, rows: Rows, lse: Tensor, upstream: LogitGrad) -> _Block:
        """``rows`` that repeat the one before them (see `blocks_of`) have factors of 0."""
        acc, again = acc_dtype(problem.hidden.dtype), None
        if isinstance(rows, Tensor):
            again = torch.zeros_like(rows, dtype=torch.bool)
            again[1:] = rows[1:] == rows[:-1]

        def factor(x: Tensor | None) -> Any:
            if x is None or not x.is_floating_point():
                return x if x is None else x[rows].t()
            x = x[rows].t().to(acc)
            return x if again is None else x.masked_fill_(again, 0)

        y, temperature = problem.labels[rows].long(), problem.temperature
        if temperature is not None:
            temperature = temperature[rows]
        return cls(rows, y, lse[rows].to(acc), LogitGrad(*map(factor, upstream)), temperature)


def _gradient(problem: Problem, head: Projection, block: _Block, z: Tensor, begin: int) -> Tensor:
    """``(v, R)``, in place of ``z``: derivative by the products of classes from ``begin`` on."""
    slope = head.slope(z)
    if block.temperature is not None:
        z.div_(block.temperature)
    log_p = z.sub_(block.lse)
    by = block.by
    if by.beta is None:
        g = exp_(log_p).mul_(by.alpha)
    else:  # (p is 0 where log p is so low, and 0 times any number is 0)
        g = exp_(log_p.clone())
        g.mul_(log_p.clamp_(min=_LOWEST).mul_(-by.beta).add_(by.alpha))
    if by.gamma is not None:
        if problem.class_weight is None:
            g.add_(by.gamma)
        else:
            g.addr_(problem.class_weight[begin : begin + len(g)].to(g.dtype), by.gamma)
    write_labels(g, block.y, begin, by.at_label)
    if slope is not None:
        g.mul_(slope)
    if head.scale != 1.0:
        g.mul_(head.scale)
    if by.classes is not None and by.at_classes is not None:
        at, inside = label_entry(by.classes, begin, len(g))
        entries = by.at_classes.masked_fill(~inside, 0)
        # A class may stand twice in a token's labels. Elsewhere than on a CPU one operation would
        # add the two in any order.
        step = len(at) if g.device.type == "cpu" else 1
        for some, x in zip(at.split(step), entries.split(step), strict=True):
            g.scatter_add_(0, some, x)
    return g
