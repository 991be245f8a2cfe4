"""Engines that run backward, and accumulators for a mesh or for ``accelerate``.

An engine may divide the loss or its gradient by a constant; an accumulator undoes that division.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from torch import Tensor

from fusedce.accumulate.arguments import OnEmpty
from fusedce.accumulate.exchange import Exchange
from fusedce.contract.groups import Ranks, submesh

Accumulator = TypeVar("Accumulator")  # LossAccumulator: the constructors become its class methods


class Engine:
    """Runs ``loss.backward()`` (plain torch, DDP, FSDP); the user may name a constant divisor."""

    no_streaming: str | None = None  # why gradients cannot be corrected at the end

    def __init__(self, divisor: float) -> None:
        if isinstance(divisor, bool) or not isinstance(divisor, (int, float)):
            raise TypeError(f"backward_divisor must be a number, got {type(divisor).__name__}")
        if not 0 < divisor < math.inf:
            raise ValueError(f"backward_divisor must be positive, got {divisor}")
        self._divisor = divisor

    def divisor(self) -> float:
        """The constant by which the engine divides each loss or gradient."""
        return self._divisor

    def upstreams(self) -> tuple[float, ...]:
        """Factors that may multiply the loss on its way to backward, the likeliest first."""
        return (1.0, 1 / self._divisor)  # the engine divides the gradient, or the loss

    def backward(self, loss: Tensor) -> None:
        """Differentiate ``loss ()``."""
        loss.backward()

    def without_repeats(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :meth:`LossAccumulator.without_repeats`."""
        return batch


class AccelerateEngine(Engine):
    """Runs ``accelerator.backward``, which divides each loss by ``gradient_accumulation_steps``.

    It does so in the last, shorter window of an epoch as well. The number is read at each loss,
    since trainers change it while they run.
    """

    def __init__(self, accelerator: Any) -> None:
        needed = ("distributed_type", "gradient_accumulation_steps", "backward")
        if not all(hasattr(accelerator, name) for name in needed):
            raise TypeError(
                f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}"
            )
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if kind == "MEGATRON_LM":
            raise ValueError(
                "accelerator: Megatron-LM computes and divides the loss in its own train step, "
                "a LossAccumulator cannot reach it"
            )
        if kind == "DEEPSPEED":
            self.no_streaming = (
                "accelerate's DeepSpeed engine steps the optimizer inside the last backward of a "
                "window (and ZeRO leaves no .grad), so finish() would come too late to correct "
                "the gradients. Declare the counts: `with acc.window([count_valid(...) for each "
                "micro-batch])`."
            )
        self._accelerator = accelerator

    def divisor(self) -> float:
        """The number of micro-batches by which accelerate divides each loss now."""
        return self._accelerator.gradient_accumulation_steps

    def upstreams(self) -> tuple[float, ...]:
        """The one factor of ``accelerator.backward``."""
        return (1 / self.divisor(),)

    def backward(self, loss: Tensor) -> None:
        """Divide ``loss ()`` as accelerate does, and differentiate it."""
        self._accelerator.backward(loss)

    def without_repeats(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A copy of the last batch, its ``labels`` and ``shift_labels`` of repeats set to -100."""
        state = getattr(self._accelerator, "gradient_state", None)
        real = 0  # samples of the last round of batches over ranks, where some are repeated
        if state is not None and state.end_of_dataloader and self._accelerator.num_processes > 1:
            real = state.remainder
        if real <= 0:
            return batch
        masked = {n: batch[n].clone() for n in ("labels", "shift_labels") if n in batch}
        if not masked:
            raise ValueError(f'batch must hold "labels", got the keys {sorted(batch)}')
        for labels in masked.values():
            labels[max(real - self._accelerator.process_index * len(labels), 0) :] = -100
        return {**batch, **masked}


def from_mesh(
    cls: Callable[..., Accumulator],
    mesh: Any,
    token_dims: str | Sequence[str],
    *,
    pipeline_dim: str | None = None,
    has_loss: bool | None = None,
    grad_reduction: Literal["mean", "sum"] = "mean",
    backward_divisor: float = 1,
    on_empty: OnEmpty = "zero",
) -> Accumulator:
    """Make an accumulator for the ranks along ``token_dims`` of a ``DeviceMesh``.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> acc = LossAccumulator.from_mesh(mesh, "dp")

    Args:
        mesh: e.g. ``init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "tp"))``.
        token_dims: the dimensions over which tokens differ: data and context parallel ones,
            not tensor parallel ones. An empty list: every rank holds the same tokens. Several are
            flattened into one new group, by one collective of all ranks of the mesh.
        pipeline_dim: the dimension over which a pipeline's stages lie. All of them open the
            same windows (``acc.window()`` without counts where there is no loss) and call
            ``finish``; the schedule needs ``scale_grads=False``, and
            ``loss_fn=lambda out, y: acc.scale(...)`` (``examples/pipeline.py``).
        has_loss: whether this rank computes the loss; by default, the last stage does.
        grad_reduction, backward_divisor, on_empty: as for the class.
    """
    new: Any = cls(
        submesh(mesh, token_dims),
        grad_reduction=grad_reduction,
        backward_divisor=backward_divisor,
        on_empty=on_empty,
    )
    if pipeline_dim is not None:
        dims = [token_dims] if isinstance(token_dims, str) else list(token_dims)
        new._exchange = Exchange(Ranks(submesh(mesh, [*dims, pipeline_dim])))
        last = mesh.get_local_rank(pipeline_dim) == mesh[pipeline_dim].size() - 1
        new._has_loss = last if has_loss is None else has_loss
    return new


def from_accelerator(
    cls: Callable[..., Accumulator], accelerator: Any, *, on_empty: OnEmpty = "zero"
) -> Accumulator:
    """Make an accumulator for a loop that uses ``accelerate``.

    ``backward`` calls ``accelerator.backward``, and its constant division by
    ``gradient_accumulation_steps``, also in a shorter last window, is undone. Streaming fits
    ``accelerator.accumulate``; with declared counts draw the micro-batches of a window first
    and do not use ``accumulate``: the dataloader is then exhausted before the last window is
    computed, and ``accumulate`` would end the step at each of its micro-batches
    (``examples/accelerate_loop.py`` shows both). It works on one device, and with DDP, FSDP or
    DeepSpeed (declared counts only).

    Examples:
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        >>> acc = LossAccumulator.from_accelerator(accelerator)
    """
    engine = AccelerateEngine(accelerator)
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is not None and getattr(parallel, "sp_enabled", False):
        raise ValueError(
            "accelerator: DeepSpeed's sequence parallelism has process groups of its own; build "
            "LossAccumulator(process_group=...) with the ranks that hold distinct tokens"
        )
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is not None:
        # Context-parallel ranks hold distinct slices; tensor-parallel ones the same tokens.
        mesh = submesh(mesh, [name for name in mesh.mesh_dim_names if name != "tp"])
    new: Any = cls(mesh, on_empty=on_empty)
    new._engine = engine
    return new
