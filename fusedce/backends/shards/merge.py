"""The one merge: of what ranks that hold other classes know about the same tokens.

Log-sum-exps merge as those of tiles do. The label's logit, which one rank has, stays out of them,
so that nothing cancels at p -> 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedce.backends.shards.collectives import all_gather, all_reduce
from fusedce.contract.task import Shard


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

    Both are NaN for a label that is no class (see :func:`fusedce.backends.torch.rows.valid_rows`).
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


def largest(x: Tensor, row: Tensor, others: Tensor, shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
    """The largest ``x (n,)`` of a rank, its ``row``, and all else summed, ``others`` too.

    The row is counted from the first one here. Collectives: one all-gather of 3 float64 a token.
    """
    values, rows, rest = of_ranks([x, row + shard.first, others], shard)
    top, rank = values.max(0, keepdim=True)
    rest = rest + values.scatter(0, rank, 0).masked_fill(values == -math.inf, 0)
    return top[0], rows.gather(0, rank)[0].long() - shard.first, rest.sum(0)
