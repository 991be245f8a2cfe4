"""The ranks that share one denominator: a process group, or this process alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.faults import MEETINGS

ALONE = object()  # every other rank holds the same tokens


class Ranks:
    """The members of ``group``: a process group, a one-dimensional ``DeviceMesh``, or ``None``.

    ``None`` means all ranks if ``torch.distributed`` is initialised *when asked*, else one rank:
    the object may be made before the processes meet.

    Raises:
        TypeError, ValueError: ``group`` is none of those.
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
        elif group not in (None, ALONE) and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a process group, a DeviceMesh or None, "
                f"got {type(group).__name__}"
            )
        self._given = group

    def group(self) -> dist.ProcessGroup | None:
        """The process group; ``None`` in a single process."""
        if self._given is ALONE or not (dist.is_available() and dist.is_initialized()):
            return None
        return dist.group.WORLD if self._given is None else self._given

    def size(self) -> int:
        group = self.group()
        return 1 if group is None else dist.get_world_size(group)

    def rank(self) -> int:
        group = self.group()
        return 0 if group is None else dist.get_rank(group)

    def meet(self, what: str, values: Tensor, faults: _faults.DeviceFaults) -> Tensor:
        """Sum ``values (3,)`` over ranks, in float64; one all-reduce of 5 numbers.

        The two beside the values say what for: a rank that has run out of data and reads metrics
        must not be added to one that opens a window.
        """
        group = self.group()
        values = values.detach().double()
        if group is None:
            return values
        kind = MEETINGS.index(what)
        kinds = torch.stack([torch.full_like(values[0], x) for x in (kind, kind * kind)])
        total = self._all_reduce(torch.cat([values, kinds]), group)
        *_, sum_k, sum_k2 = total.unbind()
        ranks = dist.get_world_size(group)
        # Numbers are equal exactly where their variance is zero.
        faults.note(_faults.ranks_elsewhere, ranks * sum_k2 != sum_k * sum_k, kind)
        return total[:3]

    @staticmethod
    def _all_reduce(values: Tensor, group: dist.ProcessGroup) -> Tensor:
        device = values.device
        if device.type == "cpu" and dist.get_backend(group) in ("nccl", "xccl"):
            accelerator = torch.accelerator.current_accelerator()
            device = device if accelerator is None else accelerator
        values = _faults.moved(values, device)
        dist.all_reduce(values, group=group)
        return values


def submesh(mesh: Any, dims: str | Sequence[str]) -> Any:
    """The one-dimensional mesh over ``dims`` of a mesh with named dimensions.

    Several dimensions are flattened into one; making that group is a collective of all ranks of
    the mesh, done once for the same dimensions. None at all: every rank holds the same tokens.

    Raises:
        TypeError, ValueError: ``mesh`` is not a ``DeviceMesh``, or has no such dimension.
    """
    if not _is_mesh(mesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError("mesh must have named dimensions: init_device_mesh(mesh_dim_names=...)")
    dims = [dims] if isinstance(dims, str) else list(dims)
    unknown = [dim for dim in dims if dim not in names]
    if unknown or len(set(dims)) != len(dims):
        raise ValueError(f"token_dims must name dimensions of the mesh {names}, once, got {dims}")
    if not dims:
        return ALONE
    if len(dims) == 1:
        return mesh[dims[0]]
    ordered = tuple(name for name in names if name in dims)
    return mesh[ordered]._flatten("_".join(("tokens", *ordered)))


def _is_mesh(x: Any) -> bool:
    return hasattr(x, "get_group") and hasattr(x, "mesh_dim_names")
