"""The placement of vocabulary and tokens on ranks, read from DTensors or groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from fusedce.contract.groups import Ranks
from fusedce.contract.problem import Problem


class Layout(NamedTuple):
    """This rank's tensors, and the ranks that hold the rest of the vocabulary."""

    problem: Problem  # of local tensors
    groups: list[dist.ProcessGroup]  # as :func:`groups_of`, the vocabulary's last
    tokens_sharded: bool


def layout_of(problem: Problem, process_group: Any, tokens_sharded: bool) -> Layout:
    """The placement of a problem, read from its DTensors or from the group that was given.

    Raises:
        ValueError: a placement or group that does not describe a sharded vocabulary.
    """
    weight: Any = problem.weight
    if not is_dtensor(weight):
        groups = groups_of(weight, process_group)
        if not groups:
            raise ValueError("process_group: torch.distributed must be initialised, it is not")
        return Layout(problem, groups, tokens_sharded)
    if process_group is not None:
        raise ValueError("process_group is for a local shard; a DTensor weight knows its ranks")
    mesh, dim = weight.device_mesh, shard_dim("weight", weight)
    bias = problem.bias
    if bias is not None and (not is_dtensor(bias) or shard_dim("bias", bias) != dim):
        raise ValueError("bias must be a DTensor sharded like weight")
    if is_dtensor(problem.hidden):
        tokens_sharded = _tokens_sharded(problem.hidden, dim)
    local: dict[str, Any] = {}
    for name, x in problem._asdict().items():
        if is_dtensor(x):
            if x.device_mesh != mesh:
                raise ValueError(
                    f"{name} must be on the mesh of weight {mesh}, got {x.device_mesh}"
                )
            local[name] = x.to_local()
    return Layout(problem.but(**local), groups_of(weight, None), tokens_sharded)


def groups_of(weight: Any, process_group: Any) -> list[dist.ProcessGroup]:
    """The groups in which this rank takes part, as far as they are known before any check.

    Over each dimension of the mesh on which the weight is replicated, the ranks that must hold the
    same; last, those that share the vocabulary.
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


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a ``DTensor``; does not import it."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def shard_dim(name: str, x: Any) -> int:
    """The mesh dimension over which ``x`` has ``Shard(0)``, all others replicated.

    Raises:
        ValueError: it has another placement.
    """
    sharded = [i for i, p in enumerate(x.placements) if not p.is_replicate()]
    if not sharded:
        raise ValueError(
            f"{name} must have Shard(0) over one dimension of its mesh, got {x.placements}: every "
            f"rank holds the whole {name}, so pass {name}.to_local()"
        )
    if len(sharded) != 1 or not x.placements[sharded[0]].is_shard(0):
        mended = ["Replicate()"] * x.device_mesh.ndim
        mended[sharded[-1]] = "Shard(0)"
        raise ValueError(
            f"{name} must have Shard(0) over one dimension of its mesh and Replicate() over the "
            f"others, got {x.placements}: pass "
            f"{name}.redistribute(placements=[{', '.join(mended)}])"
        )
    return sharded[0]


def _tokens_sharded(hidden: Any, dim: int) -> bool:
    """Whether ``hidden`` is sharded over tokens on the mesh dimension of the vocabulary."""
    for i, placement in enumerate(hidden.placements):
        tokens = placement.is_shard() and placement.dim % hidden.ndim != hidden.ndim - 1
        if not placement.is_replicate() and not (i == dim and tokens):
            raise ValueError(
                f"hidden must be replicated, or sharded over tokens on the weight's mesh "
                f"dimension, got {hidden.placements}: pass hidden.redistribute(placements="
                f"[{', '.join(['Replicate()'] * len(hidden.placements))}])"
            )
    return not hidden.placements[dim].is_replicate()
