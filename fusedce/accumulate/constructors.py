"""Accumulators for the ranks of a mesh, and for an engine that divides on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from fusedce.accumulate.engines import AccelerateEngine, token_mesh
from fusedce.accumulate.ranks import Meeting
from fusedce.contract.groups import Ranks, submesh

OnEmpty = Literal["zero", "skip", "raise"]
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

    Example:
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


def from_accelerator(
    cls: Callable[..., Made], accelerator: Any, *, on_empty: OnEmpty = "zero"
) -> Made:
    """For a loop that uses ``accelerate``: its ranks, its division, its backward.

    ``backward`` calls ``accelerator.backward``, and its constant division by
    ``gradient_accumulation_steps``, also in a shorter last window, is undone. Streaming fits
    ``accelerator.accumulate``; with declared counts draw the micro-batches of a window first
    and do without ``accumulate``, which takes each of the last ones for the end of the epoch
    once the dataloader is exhausted (``examples/accelerate_loop.py`` shows both).

    Args:
        accelerator: an ``accelerate.Accelerator``, on one device, with DDP, FSDP or DeepSpeed
            (declared counts only).
        on_empty: as for the class.

    Raises:
        TypeError: not an ``Accelerator``.
        ValueError: Megatron-LM, or DeepSpeed's sequence parallelism.

    Example:
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        >>> acc = LossAccumulator.from_accelerator(accelerator)
    """
    new: Any = cls(token_mesh(accelerator), on_empty=on_empty)
    new._engine = AccelerateEngine(accelerator)
    return new
