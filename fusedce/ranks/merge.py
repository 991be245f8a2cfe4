"""Statistics over the classes of all ranks, made of those of this rank's classes.

A rank's rows are a whole vocabulary to everything below: this module changes labels, merges
statistics, and splits their upstream gradients. With ``P`` the probability of this rank's classes,
``p`` of one of them among these, and ``E`` the entropy, primes marking this rank's own::

    d nll     = p P - onehot                    = 1 of nll', P - 1 of lse'  (P of lse' elsewhere)
    d lse     = p P                             = P of lse'
    d entropy = -p P (log p + log P + E)        = P of entropy', P (E' - E - log P) of lse'
    d zmean   = c / V                           = V' / V of zmean'
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from ..autograd import tokens
from ..backends import class_logits
from ..backends.gradients import check_budget
from ..backends.shards import (
    all_reduce,
    entropy_of,
    label_and_others,
    nll_and_lse,
    of_ranks,
    sharded_sizes,
)
from ..contract.labels import used_tokens
from ..contract.objective import Stats
from ..contract.problem import ACC_DTYPE, Problem, Shard, Task


@_disable_dynamo  # a compiler breaks its graph at the door already, where ranks compare arguments
def token_stats(task: Task, *, shard: Shard) -> tuple[Stats, Tensor]:
    """Statistics and logits of labels ``(N, K)``; all but argmax are differentiable.

    Collectives: one all-gather of float64 numbers a token: two, one more each for entropy and mean
    logit, two more for argmax; before it, with labels ``(N, K)``, one all-reduce of K numbers a
    token. In backward one all-reduce of ``(N, H)`` in float32, if hidden gets a gradient.
    """
    problem, wanted = _within_budget(task.problem, shard), task.wanted
    acc = ACC_DTYPE[problem.hidden.dtype]
    if problem.labels.dim() == 2:
        valid, classes = class_logits.in_range(problem, problem.labels, shard.V)
        unknown = valid & (classes != problem.labels)
        y, here = _of_here(classes.masked_fill(~valid | unknown, -1), problem, shard)
        y[:, 0] = torch.where(valid.any(1) & ~here.any(1), 0, y[:, 0])
        own, z = tokens.token_stats(_local_task(task, y, shard))
        z = _Added.apply(z.masked_fill(~here, 0), shard).masked_fill(unknown, math.nan)
        problem = class_logits.one_class(problem, z.detach())
        used, n_valid = used_tokens(problem, shard.V)
        _, here = _of_here(problem.labels.long().masked_fill(~used, -1), problem, shard)
    else:
        used, n_valid = used_tokens(problem, shard.V)
        y, here = _of_here(problem.labels.long().masked_fill(~used, -1), problem, shard)
        y = torch.where(used & ~here, 0, y)  # its own statistic is not used
        own, z = tokens.token_stats(_local_task(task, y, shard))
    known = (problem.labels >= 0) & (problem.labels < shard.V)
    facts = torch.stack([used, known, here])
    given = (
        own.entropy if wanted.entropy else None, own.zmean if wanted.zmean else None,
        own.top if wanted.argmax else None, own.argmax if wanted.argmax else None,
    )  # fmt: skip
    *found, argmax = _Merged.apply(facts, shard, len(problem.weight), own.nll, own.lse, *given)
    none = own.nll.new_empty(0, dtype=acc)
    nll, lse, entropy, zmean = (none if x is None else x.to(acc) for x in found)
    return Stats(nll, lse if wanted.lse else none, entropy, zmean, n_valid, argmax), z


def _within_budget(problem: Problem, shard: Shard) -> Problem:
    """The problem, its budget less what merging and gathered tokens hold.

    Raises:
        ValueError: the budget is too small; the message, the same on all ranks, says the least.
    """
    if problem.memory_budget is None:
        return problem
    call = sharded_sizes(problem, shard, len(problem.labels))
    fixed = call.fixed + class_logits.held_bytes(problem.labels)
    check_budget(problem, call._replace(fixed=fixed))
    return problem.replace(memory_budget=problem.memory_budget - call.fixed)


def _of_here(labels: Tensor, problem: Problem, shard: Shard) -> tuple[Tensor, Tensor]:
    """Labels among the classes here, -100 elsewhere, and where they lie here; -1 lies nowhere."""
    y = labels - shard.first
    here = (y >= 0) & (y < len(problem.weight)) & (labels >= 0)
    return y.masked_fill(~here, -100), here


def _local_task(task: Task, labels: Tensor, shard: Shard) -> Task:
    """The statistics of the classes here, of which the log-sum-exp is always needed."""
    problem = task.problem
    V, c = len(problem.weight), problem.class_weight
    local = problem.replace(
        labels=labels,
        ignore_index=-100,
        token_weight=None,
        class_weight=None if c is None else c[shard.first : shard.first + V],
        reduce_over=shard.name,
    )
    return task.replace(problem=local, wanted=task.wanted.replace(lse=True))


class _Added(torch.autograd.Function):
    """The sum over ranks, each of which has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: Shard) -> Tensor:
        x = x.clone()
        all_reduce(x, shard.group)  # each logit comes from the rank that holds its row: exact
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _Merged(torch.autograd.Function):
    """This rank's statistics, ``(N,)`` each or None, merged with those of the others, in float64.

    ``facts (3, N)`` bool: tokens that are used, whose label is a class, whose label lies here.
    """

    @staticmethod
    def forward(
        ctx: Any, facts: Tensor, shard: Shard, V: int, nll: Tensor, lse: Tensor,
        entropy: Tensor | None, zmean: Tensor | None, top: Tensor | None, argmax: Tensor | None,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        used, known, here = facts
        nll, lse = nll.double(), lse.double()
        z, others_here = label_and_others(nll, lse)
        rows = [torch.where(here, others_here, lse), torch.where(here, z, -math.inf)]
        if not V:  # no class, whatever the statistics of none are
            rows = [torch.full_like(lse, -math.inf)] * 2
        rows += [] if entropy is None else [entropy]
        rows += [] if zmean is None else [zmean.double() * V]
        if top is not None and argmax is not None:
            rows += [top, argmax + shard.first]
        others, z_labels, *more = of_ranks(rows, shard)  # (ranks, N) each
        all_nll, all_lse = nll_and_lse(others.logsumexp(0), z_labels, known)
        total = torch.logaddexp(others, z_labels)  # of each shard
        all_entropy = None if entropy is None else entropy_of(total, all_lse, more.pop(0))
        all_zmean = None if zmean is None else more.pop(0).sum(0) / shard.V
        likeliest = None
        if argmax is not None:
            tops, classes = more
            likeliest = classes.gather(0, tops.argmax(0, keepdim=True))[0].long()
            likeliest.masked_fill_(~used, -1)
            ctx.mark_non_differentiable(likeliest)
        rank = dist.get_rank(shard.group)
        rest = total.clone()
        rest[rank] = -math.inf
        ctx.save_for_backward(
            facts, total[rank], rest.logsumexp(0), all_nll, all_lse, entropy, all_entropy
        )
        ctx.share = V / shard.V
        ctx.set_materialize_grads(False)
        found = (all_nll, all_lse, all_entropy, all_zmean)
        return *(None if x is None else x.masked_fill(~used, 0) for x in found), likeliest

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        facts, mine, rest, nll, lse, entropy, all_entropy = ctx.saved_tensors
        used, _, here = facts
        of_nll, of_lse, of_entropy, of_zmean = (
            None if u is None else u.double().masked_fill(~used, 0) for u in upstream[:4]
        )
        P, others = (mine - lse).exp(), (rest - lse).exp()  # 1 - P, which does not cancel
        to_lse = torch.zeros_like(P)
        to_nll = to_entropy = None
        if of_nll is not None:
            # NaN for a label that is no class, where P may be a number.
            to_nll = torch.where(here, of_nll, 0) + 0 * nll.masked_fill(nll == math.inf, 0)
            to_lse += torch.where(here, -of_nll * others, of_nll * P)
        if of_lse is not None:
            to_lse += of_lse * P
        if of_entropy is not None:
            to_entropy = of_entropy * P
            surprise = torch.where(P == 0, 0, entropy - all_entropy - (mine - lse))
            to_lse += to_entropy * surprise
        to_zmean = None if of_zmean is None else of_zmean * ctx.share
        return None, None, None, to_nll, to_lse, to_entropy, to_zmean, None, None
