"""Process groups, device meshes and DTensors: the ranks that hold different tokens or rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..agreement import timeout_of

ALONE = object()  # every other rank holds the same tokens
# By name, since operators take no groups as arguments. The references are weak: torch keeps a group
# until it is destroyed, and one kept longer hangs in a forked process, which lacks its threads.
_GROUPS: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()


def name_of(group: dist.ProcessGroup) -> str:
    """The name by which :func:`group_named` finds the group."""
    _GROUPS[group.group_name] = group
    return str(group.group_name)


def group_named(name: str) -> dist.ProcessGroup:
    """The group that :func:`name_of` was last asked for under that name.

    Raises:
        RuntimeError: it was destroyed, or never met here.
    """
    group = _GROUPS.get(name)
    if group is None:
        raise RuntimeError(
            f"the process group {name!r} of a sharded vocabulary is gone: backward must run before "
            f"destroy_process_group(), in the process that ran forward"
        )
    return group


class Ranks:
    """The members of ``group``: a process group, a one-dimensional ``DeviceMesh``, or ``None``.

    ``None`` means all ranks once ``torch.distributed`` is initialised, and one rank before: the
    object may be made before the processes meet.

    Raises:
        TypeError: ``group`` is none of these.
        ValueError: it is a mesh of several dimensions, or this rank is not in the group.
    """

    def __init__(self, group: Any) -> None:
        if _is_mesh(group):
            if group.ndim != 1:
                raise ValueError(
                    f"process_group must be a one-dimensional DeviceMesh, got {group.ndim} "
                    f"dimensions {group.mesh_dim_names}: name those over which tokens differ, "
                    f"e.g. LossAccumulator.from_mesh(mesh, ['dp'])"
                )
            group = group.get_group()
        elif isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "process_group must hold this rank, got what new_group returns on ranks outside "
                "of the group: leave fusedce out there"
            )
        elif group not in (None, ALONE) and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a process group, a DeviceMesh or None, "
                f"got {type(group).__name__}"
            )
        self._given = group

    def group(self) -> dist.ProcessGroup | None:
        """The process group; ``None`` in a single process.

        Raises:
            RuntimeError: the group is destroyed.
        """
        if self._given is ALONE or not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self._given is None else self._given
        try:
            dist.get_process_group_ranks(group)
        except KeyError:
            raise RuntimeError(
                "process_group is gone: destroy_process_group() has ended it; make another one"
            ) from None
        return group

    def size(self) -> int:
        """Number of ranks; 1 in a single process."""
        group = self.group()
        return 1 if group is None else dist.get_world_size(group)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # a copied group would be a second group of the same ranks

    def __reduce__(self) -> Any:
        if self._given is None:
            return Ranks, (None,)
        raise TypeError(
            "a process group cannot be pickled: save state_dict(), and load it into an object "
            "made with the group of the new process"
        )


def submesh(mesh: Any, dims: str | Sequence[str]) -> Any:
    """The one-dimensional mesh over ``dims`` of a mesh with named dimensions.

    Several dimensions are flattened into one; making that group is a collective of all ranks of
    the mesh, done once for the same dimensions. A dimension that the user has flattened already is
    found by its name. Without any dimension, every rank holds the same tokens (:data:`ALONE`).

    Raises:
        TypeError, ValueError: ``mesh`` is not a ``DeviceMesh``, or has no such dimension.
    """
    if not _is_mesh(mesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError("mesh must have named dimensions: init_device_mesh(mesh_dim_names=...)")
    dims = [dims] if isinstance(dims, str) else list(dims)
    if not dims:
        return ALONE
    if len(dims) == 1:
        try:
            return mesh[dims[0]]  # a dimension of the mesh, or a flattened one
        except (KeyError, RuntimeError, ValueError):
            pass
    if not set(dims) <= set(names) or len(set(dims)) != len(dims):
        raise ValueError(f"token_dims must name dimensions of the mesh {names}, once, got {dims}")
    ordered = tuple(name for name in names if name in dims)
    flat = mesh[ordered]._flatten("_".join(("tokens", *ordered)))
    group = flat.get_group()
    timeout = timeout_of(dist.group.WORLD)
    if timeout is not None and group is not dist.group.WORLD:
        set_timeout = getattr(dist, "set_timeout", None)  # of torch 2.15
        (set_timeout or dist.distributed_c10d._set_pg_timeout)(timeout, group)
    return flat


def _is_mesh(x: Any) -> bool:
    if isinstance(x, dist.ProcessGroup):  # which a compiler may not ask for other attributes
        return False
    return hasattr(x, "get_group") and hasattr(x, "mesh_dim_names")


# ---- DTensors -----------------------------------------------------------------------------------


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a ``DTensor``; does not import it."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def local_of(x: Any) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return x.to_local() if is_dtensor(x) else x


def gathered_like(now: Any, like: Any) -> Tensor:
    """The rows of ``now`` that ``like`` has, where ``now`` is sharded in more ways than it.

    Collectives: an all-gather over the mesh's other dimensions.
    """
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    placements: list[Any] = [Replicate()] * now.device_mesh.ndim
    vocabulary = now.device_mesh.mesh_dim_names.index(mesh.mesh_dim_names[0])
    placements[vocabulary] = like.placements[0]
    rows = now.redistribute(placements=placements).to_local().to(like.dtype)
    shape = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(rows, mesh, like.placements, run_check=False, **shape)
