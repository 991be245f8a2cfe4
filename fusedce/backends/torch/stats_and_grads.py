"""The torch backend, token by token: statistics of the logits, and their gradients.

Each token has an upstream factor of its own, known only in backward. So the logits are computed a
second time, unless all of them fit into what a chunk may hold: then forward keeps them. With the
log-sum-exp known, work goes by *tiles of the vocabulary*: a tile of logits becomes its
own gradient in place, and one product of it with the hidden states gives these rows of the weight
gradient, complete and rounded once. Parts of ``d_hidden`` are added up in float32 or better. Inside
a tile, work goes by blocks of tokens.

The label's entry, far larger than the others, leaves its tile before that is rounded to two bytes:
what it adds to both gradients is added in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract.labels import used_tokens
from ...contract.objective import LogitGrad, Stats
from ...contract.problem import ACC_DTYPE, Outputs, Problem, Projection
from ..devices import memory_of
from ..gradients import (
    Dtypes,
    Gradients,
    allocate,
    check_budget,
    sizes_of,
)
from ..plan import CPU_BUDGET, by_tiles, device_budget, most_classes, plan_tiles
from .logit_tiles import (
    Logits,
    Rows,
    TileLabels,
    TileStats,
    add_at,
    blocks_of,
    column_sums,
    exp_,
    filled,
    tiles,
)
from .products import on_cpu

_KEPT_TOKENS = 2048  # whose logits are kept on a device, or a quarter of all
_LOWEST = -1e4  # nats: a probability of 0, in float64 too


def room_for_logits(problem: Problem) -> Tensor | None:
    """``(V, N)``, if finished logits of all positions take no more than a chunk's by default."""
    N, V, acc = len(problem.labels), len(problem.weight), ACC_DTYPE[problem.hidden.dtype]
    device, size = problem.hidden.device, N * V * acc.itemsize
    limited = problem.memory_budget is not None or problem.chunk_tokens is not None
    budget = CPU_BUDGET
    if not on_cpu(problem.hidden):  # as a chunk's by default
        chunk = max(-(-N // 4), _KEPT_TOKENS) * V * problem.hidden.element_size()
        budget = min(device_budget(memory_of(device)), chunk)
    if limited or size > budget:
        return None
    return torch.empty(V, N, dtype=acc, device=device)


def token_stats(
    problem: Problem, wanted: Outputs, argmax: Tensor | None, kept: Tensor | None = None
) -> Stats:
    """One pass over the logits; holds one tile of them, and fills ``kept (V, N)``."""
    N, V = len(problem.labels), problem.weight.shape[0]
    used, n_valid = used_tokens(problem)
    rows = used.nonzero()[:, 0]
    check_budget(problem, sizes_of(problem, wanted, len(rows)))
    plan = plan_tiles(sizes_of(problem, Outputs(), len(rows)), memory_budget=problem.memory_budget)
    logits = Logits(Projection.of(problem), plan)
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
    for block in blocks_of(rows, plan.tokens, N):
        h = logits.operand(filled(problem.hidden[block]))  # (R, H)
        y = filled(problem.labels[block].long())
        n = len(problem.labels[block])  # (the rows from here on are the last one, again)
        labels = TileLabels(y, V, plan.classes)
        seen = TileStats(labels, head.acc, argmax=argmax is not None, entropy=wanted.entropy)
        zmean = torch.zeros(len(h), dtype=torch.float64, device=device)
        temperature = None if problem.temperature is None else filled(problem.temperature[block])
        for begin, end in tiles(V, plan.classes):
            z = logits.tile(h, begin, end)  # (v, R)
            if kept is not None:
                kept[begin:end, block] = z[:, :n]
            if temperature is not None:
                z.div_(temperature)
            if wanted.zmean:
                zmean += column_sums(z, None if c is None else c[begin:end])
            seen.add(z, begin)
        if wanted.entropy:
            nll, lse, entropy = seen.with_entropy()
            stats.entropy[block] = entropy[:n].to(head.acc)
        else:
            nll = seen.losses()
            lse = seen.lse() if wanted.lse else nll
        stats.nll[block] = nll[:n].to(head.acc)
        if wanted.lse:
            stats.lse[block] = lse[:n]
        if wanted.zmean:
            stats.zmean[block] = (zmean[:n] / V).to(head.acc)
        if argmax is not None and stats.top is not None:
            argmax[block], stats.top[block] = (x[:n] for x in seen.likeliest())
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
    V = len(problem.weight)
    rows = (problem.valid() & upstream.used).nonzero()[:, 0]
    call = sizes_of(problem, wanted, len(rows), dtypes)
    plan = plan_tiles(call, chunk_tokens=problem.chunk_tokens, memory_budget=problem.memory_budget)
    if kept is not None:  # nothing is multiplied again, so no bits depend on the tile
        most = most_classes(call.limits, min(plan.tokens, len(rows)))
        plan = by_tiles(call, plan.tokens, most)
    classes, logits = plan.classes, Logits(Projection.of(problem), plan)
    products = logits.products
    acc, operands = products.acc, products.operands
    grads = Gradients(problem, wanted, dtypes=dtypes, chunks=len(rows), by_tiles=True)
    units = _units(problem, upstream) if operands == torch.float16 else None
    blocks = [
        _Block.of(problem, block, lse, upstream, units, classes)
        for block in blocks_of(rows, plan.tokens, len(problem.labels))
    ]
    if not blocks:
        return grads.cast_out()
    own = [torch.zeros_like(block.lse) for block in blocks]  # entries of the labels
    largest = None if units is None else units[rows].amax()
    sums = None  # (T, H), of a tile's rows of the weight gradient
    if grads.weight is not None and grads.weight.dtype != acc:
        sums = allocate(plan, "d_weight of a tile", acc, grads.weight.device)
    for begin, end in tiles(V, classes):
        of_tile = None if grads.weight is None else grads.weight[begin:end]
        d_weight = of_tile if sums is None else sums[: end - begin]
        labels = []  # of this tile: rows of it, and what is added to them
        for number, block in enumerate(blocks):
            hidden, n = problem.hidden[block.rows], block.n  # (n, H)
            if kept is None:
                z = logits.tile(logits.operand(filled(hidden)), begin, end)  # (v, R)
            else:  # (a copy: the graph may be retained)
                z = logits.copy(kept[begin:end], block.rows)
            g = _gradient(problem, logits.head, block, z, begin)
            if grads.bias is not None:
                part = g[:, :n]
                of_bias = part.sum(1) if block.unit is None else torch.mv(part, block.unit[:n])
                grads.bias[begin:end] += of_bias
            y, tokens = block.labels.of(begin) or (block.y[:0], block.y[:0])
            entries = g[y, tokens]  # of the labels, added apart
            g[y, tokens] = 0
            if block.unit is not None:
                entries = entries * block.unit[tokens]
            own[number][tokens] = entries
            g = g.to(operands)
            if grads.hidden is not None:
                added = hidden.new_empty(block.y.shape + hidden.shape[1:], dtype=acc)
                products(g.t(), logits.rows(begin, end, operands), added)
                if block.unit is not None:
                    added.mul_(block.unit[:, None])
                if isinstance(block.rows, slice):
                    grads.hidden[block.rows] += added[:n]
                else:  # (rows of a block differ, so that no order of adding is left open)
                    grads.hidden.index_add_(0, block.rows, added[:n])
            if d_weight is not None:
                right = hidden.to(operands)
                if largest is not None and block.unit is not None:
                    right = (right * (block.unit[:n] / largest)[:, None]).to(operands)
                products(g[:, :n], right, d_weight, add=number > 0)
                labels.append((y, hidden[tokens].to(acc) * entries[:, None]))
        if of_tile is None or d_weight is None:
            continue
        if largest is not None:
            d_weight.mul_(largest)
        for y, rows_of_labels in labels:
            if len(y):
                add_at(d_weight, y, rows_of_labels)
        if d_weight is not of_tile:
            of_tile.copy_(d_weight)  # rounded once
    for block, entries in zip(blocks, own, strict=True):
        if grads.hidden is not None:
            y = block.y[: block.n].clamp(0, V - 1)
            of_labels = problem.weight[y].to(acc).mul_(entries[: block.n, None])
            if isinstance(block.rows, slice):
                grads.hidden[block.rows] += of_labels
            else:
                grads.hidden.index_add_(0, block.rows, of_labels)
    return grads.cast_out()


_LARGE = 2.0**14  # what float16 holds: probabilities far below 1 would be subnormal there


def _units(problem: Problem, by: LogitGrad) -> Tensor:
    """``(N,)`` powers of two: what float16 holds of a token is its gradient divided by this.

    Whatever comes from upstream, an entry is at most twice `_LARGE` then.
    """
    scale, c = abs(problem.logit_scale), problem.class_weight
    size = (by.alpha.abs() + by.at_label.abs()) * scale
    if by.beta is not None:
        size = size + by.beta.abs() * scale
    if by.gamma is not None:
        size = size + by.gamma.abs() * scale * (1 if c is None else c.abs().amax())
    if by.at_classes is not None:
        size = size + by.at_classes.abs().sum(1)  # a class may stand twice
    return size.double().masked_fill(size == 0, 1).log2().floor().exp2() / _LARGE


class _Block(NamedTuple):
    """A block of tokens, `filled`: where they are, and the factors of their gradient, (R,) each."""

    rows: Rows
    n: int  # tokens; those after them are the last one, again
    y: Tensor  # labels; one that is no row of weight has no entry
    labels: TileLabels  # (n,)
    lse: Tensor
    by: LogitGrad  # in the dtype of logits, times the scale of logits; of further classes (K, R)
    temperature: Tensor | None
    unit: Tensor | None  # in float16: the gradients are this times what is stored

    @classmethod
    def of(
        cls,
        problem: Problem,
        rows: Rows,
        lse: Tensor,  # (N,)
        upstream: LogitGrad,
        units: Tensor | None,  # (N,)
        step: int,  # classes of a tile
    ) -> _Block:
        """The block of these ``rows``."""
        acc, scale = ACC_DTYPE[problem.hidden.dtype], problem.logit_scale
        unit = None if units is None else units[rows]

        def factor(x: Tensor | None, scale: float = 1.0) -> Any:
            if x is None or not x.is_floating_point():
                return x if x is None else filled(x[rows]).t()
            x = x[rows] if scale == 1 else x[rows] * scale
            if unit is not None:
                x = x / (unit if x.dim() == 1 else unit[:, None])
            return filled(x.to(acc)).t()

        by = LogitGrad(
            factor(upstream.alpha, scale), factor(upstream.beta, scale),
            factor(upstream.gamma, scale), factor(upstream.at_label, scale), upstream.used,
            factor(upstream.classes), factor(upstream.at_classes),
        )  # fmt: skip
        y, temperature = filled(problem.labels[rows].long()), problem.temperature
        if temperature is not None:
            temperature = filled(temperature[rows])
        unit = None if unit is None else filled(unit.to(acc))
        n = len(problem.labels[rows])
        labels = TileLabels(y[:n], len(problem.weight), step)
        return cls(rows, n, y, labels, filled(lse[rows].to(acc)), by, temperature, unit)


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
    if label := block.labels.of(begin):
        g[label] = by.at_label[label[1]]
    if slope is not None:
        g.mul_(slope)
    if by.classes is not None and by.at_classes is not None:
        clamped = by.classes.clamp(begin, begin + len(g) - 1)
        at, entries = clamped - begin, by.at_classes.masked_fill(clamped != by.classes, 0)
        # A class may stand twice in a token's labels. Elsewhere than on a CPU one operation would
        # add the two in any order.
        step = len(at) if on_cpu(g) else 1
        for some, x in zip(at.split(step), entries.split(step), strict=True):
            g.scatter_add_(0, some, x)
    return g
