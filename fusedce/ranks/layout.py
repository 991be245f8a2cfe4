"""Which rows of the vocabulary and which tokens lie on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.shards import all_gather
from ..contract.groups import Ranks, is_dtensor, local_of
from ..contract.problem import Problem


def is_vocabulary_shard(x: Any) -> bool:
    """Whether ``x`` is a ``DTensor`` of which each rank of a mesh holds some rows."""
    return is_dtensor(x) and x.device_mesh.ndim == 1 and x.placements[0].is_shard(0)


def layout_of(
    problem: Problem, process_group: Any, groups: list[dist.ProcessGroup], tokens_sharded: bool
) -> tuple[Problem, bool]:
    """The problem of local tensors, and whether tokens are sharded, as its DTensors say.

    Raises:
        ValueError: a placement or group that does not describe a sharded vocabulary.
    """
    weight: Any = problem.weight
    if not is_dtensor(weight):
        if not groups:
            raise ValueError("process_group: torch.distributed must be initialised, it is not")
        return problem, tokens_sharded
    if process_group is not None:
        raise ValueError("process_group must be None with a DTensor weight: its mesh is used")
    mesh, placements = weight.device_mesh, weight.placements
    split = [i for i, p in enumerate(placements) if not p.is_replicate()]
    if len(split) != 1 or not placements[split[0]].is_shard(0):
        raise ValueError(
            f"weight must have Shard(0) over one dimension of its mesh and Replicate() over the "
            f"others, got {placements}: pass weight.redistribute(placements="
            f"{_with('Shard(0)', placements, *split[-1:])}), or weight.full_tensor() to compute "
            f"the whole head on each rank"
        )
    for name, x in problem._asdict().items():
        if is_dtensor(x) and x.device_mesh != mesh:
            raise ValueError(f"{name} must be on the mesh of weight {mesh}, got {x.device_mesh}")
    bias, hidden = problem.bias, cast(Any, problem.hidden)
    if bias is not None and getattr(bias, "placements", None) != placements:
        raise ValueError("bias must be a DTensor sharded like weight")
    if is_dtensor(hidden):
        found = hidden.placements[split[0]]
        tokens_sharded = found.is_shard() and found.dim % hidden.ndim != hidden.ndim - 1
        if sum(not p.is_replicate() for p in hidden.placements) != tokens_sharded:
            raise ValueError(
                f"hidden must be replicated, or sharded over tokens on the weight's mesh "
                f"dimension, got {hidden.placements}: pass hidden.redistribute("
                f"placements={_with('Replicate()', placements)})"
            )
    local = {name: local_of(x) for name, x in problem._asdict().items()}
    return problem.replace(**local), tokens_sharded


def _with(placement: str, placements: Sequence[object], at: int = 0) -> str:
    """The text of ``placements`` that are replicated but for one."""
    mended = ["Replicate()"] * len(placements)
    mended[at] = placement
    return f"[{', '.join(mended)}]"


def groups_of(weight: Any, process_group: Any) -> list[dist.ProcessGroup]:
    """The groups in which this rank takes part, as far as they are known before any check.

    First one for each dimension of the mesh on which the weight is replicated, whose ranks must
    hold the same labels; last the ranks that share the vocabulary.
    """
    if not is_dtensor(weight):
        group = Ranks(process_group).group()
        return [] if group is None else [group]
    sharded = [i for i, p in enumerate(weight.placements) if p.is_shard()]
    if len(sharded) != 1:
        return []
    mesh = weight.device_mesh
    others = (i for i in range(mesh.ndim) if i not in sharded and mesh.size(i) > 1)
    return [mesh.get_group(i) for i in (*others, *sharded)]


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
