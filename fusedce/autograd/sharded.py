"""Losses and statistics of tokens on a sharded vocabulary, as functions of autograd.

In the forward pass each rank gives its own classes to the backend as a problem, and the ranks
exchange a few numbers a token. In backward each rank computes the logits of its classes again, with
the log-sum-exp of all classes, and the ranks' addends of ``d_hidden`` are summed once. The sum of
the losses takes its gradients in the forward pass where it can (:func:`loss_sum`).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.autograd import class_logits
from fusedce.autograd.derivatives import (
    detached,
    refuse_forward_mode,
    refuse_second_derivatives,
    wanted_gradients,
)
from fusedce.autograd.dispatch import NOTHING, Monitored, capped_smoothing
from fusedce.autograd.summed import with_gradients
from fusedce.autograd.token_ops import Upstreams, Values, upstream_of
from fusedce.backends.choose import get_backend, resolve_backend
from fusedce.backends.gradients import Dtypes, check_budget
from fusedce.backends.plan import TILES, way_of
from fusedce.backends.sharded.collectives import (
    Shard,
    all_reduce,
    all_tokens,
    counted_rows,
    sharded_call,
    sum_over_ranks,
)
from fusedce.backends.sharded.merged_stats import Local, local_problem, stats_over_ranks
from fusedce.backends.torch import sharded_sum as torch_sharded
from fusedce.contract.objective import Stats, folded, token_losses, weights_and_count
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import LossSum
from fusedce.contract.rounding import acc_dtype


class Counted(NamedTuple):
    """The tokens of all ranks, and those that count: with a valid label and a weight not 0."""

    problem: Problem  # of all ranks' tokens, without graph
    shard: Shard
    rows: Tensor  # (n,) the tokens that count
    n_here: int  # tokens that are this rank's own
    classes: Tensor  # (n, K) int64 further classes whose logits are wanted; (n, 0) for none

    def own(self, x: Tensor, fill: float = 0) -> Tensor:
        """``x (n, ...)`` at this rank's tokens, ``(n_here, ...)``; ``fill`` where none counts."""
        N = len(self.problem.labels)
        every = x.new_full((N, *x.shape[1:]), fill).index_put((self.rows,), x)
        return self.shard.own(every, self.n_here)


def losses(problem: Problem, shard: Shard, monitored: Wanted = NOTHING) -> tuple[Tensor, Monitored]:
    """``(N,)`` losses of this rank's tokens in nats, and the monitored statistics.

    ``problem`` has the weights of all classes.
    """
    counted = _counted(problem, shard)
    whole = counted.problem
    smoothing = whole.label_smoothing > 0
    lse = monitored.lse or not whole.of_nll_alone()
    stats, _ = _statistics(problem, counted, monitored.but(lse=lse, zmean=smoothing))
    y = whole.labels[counted.rows].long().clamp(0, shard.V - 1)
    of_rows = whole.rows(counted.rows)
    zmean = stats.zmean if smoothing else None
    found = counted.own(token_losses(of_rows, y, stats.nll, stats.lse, zmean))
    return found, Monitored(
        None if stats.argmax is None else counted.own(stats.argmax, -1),
        counted.own(stats.lse.detach()) if monitored.lse else None,
        counted.own(stats.entropy.detach()) if monitored.entropy else None,
    )


def token_stats(problem: Problem, shard: Shard, wanted: Wanted) -> Stats:
    """``(N,)`` statistics of this rank's tokens; entropy, mean logit and argmax where wanted."""
    counted = _counted(problem, shard)
    return _own(_statistics(problem, counted, wanted)[0], counted, wanted)


def class_stats(problem: Problem, shard: Shard, wanted: Wanted) -> tuple[Tensor, Stats]:
    """``(N, K)`` log-probabilities of several classes of this rank's tokens; their statistics.

    ``problem.labels (N, K)`` are the classes. A token counts if one of them is not ignored; its
    label is the likeliest of them.
    """
    counted = _counted(problem, shard)
    stats, logprob = _statistics(problem, counted, wanted)
    return counted.own(logprob), _own(stats, counted, wanted)


def _own(stats: Stats, counted: Counted, wanted: Wanted) -> Stats:
    """Statistics of the tokens that count as those of this rank's tokens."""
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
    classes = problem.labels[:, None][:, :0]
    if problem.labels.dim() == 2:
        classes = problem.labels
        counts, _ = class_logits.in_range(problem, classes, shard.V)  # raises on all ranks
        one = classes.gather(1, counts.int().argmax(1, keepdim=True))[:, 0]
        problem = problem.but(labels=one)
    rows, _ = counted_rows(problem, shard)
    budget, K = problem.memory_budget, classes.shape[1]
    if budget is not None:  # the backend gets what other ranks' tokens and classes leave
        call = sharded_call(problem, shard, len(problem.labels))
        call = call._replace(fixed=call.fixed + (class_logits.bytes_beside(problem, K) if K else 0))
        check_budget(problem, call)  # raises on all ranks where it is too small
        problem = problem.but(memory_budget=budget - call.fixed)
    return Counted(problem, shard, rows, n_here, classes[rows])


def _statistics(problem: Problem, counted: Counted, wanted: Wanted) -> tuple[Stats, Tensor]:
    """Statistics of the tokens that count, ``(n,)``, and log-probabilities of their classes.

    The latter are ``(n, K)``, 0 at ignored classes. Both are differentiable in the tensors of
    ``problem``. With ``K > 0`` the label of a token is the likeliest of its classes.
    """
    gradients, shard = wanted_gradients(problem), counted.shard
    with torch.no_grad(), torch.autocast(problem.hidden.device.type, enabled=False):
        local = local_problem(counted.problem, counted.rows, shard)
        z = _class_logits(local, counted)
        valid = counted.problem.but(labels=counted.classes).valid()
        if z.shape[1]:
            best = class_logits.likeliest(z, valid)
            local = local.with_labels(counted.classes.gather(1, best)[:, 0])
        stats, nll_here = stats_over_ranks(local, shard, wanted)
    if any(gradients):
        inputs = (problem.hidden, problem.weight, problem.bias)
        values = (stats.nll, stats.lse, stats.entropy, stats.zmean, z)
        nll, lse, entropy, zmean, z = _Values.apply(*inputs, *values, nll_here, local, counted)
        stats = Stats(nll, lse, entropy, zmean, stats.n_valid, stats.argmax)
    if not z.shape[1]:
        return stats, z
    return stats, class_logits.logprobs(z, best, stats.nll, valid)


def _class_logits(local: Local, counted: Counted) -> Tensor:
    """``(n, K)`` finished logits of the counted tokens' classes; NaN for a class out of range.

    One all-reduce of a number a class: each logit comes from the rank that holds its row.
    """
    classes, problem = counted.classes, local.problem
    z = problem.hidden.new_zeros(classes.shape, dtype=acc_dtype(problem.hidden.dtype))
    if not classes.shape[1]:
        return z
    if len(problem.weight):
        z = class_logits.chosen_logits(problem, _classes_here(local, classes))
    all_reduce(z, counted.shard.group)  # one number and zeros: exact
    bad = counted.problem.but(labels=classes).valid()
    bad &= (classes < 0) | (classes >= counted.shard.V)
    return z.masked_fill_(bad, math.nan)


def _classes_here(local: Local, classes: Tensor) -> Tensor:
    """``classes`` as rows of this rank's weight, the ignored label where they lie elsewhere."""
    rows, here = local.rows_of(classes)
    assert local.problem.ignore_index is not None
    return rows.masked_fill(~here, local.problem.ignore_index)


class _Values(torch.autograd.Function):
    """Statistics of the tokens that count, as an autograd function of the head's inputs."""

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
        z: Tensor,
        nll_here: Tensor,
        local: Local,
        counted: Counted,
    ) -> tuple[Tensor, ...]:
        problem = local.problem
        tensors = {k: x for k, x in problem._asdict().items() if isinstance(x, Tensor)}
        ctx.names, ctx.options = tuple(tensors), problem.but(**dict.fromkeys(tensors))
        here = (local.y, local.here, _classes_here(local, counted.classes))
        ctx.save_for_backward(*tensors.values(), *here, z, nll_here, lse, entropy, zmean)
        # The whole problem would keep all tokens alive; backward needs its size alone.
        ctx.shard, ctx.rows, ctx.n_here = counted.shard, counted.rows, counted.n_here
        ctx.N, ctx.local_rows = len(counted.problem.labels), len(weight)
        ctx.set_materialize_grads(False)
        return tuple(x.clone() for x in (nll, lse, entropy, zmean, z))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivatives()
        nothing: list[Any] = [None] * 11
        *tensors, y, here, classes, z, nll_here, lse, entropy, zmean = ctx.saved_tensors
        if ctx.shard.tokens is not None:
            upstream = _of_all_ranks(upstream, lse, z, ctx.shard)
        elif all(u is None for u in upstream):
            return tuple(nothing)
        *of_stats, of_z = upstream
        problem = ctx.options.but(**dict(zip(ctx.names, tensors, strict=True)))
        wanted = Wanted(*ctx.needs_input_grad[:3])
        values = Values(nll_here, lse, entropy, zmean, z)
        with torch.no_grad(), torch.autocast(problem.hidden.device.type, enabled=False):
            made = _grads_here(
                Local(problem, y, here, ctx.shard.first),
                wanted,
                values,
                Upstreams(*of_stats, of_z),
                ctx.shard,
                classes.masked_fill(classes == problem.ignore_index, -1),
            )
            if wanted.hidden:
                d_hidden = sum_over_ranks(made[0], ctx.rows, ctx.N, ctx.n_here, ctx.shard)
                nothing[0] = d_hidden.to(problem.hidden.dtype)
            for i, (d, wants) in enumerate(zip(made, wanted.gradients(), strict=True)):
                if i and wants:
                    nothing[i] = _with_padding(d.to(problem.hidden.dtype), ctx.local_rows)
        return tuple(nothing)


def _grads_here(
    local: Local,
    wanted: Wanted,
    values: Values,
    upstreams: Upstreams,
    shard: Shard,
    classes: Tensor,  # (n, K) rows here, -1 for none
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's addend of ``d_hidden (n, H)``, float32 or better; gradients of its classes."""
    problem = local.problem
    dtype = problem.hidden.dtype
    acc = acc_dtype(dtype)
    if not len(problem.weight):
        # Not like hidden: a collective sends memory as it lies, and columns may lie side by side.
        d_hidden = problem.hidden.new_zeros(problem.hidden.shape, dtype=acc)
        return d_hidden, torch.zeros_like(problem.weight), problem.weight.new_zeros(0)
    upstream = upstream_of(
        problem, values, upstreams, classes=shard.V, here=local.here, chosen=classes
    )
    backend = get_backend(problem.backend)
    return backend.token_grads(problem, wanted, values.lse, upstream, Dtypes(acc, dtype, dtype))


class _Total(torch.autograd.Function):
    """Sum over ranks; backward gives each rank the gradient of its own addend."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        everyones = mine.clone()
        all_reduce(everyones, group)
        return everyones

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        return upstream, None


def _of_all_ranks(
    upstream: tuple[Tensor | None, ...],
    lse: Tensor,  # (n,)
    z: Tensor,  # (n, K)
    shard: Shard,
) -> tuple[Tensor | None, ...]:
    """Upstream gradients of all ranks' tokens; each rank brings those of its own.

    A ``None`` in ``upstream`` is a gradient that autograd did not compute on this rank, and counts
    as 0. A ``None`` in the result is one that is 0 for every token of every rank, so that all ranks
    leave out the work for it together.

    Collectives: one all-reduce of 4 + K numbers a token.
    """
    *of_stats, of_z = upstream
    zero = torch.zeros_like(lse)
    rows = [zero if u is None else u for u in of_stats]
    rows += (torch.zeros_like(z) if of_z is None else of_z).unbind(1)
    table = torch.stack(rows)
    all_reduce(table, shard.group)
    of_all = (*table[: len(of_stats)].unbind(), table[len(of_stats) :].t())
    return tuple(u if bool(u.ne(0).any()) else None for u in of_all)


def _with_padding(grad: Tensor, rows: int) -> Tensor:
    """The gradient of all ``rows`` from that of the classes; padding rows have gradient 0."""
    if len(grad) == rows:
        return grad
    padded = grad.new_zeros(rows, *grad.shape[1:])
    padded[: len(grad)] = grad
    return padded


def loss_sum(
    problem: Problem, shard: Shard, monitored: Wanted = NOTHING
) -> tuple[LossSum, Monitored]:
    """The sum in nats and the number of valid tokens, equal on all ranks; what is monitored.

    Every rank receives the gradients of its own inputs. The monitored statistics are those of this
    rank's tokens.
    """
    refuse_forward_mode(*problem)
    wanted = wanted_gradients(problem)
    if _from_tokens(problem, shard, monitored, train=any(wanted.gradients())):
        return _sum_of_losses(problem, shard, monitored)
    device = problem.hidden.device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if problem.backend != "triton":
            made, argmax = torch_sharded.loss_and_grads(detached(problem), shard, wanted), None
        else:
            backend = _triton()
            if not any(wanted.gradients()):
                return LossSum(*backend.loss(detached(problem), shard)), Monitored(None)
            n = len(problem.labels)
            argmax = torch.empty(n, dtype=torch.int64, device=device) if monitored.argmax else None
            made = backend.loss_and_grads(detached(problem), shard, wanted, argmax)
    total, n_valid, factor, *grads = made
    if any(wanted.gradients()):
        total = with_gradients(total, factor, problem, grads)
    return LossSum(total, n_valid), Monitored(argmax)


def _from_tokens(problem: Problem, shard: Shard, monitored: Wanted, *, train: bool) -> bool:
    """Whether the sum is computed from the tokens' losses, whose gradients come in backward."""
    triton, budget = problem.backend == "triton", problem.memory_budget
    if monitored.lse or monitored.entropy or (monitored.argmax and not (triton and train)):
        return True
    if triton and capped_smoothing(problem):
        return True
    if budget is None:
        return False
    N = len(problem.labels) if shard.tokens is None else len(shard.tokens) * max(shard.tokens)
    return way_of(sharded_call(problem, shard, N), memory_budget=budget).name == TILES


def _triton() -> ModuleType:
    """The module of the Triton path, imported at its first use."""
    from fusedce.backends.triton import sharded_sum

    return sharded_sum


def _sum_of_losses(problem: Problem, shard: Shard, monitored: Wanted) -> tuple[LossSum, Monitored]:
    each, values = losses(problem, shard, monitored)
    count = weights_and_count(problem.but(class_weight=None))[1]
    mine = torch.stack([each.sum(dtype=torch.float64), count])
    of_all, n_valid = total(mine, shard).unbind()
    return LossSum(of_all.to(each.dtype), n_valid.detach().long()), values
