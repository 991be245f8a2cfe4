"""Statistics of every token, differentiable, where every rank holds some rows of the vocabulary.

Forward: each rank's own classes as a problem of the backend, then one exchange of a few numbers a
token. Backward: the backend's gradients of the own classes' logits, computed anew with the
log-sum-exp of all classes, and the parts of ``d_hidden`` added up once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.autograd.derivatives import (
    detached,
    refuse_forward_mode,
    refuse_second_derivatives,
    wanted_gradients,
)
from fusedce.autograd.dispatch import NOTHING, Seen
from fusedce.autograd.token_ops import Upstreams, Values, upstream_of
from fusedce.backends.choose import get_backend, resolve_backend
from fusedce.backends.gradients import Dtypes
from fusedce.backends.plan import tiles_of
from fusedce.backends.sharded import per_token
from fusedce.backends.sharded.exchange import (
    Shard,
    all_tokens,
    counted_rows,
    sharded_call,
    sum_over_ranks,
)
from fusedce.backends.sharded.per_token import Local
from fusedce.contract.objective import Stats, folded, token_losses
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.rounding import acc_dtype


class Counted(NamedTuple):
    """The tokens of all ranks, and those of them that count."""

    problem: Problem  # of all ranks' tokens, without graph
    shard: Shard
    rows: Tensor  # (n,) the tokens that count
    n_here: int  # tokens that are this rank's own

    def own(self, x: Tensor, fill: float = 0) -> Tensor:
        """``x (n,)`` at this rank's own tokens, ``(n_here,)``; ``fill`` where nothing counts."""
        every = x.new_full((len(self.problem.labels),), fill).index_put((self.rows,), x)
        if self.shard.tokens is None:
            return every
        first = dist.get_rank(self.shard.group) * max(self.shard.tokens)
        return every[first : first + self.n_here]


def losses(problem: Problem, shard: Shard, monitored: Wanted = NOTHING) -> tuple[Tensor, Seen]:
    """``(N,)`` losses of this rank's tokens; ``problem`` holds the weights of all classes."""
    counted = _counted(problem, shard)
    whole = counted.problem
    smoothing = whole.label_smoothing > 0
    lse = monitored.lse or not whole.of_nll_alone()
    stats = _statistics(problem, counted, monitored.but(lse=lse, zmean=smoothing))
    y = whole.labels[counted.rows].long().clamp(0, shard.V - 1)
    of_rows = whole.rows(counted.rows)
    zmean = stats.zmean if smoothing else None
    found = counted.own(token_losses(of_rows, y, stats.nll, stats.lse, zmean))
    return found, Seen(
        None if stats.argmax is None else counted.own(stats.argmax, -1),
        counted.own(stats.lse.detach()) if monitored.lse else None,
        counted.own(stats.entropy.detach()) if monitored.entropy else None,
    )


def token_stats(problem: Problem, shard: Shard, wanted: Wanted) -> Stats:
    """Of this rank's tokens; entropy, mean logit and argmax where wanted."""
    counted = _counted(problem, shard)
    stats = _statistics(problem, counted, wanted)
    return Stats(
        counted.own(stats.nll),
        counted.own(stats.lse),
        counted.own(stats.entropy) if wanted.entropy else stats.entropy,
        counted.own(stats.zmean) if wanted.zmean else stats.zmean,
        stats.n_valid,
        None if stats.argmax is None else counted.own(stats.argmax, -1),
    )


def total(mine: Tensor, shard: Shard) -> Tensor:
    """The sum of ``mine`` over the ranks where each has tokens of its own, once differentiable."""
    if shard.tokens is None:
        return mine
    result: Tensor = _Total.apply(mine, shard.group)
    return result


def _counted(problem: Problem, shard: Shard) -> Counted:
    refuse_forward_mode(*problem)
    n_here, problem = len(problem.labels), detached(problem)
    problem = folded(problem).but(backend=resolve_backend(problem.backend, problem.hidden))
    if shard.tokens is not None:
        problem = all_tokens(problem, max(shard.tokens), shard.group)
    rows, _ = counted_rows(problem, shard)
    budget = problem.memory_budget
    if budget is not None:  # what is left to the backend, which knows nothing of other ranks
        call = sharded_call(problem, shard, len(problem.labels))
        tiles_of(call, memory_budget=budget)  # raises on all ranks where it is too small
        problem = problem.but(memory_budget=budget - call.fixed)
    return Counted(problem, shard, rows, n_here)


def _statistics(problem: Problem, counted: Counted, wanted: Wanted) -> Stats:
    """``(n,)`` of the tokens that count, differentiable in what ``problem`` holds."""
    gradients = wanted_gradients(problem)
    with torch.no_grad(), torch.autocast(problem.hidden.device.type, enabled=False):
        local = per_token.local_of(counted.problem, counted.rows, counted.shard)
        stats, nll_here = per_token.token_stats(local, counted.shard, wanted)
    if not any(gradients):
        return stats
    inputs = (problem.hidden, problem.weight, problem.bias)
    values = (stats.nll, stats.lse, stats.entropy, stats.zmean)
    nll, lse, entropy, zmean = _Values.apply(*inputs, *values, nll_here, local, counted)
    return Stats(nll, lse, entropy, zmean, stats.n_valid, stats.argmax)


class _Values(torch.autograd.Function):
    """Statistics with a graph."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        nll: Tensor,
        lse: Tensor,
        entropy: Tensor,
        zmean: Tensor,
        nll_here: Tensor,
        local: Local,
        counted: Counted,
    ) -> tuple[Tensor, ...]:
        problem = local.problem
        tensors = {k: x for k, x in problem._asdict().items() if isinstance(x, Tensor)}
        ctx.names, ctx.options = tuple(tensors), problem.but(**dict.fromkeys(tensors))
        ctx.save_for_backward(*tensors.values(), local.y, local.here, nll_here, lse, entropy, zmean)
        # Of the whole problem nothing but its size is needed: it would keep all tokens alive.
        ctx.shard, ctx.rows, ctx.n_here = counted.shard, counted.rows, counted.n_here
        ctx.N, ctx.local_rows = len(counted.problem.labels), len(weight)
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in (nll, lse, entropy, zmean))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivatives()
        nothing: list[Any] = [None] * 10
        if ctx.shard.tokens is not None:
            upstream = _of_all_ranks(upstream, ctx.saved_tensors[-3], ctx.shard)
        if all(u is None for u in upstream):
            return tuple(nothing)
        *tensors, y, here, nll_here, lse, entropy, zmean = ctx.saved_tensors
        problem = ctx.options.but(**dict(zip(ctx.names, tensors, strict=True)))
        wanted = Wanted(*ctx.needs_input_grad[:3])
        values = Values(nll_here, lse, entropy, zmean)
        with torch.no_grad(), torch.autocast(problem.hidden.device.type, enabled=False):
            d_hidden, *of_head = _grads_here(
                Local(problem, y, here), wanted, values, Upstreams(*upstream), ctx.shard
            )
            if wanted.hidden:
                d_hidden = sum_over_ranks(d_hidden, ctx.rows, ctx.N, ctx.n_here, ctx.shard)
                nothing[0] = d_hidden.to(problem.hidden.dtype)
            for i, (d, wants) in enumerate(zip(of_head, wanted.gradients()[1:], strict=True), 1):
                if wants:
                    nothing[i] = _with_padding(d, ctx.local_rows)
        return tuple(nothing)


def _grads_here(
    local: Local, wanted: Wanted, values: Values, upstreams: Upstreams, shard: Shard
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of ``d_hidden (n, H)``, float32 or better; gradients of its classes."""
    problem = local.problem
    dtype = problem.hidden.dtype
    acc = acc_dtype(dtype)
    if not len(problem.weight):
        d_hidden = torch.zeros_like(problem.hidden, dtype=acc)
        return d_hidden, torch.zeros_like(problem.weight), problem.weight.new_zeros(0)
    upstream = upstream_of(problem, values, upstreams, classes=shard.V, here=local.here)
    backend = get_backend(problem.backend)
    return backend.token_grads(problem, wanted, values.lse, upstream, Dtypes(acc, dtype, dtype))


class _Total(torch.autograd.Function):
    """A sum over ranks that all of them differentiate: each for what is its own."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        everyones = mine.clone()
        dist.all_reduce(everyones, group=group)
        return everyones

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        return upstream, None


def _of_all_ranks(
    upstream: tuple[Tensor | None, ...], like: Tensor, shard: Shard
) -> tuple[Tensor | None, ...]:
    """Upstream gradients of all ranks' tokens, where each has said something of its own."""
    zero = torch.zeros_like(like)
    told = torch.stack([zero if u is None else u for u in upstream])
    dist.all_reduce(told, group=shard.group)
    return tuple(u if bool(u.ne(0).any()) else None for u in told.unbind())


def _with_padding(grad: Tensor, rows: int) -> Tensor:
    """A gradient of the rows that are classes as that of all rows, of which others have none."""
    if len(grad) == rows:
        return grad
    padded = grad.new_zeros(rows, *grad.shape[1:])
    padded[: len(grad)] = grad
    return padded
