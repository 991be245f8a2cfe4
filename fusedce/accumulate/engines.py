"""Who runs backward, what it divides by on its own, and accumulators for it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from fusedce.accumulate.checks import OnEmpty
from fusedce.contract.groups import submesh

Made = TypeVar("Made")  # LossAccumulator, whose class methods these are


class Engine:
    """Plain torch, DDP or FSDP: ``loss.backward()``, divided by a constant the user names."""

    no_streaming: str | None = None  # why gradients cannot be corrected at the end

    def __init__(self, divisor: float) -> None:
        if isinstance(divisor, bool) or not isinstance(divisor, (int, float)):
            raise TypeError(f"backward_divisor must be a number, got {type(divisor).__name__}")
        if not 0 < divisor < math.inf:
            raise ValueError(f"backward_divisor must be positive, got {divisor}")
        self._divisor = divisor

    def divisor(self) -> float:
        return self._divisor

    def upstreams(self) -> tuple[float, ...]:
        """Factors that may multiply the loss on its way to backward, the likeliest first."""
        return (1.0, 1 / self._divisor)  # the engine divides the gradient, or the loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def without_repeats(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return batch

    def check_evaluated(self) -> None:
        """Notice a batch whose samples are partly repeated ones."""


class AccelerateEngine(Engine):
    """``accelerator.backward``, which divides every loss by ``gradient_accumulation_steps``.

    Also in the last, shorter window of an epoch. The number is read at each loss, since trainers
    change it while they run.
    """

    def __init__(self, accelerator: Any) -> None:
        kind = _kind(accelerator)
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
        self._left_out: int | None = None  # the last batch that was rid of its repeats

    def divisor(self) -> float:
        return self._accelerator.gradient_accumulation_steps

    def upstreams(self) -> tuple[float, ...]:
        return (1 / self.divisor(),)

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def without_repeats(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if (real := self._real_samples()) is None:
            return batch
        self._left_out = real
        names = [name for name in ("labels", "shift_labels") if name in batch]
        if not names:
            raise ValueError(f'batch must hold "labels", got the keys {sorted(batch)}')
        rows = len(batch[names[0]])
        mine = max(real - self._accelerator.process_index * rows, 0)
        masked = {name: batch[name].clone() for name in names}
        for labels in masked.values():
            labels[mine:] = -100
        return {**batch, **masked}

    def check_evaluated(self) -> None:
        repeats = self._real_samples() is not None
        if repeats and self._left_out is None:
            warnings.warn(
                "accelerate has repeated samples to fill the last batches of this dataloader, and "
                "their tokens are counted twice: acc.add(model(**acc.without_repeats(batch)))",
                stacklevel=3,
            )
        self._left_out = None

    def _real_samples(self) -> int | None:
        """Samples in the last round of all ranks' batches, where it is filled with repeats."""
        state = getattr(self._accelerator, "gradient_state", None)
        if state is None or self._accelerator.num_processes == 1:
            return None
        return state.remainder if state.end_of_dataloader and state.remainder > 0 else None


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

    Examples:
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        >>> acc = LossAccumulator.from_accelerator(accelerator)
    """
    new: Any = cls(token_mesh(accelerator), on_empty=on_empty)
    new._steps.engine = AccelerateEngine(accelerator)
    return new


def token_mesh(accelerator: Any) -> Any:
    """The ranks of an ``Accelerator`` that hold distinct tokens; ``None`` means all.

    Raises:
        TypeError: not an ``Accelerator``.
        ValueError: the ranks share sequences in a way that no mesh describes.
    """
    _kind(accelerator)
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is not None and getattr(parallel, "sp_enabled", False):
        raise ValueError(
            "accelerator: DeepSpeed's sequence parallelism has process groups of its own; build "
            "LossAccumulator(process_group=...) with the ranks that hold distinct tokens"
        )
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is None:
        return None
    # Context-parallel ranks hold distinct slices; tensor-parallel ones the same tokens.
    return submesh(mesh, [name for name in mesh.mesh_dim_names if name != "tp"])


def _kind(accelerator: Any) -> str:
    needed = ("distributed_type", "gradient_accumulation_steps", "backward")
    lacking = [name for name in needed if not hasattr(accelerator, name)]
    if lacking:
        raise TypeError(
            f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__} "
            f"without {', '.join(lacking)}"
        )
    kind = accelerator.distributed_type
    return str(getattr(kind, "value", kind))
