"""Collectives of ranks that share a vocabulary, and how their statistics of a token merge."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from ..agreement import ALL_GATHER, not_all_came
from ..contract.problem import ACC_DTYPE, Outputs, Problem, Shard
from .gradients import copied_bytes, sizes_of
from .plan import DEVICE_BUDGET, Sizes


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
    acc, triton = ACC_DTYPE[problem.hidden.dtype].itemsize, problem.by_triton()
    wanted, logit = Outputs(hidden=True, weight=True), None if triton else acc
    call = sizes_of(problem, wanted, n, logit=logit, triton=triton)
    V = max(shard.largest, 1)
    return call._replace(
        V=V, fixed=64 * call.N + shard.gathered, copies=max(call.copies, 3),
        threads=1, budget=DEVICE_BUDGET,
    ).with_copies(*copied_bytes(problem, V) if triton else (0, 0))  # fmt: skip


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
