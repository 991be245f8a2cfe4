"""Statistics of every token's logits on a sharded vocabulary, merged over the ranks.

The backend gets a rank's own rows as a vocabulary of its own, and computes their log-sum-exp,
entropy and maximum. The ranks exchange these few numbers a token and merge shards as the backends
merge tiles.

The backend needs a label of every token. Where the label lies on another rank, the first row here
stands in for it, and backward gives that row the gradient of any other.

The label's own exponential stays out of the sums, so that nothing cancels at p -> 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.backends.choose import get_backend
from fusedce.backends.sharded.collectives import all_gather
from fusedce.contract.objective import Stats
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.rounding import acc_dtype
from fusedce.contract.task import Shard


class Local(NamedTuple):
    """The classes that lie here as a problem of their own, for tokens that all count."""

    problem: Problem  # labels are rows here
    y: Tensor  # (n,) int64 labels among all classes
    here: Tensor  # (n,) bool: the label lies here, else its row stands in for it
    first: int  # the class of the first row here

    def rows_of(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the classes ``y`` where they lie here, 0 elsewhere; and whether they do."""
        here = (y >= self.first) & (y < self.first + len(self.problem.weight))
        return torch.where(here, y - self.first, 0), here

    def with_labels(self, y: Tensor) -> Local:
        """The same tokens with the labels ``y (n,)`` int64 among all classes."""
        labels, here = self.rows_of(y)
        return Local(self.problem.but(labels=labels), y, here, self.first)


def local_problem(problem: Problem, rows: Tensor, shard: Shard) -> Local:
    """The problem of the tokens at ``rows`` and the rows of ``weight`` that are classes."""
    real = shard.real(problem)
    classes = slice(shard.first, shard.first + real)
    bias, c, t = problem.bias, problem.class_weight, problem.temperature
    every = len(rows) == len(problem.labels)
    y = problem.labels[rows].long()
    local = problem.but(
        hidden=problem.hidden if every else problem.hidden[rows],
        weight=problem.weight[:real],
        bias=None if bias is None else bias[:real],
        class_weight=None if c is None else c[classes],
        temperature=None if t is None else t[rows],
        token_weight=None,
        ignore_index=-100,
    )
    return Local(local, y, y, shard.first).with_labels(y)


def stats_over_ranks(local: Local, shard: Shard, wanted: Wanted) -> Stats:
    """Statistics over all ranks' classes; they are equal on all ranks.

    Collectives: one all-gather of float64 numbers a token: two, one more for each of entropy and
    mean logit, two more for argmax.
    """
    n = len(local.y)
    acc = acc_dtype(local.problem.hidden.dtype)
    mine = _of_here(local, shard, wanted)
    k, ranks = len(mine), dist.get_world_size(shard.group)
    of_ranks = all_gather(torch.stack(mine), shard.group).view(ranks, k, n).unbind(1)
    others, z_labels, *more = of_ranks  # (ranks, n) each
    nll, lse = nll_and_lse(others.logsumexp(0), z_labels, local.y, shard)
    entropy = zmean = lse.new_empty(0)
    argmax = None
    if wanted.entropy:
        entropy = _entropy(torch.logaddexp(others, z_labels), lse, more.pop(0))
    if wanted.zmean:
        zmean = more.pop(0).sum(0) / shard.V
    if wanted.argmax:
        tops, classes = more
        argmax = classes.gather(0, tops.argmax(0, keepdim=True))[0].long()
    n_valid = torch.full((), n, dtype=torch.int64, device=lse.device)
    return Stats(nll.to(acc), lse.to(acc), entropy.to(acc), zmean.to(acc), n_valid, argmax)


def nll_and_lse(
    others: Tensor,  # (n,) float64 log-sum-exp of all ranks' logits but the label's
    z_labels: Tensor,  # (ranks, n) float64 the label's logit, -inf on ranks where it does not lie
    y: Tensor,  # (n,) int64 labels among all classes
    shard: Shard,
) -> tuple[Tensor, Tensor]:
    """``(n,)`` float64 each: the label's negative log-probability, and the log-sum-exp, in nats.

    Both are NaN for a label that is no class (see :func:`fusedce.backends.torch.rows.valid_rows`).
    """
    z_label = z_labels.amax(0).masked_fill((y < 0) | (y >= shard.V), math.nan)
    gap = others - z_label
    return torch.logaddexp(gap, torch.zeros_like(gap)), torch.logaddexp(z_label, others)


def _of_here(local: Local, shard: Shard, wanted: Wanted) -> list[Tensor]:
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
    nll, lse = found.nll.double(), found.lse.double()
    z = (lse - nll).masked_fill(lse == -math.inf, -math.inf)  # all classes masked
    # log(exp(lse) - exp(z)), by the formula that is exact: for p of the label near 1, or far from 1
    others = torch.where(nll < 1, z + nll.expm1().log(), lse + (-nll.neg().exp()).log1p())
    others = others.masked_fill(lse == -math.inf, -math.inf)
    mine = [
        torch.where(local.here, others, lse),
        torch.where(local.here, z, -math.inf),
    ]
    if wanted.entropy:
        mine.append(found.entropy.double())
    if wanted.zmean:
        mine.append(found.zmean.double() * len(local.problem.weight))
    if argmax is not None and found.top is not None:
        mine += [found.top.double(), (argmax + shard.first).double()]
    return mine


def _entropy(
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
