"""An accumulator for the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from fusedce.accumulate.checks import OnEmpty
from fusedce.accumulate.ranks import Meeting
from fusedce.contract.groups import Ranks, submesh

Made = TypeVar("Made")  # LossAccumulator, whose class methods these are


def from_mesh(
    cls: Callable[..., Made],
    mesh: Any,
    token_dims: str | Sequence[str],
    *,
    pipeline_dim: str | None = None,
    has_loss: bool | None = None,
    grad_reduction: Literal["mean", "sum"] = "mean",
    backward_divisor: float = 1,
    on_empty: OnEmpty = "zero",
) -> Made:
    """For the ranks along ``token_dims`` of a ``DeviceMesh`` with named dimensions.

    Args:
        mesh: e.g. ``init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "tp"))``.
        token_dims: the dimensions over which tokens differ: data and context parallel ones,
            not tensor parallel ones. None at all: every rank holds the same tokens.
        pipeline_dim: the dimension over which a pipeline's stages lie. All of them open the
            same windows (``acc.window()`` without counts where there is no loss) and call
            ``finish``; the schedule needs ``scale_grads=False``, and
            ``loss_fn=lambda out, y: acc.scale(...)`` (``examples/pipeline.py``).
        has_loss: whether this rank computes the loss; by default, the last stage does.
        grad_reduction, backward_divisor, on_empty: as for the class.

    Collectives: several dimensions make one new group, on all ranks of the mesh, once.

    Raises:
        TypeError, ValueError: ``mesh`` is not a ``DeviceMesh`` or has no such dimensions.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> acc = LossAccumulator.from_mesh(mesh, "dp")
    """
    new: Any = cls(
        submesh(mesh, token_dims),
        grad_reduction=grad_reduction,
        backward_divisor=backward_divisor,
        on_empty=on_empty,
    )
    if pipeline_dim is not None:
        dims = [token_dims] if isinstance(token_dims, str) else list(token_dims)
        new._steps.meeting = Meeting(Ranks(submesh(mesh, [*dims, pipeline_dim])))
        last = mesh.get_local_rank(pipeline_dim) == mesh[pipeline_dim].size() - 1
        new._steps.has_loss = last if has_loss is None else has_loss
    return new
