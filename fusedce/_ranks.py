"""The ranks that share one denominator: a process group, or this process alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The members of ``group``: a process group, a one-dimensional ``DeviceMesh``, or ``None``.

    ``None`` means all ranks if ``torch.distributed`` is initialised *when asked*, else one rank:
    the object may be made before the processes meet.

    Raises:
        TypeError, ValueError: ``group`` is none of those.
    """

    def __init__(self, group: Any) -> None:
        if hasattr(group, "get_group") and hasattr(group, "ndim"):  # a DeviceMesh
            if group.ndim != 1:
                raise ValueError(
                    f"process_group must be a one-dimensional DeviceMesh, got {group.ndim} "
                    f"dimensions: pick the one over which tokens differ, e.g. mesh['dp']"
                )
            group = group.get_group()
        elif group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a process group, a DeviceMesh or None, "
                f"got {type(group).__name__}"
            )
        self._given = group

    def group(self) -> dist.ProcessGroup | None:
        """The process group; ``None`` in a single process."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        return dist.group.WORLD if self._given is None else self._given

    def size(self) -> int:
        group = self.group()
        return 1 if group is None else dist.get_world_size(group)

    def rank(self) -> int:
        group = self.group()
        return 0 if group is None else dist.get_rank(group)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over ranks, in a new tensor where there are several."""
        group = self.group()
        if group is None:
            return values
        device = values.device
        if device.type == "cpu" and dist.get_backend(group) in ("nccl", "xccl"):
            accelerator = torch.accelerator.current_accelerator()
            device = device if accelerator is None else accelerator
        values = values.detach().to(device, copy=True)
        dist.all_reduce(values, group=group)
        return values
