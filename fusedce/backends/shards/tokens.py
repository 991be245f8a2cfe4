"""Statistics of tokens on a sharded vocabulary, and their gradients.

The backend gets a rank's own rows as a vocabulary of its own. It needs a label of every token:
where the label lies on another rank, the first row here stands in for it, and backward gives that
row the gradient of any other. The ranks exchange a few numbers a token
(:mod:`fusedce.backends.shards.merge`). In backward each rank computes the logits of its classes
again, with the log-sum-exp of all classes, and the ranks' addends of ``d_hidden`` are summed once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends import chosen
from fusedce.backends.choose import get_backend
from fusedce.backends.gradients import Dtypes, check_budget
from fusedce.backends.shards.collectives import (
    RunningSums,
    all_gather,
    all_reduce,
    all_tokens,
    sharded_call,
)
from fusedce.backends.shards.merge import entropy_of, label_and_others, nll_and_lse, of_ranks
from fusedce.backends.torch.rows import counted_rows
from fusedce.backends.upstream import Upstreams, Values, upstream_of
from fusedce.contract.objective import Stats
from fusedce.contract.problem import Problem, Wanted, acc_dtype
from fusedce.contract.task import Shard, Task


class _Local(NamedTuple):
    """The classes that lie here as a problem of their own, for tokens that all count."""

    problem: Problem  # labels are rows here
    y: Tensor  # (n,) int64 labels among all classes
    here: Tensor  # (n,) bool: the label lies here, else its row stands in for it
    first: int  # the class of the first row here

    def rows_of(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the classes ``y`` where they lie here, 0 elsewhere; and whether they do."""
        here = (y >= self.first) & (y < self.first + len(self.problem.weight))
        return torch.where(here, y - self.first, 0), here

    def with_labels(self, y: Tensor) -> _Local:
        """The same tokens with the labels ``y (n,)`` int64 among all classes."""
        labels, here = self.rows_of(y)
        return _Local(self.problem.but(labels=labels), y, here, self.first)


class _Counted(NamedTuple):
    """The tokens of all ranks, and those that count: with a valid label and a weight not 0."""

    problem: Problem  # of all ranks' tokens; one label each
    shard: Shard
    rows: Tensor  # (n,) the tokens that count
    n_here: int  # tokens that are this rank's own
    classes: Tensor  # (n, K) int64 further classes whose logits are wanted; (n, 0) for none

    def own(self, x: Tensor, fill: float = 0) -> Tensor:
        """``x (n, ...)`` at this rank's tokens, ``(n_here, ...)``; ``fill`` where none counts."""
        every = x.new_full((len(self.problem.labels), *x.shape[1:]), fill)
        every[self.rows] = x
        own = self.shard.own(every, self.n_here)
        return own if own is every else own.clone()


def stats(task: Task, shard: Shard) -> tuple[Tensor, ...]:
    """Compute statistics of this rank's tokens: the outputs of the operator ``stats``."""
    wanted, counted = task.wanted, _counted(task.problem, shard)
    local = _local_problem(counted.problem, counted.rows, shard)
    z = _class_logits(local, counted)
    if counted.classes.shape[1]:
        best = chosen.likeliest(z, counted.problem.but(labels=counted.classes).valid())
        local = local.with_labels(counted.classes.gather(1, best)[:, 0])
    of_all = _stats_over_ranks(local, shard, wanted)
    values = [
        counted.own(x) if want else x.new_empty(0)
        for x, want in (
            (of_all.nll, True), (of_all.lse, wanted.lse), (of_all.entropy, wanted.entropy),
            (of_all.zmean, wanted.zmean), (z, task.problem.labels.dim() == 2),
        )
    ]  # fmt: skip
    argmax = local.y.new_empty(0)
    if of_all.argmax is not None:
        argmax = counted.own(of_all.argmax, -1)
    return *values, of_all.n_valid, argmax


def grads(
    task: Task, shard: Shard, values: Values, upstreams: Upstreams
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's inputs."""
    problem, wanted = task.problem, task.wanted
    counted = _counted(problem, shard)
    if shard.tokens is not None:
        values, upstreams = _of_all_ranks(task, values, upstreams, shard)
    values = Values(*(x[counted.rows] if len(x) else x for x in values))
    upstreams = Upstreams(
        *(x[counted.rows] if x is not None and len(x) else None for x in upstreams)
    )
    local = _local_problem(counted.problem, counted.rows, shard)
    here = _classes_here(local, counted.classes)
    if here.shape[1]:
        best = chosen.likeliest(values.z, counted.problem.but(labels=counted.classes).valid())
        local = local.with_labels(counted.classes.gather(1, best)[:, 0])
    dtype = problem.hidden.dtype
    acc = acc_dtype(dtype)
    if len(local.problem.weight):
        # The row that stands in for a label that lies elsewhere has a probability of its own.
        z_here = chosen.chosen_logits(local.problem, local.problem.labels[:, None])[:, 0]
        nll_here = torch.where(local.here, values.nll, values.lse - z_here)
        upstream = upstream_of(
            local.problem, values._replace(nll=nll_here), upstreams, classes=shard.V,
            here=local.here, chosen=here.masked_fill(~local.problem.but(labels=here).valid(), -1),
        )  # fmt: skip
        backend = get_backend(problem.backend)
        made = backend.token_grads(
            local.problem, wanted, values.lse, upstream, Dtypes(acc, dtype, dtype)
        )
    else:
        # Not like hidden: a collective sends memory as it lies, and columns may lie side by side.
        d_hidden = problem.hidden.new_zeros(local.problem.hidden.shape, dtype=acc)
        made = d_hidden, problem.weight[:0].clone(), problem.weight.new_zeros(0)
    d_hidden, d_weight, d_bias = (
        x if want else x.new_empty(0) for x, want in zip(made, wanted.gradients(), strict=True)
    )
    if wanted.hidden:
        N = len(counted.problem.labels)
        d_hidden = RunningSums(d_hidden, shard).d_hidden(counted.rows, N, counted.n_here)
    rows = len(problem.weight)
    return (
        d_hidden.to(dtype),
        _with_padding(d_weight.to(dtype), rows) if wanted.weight else d_weight,
        _with_padding(d_bias.to(dtype), rows) if wanted.bias else d_bias,
    )


def _local_problem(problem: Problem, rows: Tensor, shard: Shard) -> _Local:
    """The problem of the tokens at ``rows`` and the rows of ``weight`` that are classes."""
    real = shard.real(problem)
    classes = slice(shard.first, shard.first + real)
    bias, c, t = problem.bias, problem.class_weight, problem.temperature
    y = problem.labels[rows].long()
    local = problem.but(
        hidden=problem.hidden if len(rows) == len(problem.labels) else problem.hidden[rows],
        weight=problem.weight[:real],
        bias=None if bias is None else bias[:real],
        class_weight=None if c is None else c[classes],
        temperature=None if t is None else t[rows],
        token_weight=None,
        ignore_index=-100,
    )
    return _Local(local, y, y, shard.first).with_labels(y)


def _stats_over_ranks(local: _Local, shard: Shard, wanted: Wanted) -> Stats:
    """Statistics over all ranks' classes; they are equal on all ranks.

    Collectives: one all-gather of float64 numbers a token: two, one more each for entropy and mean
    logit, two more for argmax.
    """
    acc = acc_dtype(local.problem.hidden.dtype)
    others, z_labels, *more = of_ranks(_of_here(local, shard, wanted), shard)  # (ranks, n) each
    known = (local.y >= 0) & (local.y < shard.V)
    nll, lse = nll_and_lse(others.logsumexp(0), z_labels, known)
    entropy = zmean = lse.new_empty(0)
    argmax = None
    if wanted.entropy:
        entropy = entropy_of(torch.logaddexp(others, z_labels), lse, more.pop(0))
    if wanted.zmean:
        zmean = more.pop(0).sum(0) / shard.V
    if wanted.argmax:
        tops, classes = more
        argmax = classes.gather(0, tops.argmax(0, keepdim=True))[0].long()
    n_valid = torch.full((), len(lse), dtype=torch.int64, device=lse.device)
    return Stats(nll.to(acc), lse.to(acc), entropy.to(acc), zmean.to(acc), n_valid, argmax)


def _of_here(local: _Local, shard: Shard, wanted: Wanted) -> list[Tensor]:
    """Numbers for the other ranks, ``(n,)`` float64 each.

    These are the log-sum-exp of the logits but the label's, the label's logit where it lies here,
    entropy, sum of the logits, the largest logit and its class.
    """
    n, device = len(local.y), local.y.device
    if not len(local.problem.weight):
        nowhere = torch.full((n,), -math.inf, dtype=torch.float64, device=device)
        none = torch.zeros_like(nowhere)
        more = [none] * (wanted.entropy + wanted.zmean)
        return [nowhere, nowhere, *more, *[nowhere, none][: 2 * wanted.argmax]]
    argmax = torch.empty(n, dtype=torch.int64, device=device) if wanted.argmax else None
    backend = get_backend(local.problem.backend)
    found = backend.token_stats(local.problem, wanted.but(lse=True), argmax)
    z, others = label_and_others(found.nll, found.lse)
    mine = [
        torch.where(local.here, others, found.lse.double()),
        torch.where(local.here, z, -math.inf),
    ]
    if wanted.entropy:
        mine.append(found.entropy.double())
    if wanted.zmean:
        mine.append(found.zmean.double() * len(local.problem.weight))
    if argmax is not None and found.top is not None:
        mine += [found.top.double(), (argmax + shard.first).double()]
    return mine


def _counted(problem: Problem, shard: Shard) -> _Counted:
    n_here = len(problem.labels)
    if shard.tokens is not None:
        problem = all_tokens(problem, max(shard.tokens), shard.group)
    classes = problem.labels.new_empty(len(problem.labels), 0)
    if problem.labels.dim() == 2:
        classes = problem.labels
        counts, _ = chosen.in_range(problem, classes, shard.V)  # raises on all ranks
        one = classes.gather(1, counts.int().argmax(1, keepdim=True))[:, 0]
        problem = problem.but(labels=one)
    rows, _ = counted_rows(problem, shard)
    budget, K = problem.memory_budget, classes.shape[1]
    if budget is not None:  # the backend gets what other ranks' tokens and classes leave
        call = sharded_call(problem, shard, len(problem.labels))
        call = call._replace(fixed=call.fixed + (chosen.bytes_beside(problem, K) if K else 0))
        check_budget(problem, call)  # raises on all ranks where it is too small
        problem = problem.but(memory_budget=budget - call.fixed)
    return _Counted(problem, shard, rows, n_here, classes[rows])


def _class_logits(local: _Local, counted: _Counted) -> Tensor:
    """``(n, K)`` finished logits of the counted tokens' classes; NaN for a class out of range.

    One all-reduce of a number a class: each logit comes from the rank that holds its row.
    """
    classes, problem = counted.classes, local.problem
    z = problem.hidden.new_zeros(classes.shape, dtype=acc_dtype(problem.hidden.dtype))
    if not classes.shape[1]:
        return z
    if len(problem.weight):
        z = chosen.chosen_logits(problem, _classes_here(local, classes))
    all_reduce(z, counted.shard.group)  # one number and zeros: exact
    bad = counted.problem.but(labels=classes).valid()
    bad &= (classes < 0) | (classes >= counted.shard.V)
    return z.masked_fill_(bad, math.nan)


def _classes_here(local: _Local, classes: Tensor) -> Tensor:
    """``classes`` as rows of this rank's weight, the ignored label where they lie elsewhere."""
    rows, here = local.rows_of(classes)
    assert local.problem.ignore_index is not None
    return rows.masked_fill(~here, local.problem.ignore_index)


def _of_all_ranks(
    task: Task, values: Values, upstreams: Upstreams, shard: Shard
) -> tuple[Values, Upstreams]:
    """Gather statistics of all ranks' tokens, and their upstream gradients.

    A ``None`` in ``upstreams`` is a gradient that autograd did not compute on this rank, and counts
    as 0. A ``None`` in the result is one that is 0 for every token of every rank, so that all ranks
    leave out the work for it together.

    Collectives: one all-gather of the statistics and their gradients, two numbers each a token.
    """
    wanted, several = task.wanted, task.problem.labels.dim() == 2
    made = (True, wanted.lse, wanted.entropy, wanted.zmean, several)  # the same on all ranks
    there = [i for i, x in enumerate(made) if x]
    columns = []
    for i in there:
        x, u = values[i], upstreams[i]
        columns += [x, torch.zeros_like(x) if u is None else u]
    flat = [x if x.dim() == 2 else x[:, None] for x in columns]
    assert shard.tokens is not None
    mine = flat[0].new_zeros(max(shard.tokens), sum(x.shape[1] for x in flat))
    mine[: len(flat[0])] = torch.cat(flat, 1)
    table = list(all_gather(mine, shard.group).split([x.shape[1] for x in flat], 1))
    table = [t if x.dim() == 2 else t[:, 0] for t, x in zip(table, columns, strict=True)]
    found, of = list(values), [None] * len(upstreams)
    for i, x, u in zip(there, table[::2], table[1::2], strict=True):
        found[i] = x
        of[i] = u if bool(u.ne(0).any()) else None
    return Values(*found), Upstreams(*of)


def _with_padding(grad: Tensor, rows: int) -> Tensor:
    """The gradient of all ``rows`` from that of the classes; padding rows have gradient 0."""
    if len(grad) == rows:
        return grad
    padded = grad.new_zeros(rows, *grad.shape[1:])
    padded[: len(grad)] = grad
    return padded
