"""Collectives of ranks that share a vocabulary: gather their tokens, merge their statistics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.agreement import ALL_GATHER, not_all_came
from fusedce.backends.gradients import copied_bytes, sizes_of
from fusedce.backends.plan import DEVICE_BUDGET, Sizes
from fusedce.contract.problem import Outputs, Problem, Shard, acc_dtype


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x (n, ...)`` of every rank, one after the other: ``(ranks * n, ...)``."""
    out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    with waiting_for_ranks(group):
        getattr(dist, ALL_GATHER)(out, x.contiguous(), group=group)
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> None:
    """Add up the ranks' ``x`` in place."""
    with waiting_for_ranks(group):
        dist.all_reduce(x, group=group)


@contextlib.contextmanager
def waiting_for_ranks(group: dist.ProcessGroup) -> Iterator[None]:
    """Explain an error of a collective: other ranks have not come in time."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{not_all_came(group, 'compute a loss over a sharded vocabulary')}. Look at what the "
            f"other ranks do: each that shares the vocabulary needs the same calls and backwards, "
            f"in the same order, and one that has failed says why in its own output"
        ) from error


def sharded_sizes(problem: Problem, shard: Shard, n: int) -> Sizes:
    """Sizes for a plan of ``n`` tokens, of the largest shard: all ranks make the same plan."""
    acc, triton = acc_dtype(problem.hidden.dtype).itemsize, problem.by_triton()
    wanted, logit = Outputs(hidden=True, weight=True), None if triton else acc
    call = sizes_of(problem, wanted, n, logit=logit, triton=triton)
    V = max(shard.largest, 1)
    return call._replace(
        V=V, fixed=64 * call.N + shard.gathered, copies=max(call.copies, 3),
        threads=1, budget=DEVICE_BUDGET,
    ).with_copies(*copied_bytes(problem, V) if triton else (0, 0))  # fmt: skip


# ---- tokens of each rank's own ------------------------------------------------------------------


class Tokens(NamedTuple):
    """Tokens of all ranks, one rank after the other, each padded to ``most``.

    Without ``group`` all ranks hold the same tokens, and nothing is done.
    """

    group: dist.ProcessGroup | None = None
    n: int = 0  # tokens of this rank's own
    most: int = 0

    def all_of(self, problem: Problem) -> Problem:
        """The problem of every rank's tokens, padded by ignored ones; differentiable in hidden.

        Collectives: an all-gather each of hidden states, labels, and token weights and temperatures
        if there are any; these two in float64, since ranks may hold them in different dtypes.
        """
        if self.group is None:
            return problem
        w, t = problem.token_weight, problem.temperature
        assert problem.ignore_index is not None
        return problem.replace(
            hidden=_Gathered.apply(problem.hidden, self),
            labels=self.gather(problem.labels, problem.ignore_index),
            token_weight=None if w is None else self.gather(w.double()),
            temperature=None if t is None else self.gather(t.double(), 1),
        )

    def gather(self, x: Tensor, fill: float = 0) -> Tensor:
        """``x (n, ...)`` of every rank; ``fill`` is the padding."""
        if self.group is None:
            return x
        padded = x.new_full((self.most, *x.shape[1:]), fill)
        padded[: len(x)] = x
        return all_gather(padded, self.group)

    def own(self, *every: Tensor) -> tuple[Tensor, ...]:
        """This rank's tokens of each ``(ranks * most, ...)``, differentiable.

        Collectives, in backward: one all-gather of the upstream gradients.
        """
        if self.group is None:
            return every
        return _Own.apply(self, *every)

    def place(self) -> slice:
        """The slice of this rank's own tokens among those of all ranks."""
        first = dist.get_rank(self.group) * self.most
        return slice(first, first + self.n)


ALL_HERE = Tokens()
"""All ranks hold the same tokens, or there is one rank."""


class _Gathered(torch.autograd.Function):
    """Hidden states of all ranks. Each rank has the whole of their gradient, and keeps its own."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tokens: Tokens) -> Tensor:
        ctx.tokens = tokens
        return tokens.gather(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad[ctx.tokens.place()].clone(), None


class _Own(torch.autograd.Function):
    """This rank's tokens; backward brings the upstream gradients of all ranks' tokens together.

    One node for all statistics, so that all ranks run it whichever of them each of them uses.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tokens, *every: Tensor) -> tuple[Tensor, ...]:
        own = tuple(x[tokens.place()].clone() for x in every)
        ctx.mark_non_differentiable(*(x for x in own if not x.is_floating_point()))
        ctx.tokens, ctx.differentiable = tokens, [x.is_floating_point() for x in own]
        return own

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        given = [u for u, x in zip(upstream, ctx.differentiable, strict=True) if x]
        columns = [u.flatten(1) if u.dim() > 1 else u[:, None] for u in given]
        table = ctx.tokens.gather(torch.cat(columns, 1))
        parts = iter(table.split([x.shape[1] for x in columns], 1))
        found: list[Tensor | None] = []
        for u, x in zip(upstream, ctx.differentiable, strict=True):
            part = next(parts).reshape(-1, *u.shape[1:]) if x else None
            # Skip a statistic whose gradient is 0 for every rank's tokens.
            needed = part is not None and (not found or bool(part.ne(0).any()))
            found.append(part if needed else None)
        return None, *found


# ---- merging statistics of the same tokens over ranks with other classes ------------------------
#
# Log-sum-exps of ranks merge as those of tiles do. They leave out the label's logit, which one rank
# has, so that nothing cancels at p -> 1.


def of_ranks(rows: list[Tensor], shard: Shard) -> list[Tensor]:
    """``(ranks, n)`` float64 of each of ``rows (n,)``. Collectives: one all-gather of all."""
    table = all_gather(torch.stack([x.double() for x in rows]), shard.group)
    return [table[i :: len(rows)] for i in range(len(rows))]


def sums(rows: list[Tensor], shard: Shard) -> list[Tensor]:
    """Totals of float64 ``rows (n,)``. Collectives: one all-reduce of all."""
    table = torch.stack(rows)
    all_reduce(table, shard.group)
    return list(table.unbind())


def nll_and_lse(
    others: Tensor,  # (n,) float64 log-sum-exp of all ranks' logits but the label's
    z_labels: Tensor,  # (ranks, n) float64 the label's logit, -inf on ranks where it does not lie
    known: Tensor,  # (n,) bool: the label is a class
) -> tuple[Tensor, Tensor]:
    """``(n,)`` float64 each: the label's negative log-probability, and the log-sum-exp, in nats.

    Both are NaN for a label that is no class (see :func:`fusedce.contract.labels.used_tokens`).
    """
    z_label = z_labels.amax(0).masked_fill(~known, math.nan)
    gap = others - z_label
    nll = torch.logaddexp(gap, torch.zeros_like(gap)).masked_fill(z_label == math.inf, math.nan)
    return nll, torch.logaddexp(z_label, others)


def label_and_others(nll: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """``(n,)`` float64 each: the label's logit, and the log-sum-exp of the others'."""
    nll, lse = nll.double(), lse.double()
    masked = lse == -math.inf  # all classes are
    z = (lse - nll).masked_fill(masked, -math.inf)
    # log(exp(lse) - exp(z)), by the formula that is exact: for p of the label near 1, or far from 1
    others = torch.where(nll < 1, z + nll.expm1().log(), lse + (-nll.neg().exp()).log1p())
    return z, others.masked_fill(masked, -math.inf)


def entropy_of(
    lses: Tensor,  # (ranks, n) log-sum-exp of each shard
    lse: Tensor,  # (n,)
    entropies: Tensor,  # (ranks, n) of each shard
) -> Tensor:
    """``sum over shards of P * (entropy - log P)``, ``P`` a shard's probability: chain rule."""
    top, winner = lses.max(0, keepdim=True)
    above = lses - top
    others = above.exp().scatter(0, winner, 0).sum(0)
    surprise = others.log1p() - above  # -log P, where nothing cancels at P -> 1
    p = (lses - lse).exp()
    return torch.where(p == 0, 0.0, p * (entropies + surprise)).sum(0)
