"""How vocabulary and tokens lie on ranks, and whether the ranks agree about it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fusedce.backends.sharded.tiles import Shard, all_gather
from fusedce.contract.groups import Ranks
from fusedce.contract.problem import Problem


class Layout(NamedTuple):
    """What lies here, and who holds the rest of the vocabulary."""

    problem: Problem  # of local tensors
    group: dist.ProcessGroup
    tokens_sharded: bool


def layout_of(problem: Problem, process_group: Any, tokens_sharded: bool) -> Layout:
    """Where everything lies, read from placements or from the group given.

    Raises:
        ValueError: a placement or group that does not describe a sharded vocabulary.
    """
    weight: Any = problem.weight
    if not is_dtensor(weight):
        group = Ranks(process_group).group()
        if group is None:
            raise ValueError("process_group: torch.distributed must be initialised, it is not")
        return Layout(problem, group, tokens_sharded)
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
    return Layout(problem._replace(**local), mesh.get_group(dim), tokens_sharded)


def is_dtensor(x: object) -> bool:
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def shard_dim(name: str, x: Any) -> int:
    """The mesh dimension over which ``x`` has ``Shard(0)``, all others replicated.

    Raises:
        ValueError: it is placed in another way.
    """
    sharded = [i for i, p in enumerate(x.placements) if not p.is_replicate()]
    if len(sharded) != 1 or not x.placements[sharded[0]].is_shard(0):
        raise ValueError(
            f"{name} must have Shard(0) over one dimension of its mesh and Replicate() over the "
            f"others, got {x.placements}"
        )
    return sharded[0]


def _tokens_sharded(hidden: Any, dim: int) -> bool:
    for i, placement in enumerate(hidden.placements):
        tokens = placement.is_shard() and placement.dim % hidden.ndim != hidden.ndim - 1
        if not placement.is_replicate() and not (i == dim and tokens):
            raise ValueError(
                f"hidden must be replicated, or sharded over tokens on the weight's mesh "
                f"dimension, got {hidden.placements}"
            )
    return not hidden.placements[dim].is_replicate()


def agree(layout: Layout, vocab_size: int | None) -> Shard:
    """What ranks must know of each other; raises on all of them where they do not fit."""
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int)):
        raise TypeError(f"vocab_size must be an int or None, got {type(vocab_size).__name__}")
    problem = layout.problem
    labels = problem.labels.reshape(-1).long()
    order = torch.arange(1, len(labels) + 1, device=labels.device)
    checksum = (labels * (2 * order + 1)).sum()  # wraps around: depends on values and order
    mine = torch.tensor(
        [len(problem.weight), len(labels), problem.hidden.shape[-1], vocab_size or 0],
        device=labels.device,
    )
    told = all_gather(torch.cat([mine, checksum[None]]), layout.group).view(-1, 5)
    rows, tokens, H, V, checksums = (list(x) for x in zip(*told.tolist(), strict=True))
    if len(set(H)) > 1 or len(set(V)) > 1:
        raise ValueError(f"ranks must agree on H and vocab_size, got H={H}, vocab_size={V}")
    if not layout.tokens_sharded and (len(set(tokens)) > 1 or len(set(checksums)) > 1):
        raise ValueError(
            f"labels must be the same on all ranks that share the vocabulary, they hold {tokens} "
            f"tokens with different labels. (A weight sharded by FSDP is no sharded vocabulary: "
            f"compute the loss inside the module's forward, where it is whole. Tokens that differ "
            f"by design need tokens_sharded=True.)"
        )
    if vocab_size is not None and not 0 < vocab_size <= sum(rows):
        raise ValueError(f"vocab_size must be 1 to {sum(rows)} (all rows), got {vocab_size}")
    return Shard(
        group=layout.group,
        first=sum(rows[: dist.get_rank(layout.group)]),
        V=vocab_size or sum(rows),
        largest=max(rows),
        tokens=tuple(tokens) if layout.tokens_sharded else None,
    )
