"""Engines that run backward: what they divide by, where they hold gradients; constructors for them.

An engine may divide the loss or its gradient by a constant; an accumulator undoes that division.
It may also keep gradients outside of ``.grad``, where only its private attributes show them: all
uses of torch's private names are in this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.autograd.variable import Variable
from torch.distributed import _composable_state

from ..contract.groups import Ranks, submesh
from .arguments import OnEmpty, describe

Accumulator = TypeVar("Accumulator")  # LossAccumulator: the constructors become its class methods


class Engine:
    """Runs ``loss.backward()`` (plain torch, DDP, FSDP); the user may name a constant divisor."""

    no_streaming: str | None = None  # why gradients cannot be corrected at the end

    def __init__(self, divisor: float, grad_scaler: Any = None) -> None:
        if isinstance(divisor, bool) or not isinstance(divisor, (int, float)):
            raise TypeError(f"backward_divisor must be a number, got {type(divisor).__name__}")
        if not 0 < divisor < math.inf:
            raise ValueError(f"backward_divisor must be positive, got {divisor}")
        if grad_scaler is not None and not callable(getattr(grad_scaler, "scale", None)):
            raise TypeError(
                f"grad_scaler must be a torch.amp.GradScaler, got {describe(grad_scaler)}"
            )
        self._divisor, self.grad_scaler = divisor, grad_scaler

    def divisor(self) -> float:
        """The constant by which the engine divides each loss or gradient."""
        return self._divisor

    def expected_loss_factors(self) -> tuple[float, ...]:
        """Factors that may multiply the loss on its way to backward, the likeliest first."""
        return (1.0, 1 / self._divisor)  # the engine divides the gradient, or the loss

    def backward(self, loss: Tensor) -> None:
        """Differentiate ``loss ()``, times the loss scale."""
        (loss if self.grad_scaler is None else self.grad_scaler.scale(loss)).backward()

    def check_opening(self, n_micro: int) -> None:
        """Raise where the engine cannot take a window of so many micro-batches now."""

    def check_closing(self, n_micro: int) -> None:
        """Raise where the engine has not followed the window that ends."""

    def mask_repeated_samples(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """See :meth:`LossAccumulator.mask_repeated_samples`."""
        return batch


class Pipeline(NamedTuple):
    """The ranks of a pipeline, which share windows though only its last stage has losses."""

    stages: Ranks  # one of each stage: together they hold the model
    everyone: Ranks  # of all pipelines that share windows
    has_loss: bool  # whether this rank computes losses


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
        self.grad_scaler = getattr(accelerator, "scaler", None)

    def divisor(self) -> float:
        """The number of micro-batches by which accelerate divides each loss now."""
        return self._accelerator.gradient_accumulation_steps

    def expected_loss_factors(self) -> tuple[float, ...]:
        """The one factor of ``accelerator.backward``."""
        return (1 / self.divisor(),)

    def backward(self, loss: Tensor) -> None:
        """Divide ``loss ()`` as accelerate does, and differentiate it."""
        self._accelerator.backward(loss)

    def mask_repeated_samples(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A copy of the last batch, its ``labels`` and ``shift_labels`` of repeats set to -100."""
        state = getattr(self._accelerator, "gradient_state", None)
        real = 0  # samples of the last round of batches over ranks, where some are repeated
        if state is not None and state.end_of_dataloader and self._accelerator.num_processes > 1:
            real = state.remainder
        loader = getattr(state, "active_dataloader", None)
        repeats = getattr(getattr(loader, "batch_sampler", None), "even_batches", True)
        if real <= 0 or not repeats:
            return batch
        masked = {n: batch[n].clone() for n in ("labels", "shift_labels") if n in batch}
        if not masked:
            raise ValueError(f'batch must hold "labels", got the keys {sorted(batch)}')
        for labels in masked.values():
            labels[max(real - self._accelerator.process_index * len(labels), 0) :] = -100
        return {**batch, **masked}


class DeepSpeedEngine(Engine):
    """Runs ``engine.backward``, which divides each loss by its number of micro-batches."""

    no_streaming = (
        "DeepSpeed keeps gradients outside of .grad, so finish() could not correct them. Declare "
        "the counts: `with acc.window([count_valid(...) for each micro-batch])`"
    )
    grad_scaler = None

    def __init__(self, engine: Any) -> None:
        needed = ("gradient_accumulation_steps", "micro_steps", "seq_data_parallel_group")
        if not all(hasattr(engine, name) for name in needed):
            raise TypeError(
                f"engine must be what deepspeed.initialize returns first, got {describe(engine)}"
            )
        self._engine = engine

    def divisor(self) -> float:
        """Micro-batches by which ``engine.backward`` divides each loss."""
        return self._engine.gradient_accumulation_steps()

    def expected_loss_factors(self) -> tuple[float, ...]:
        """The division, and the loss scale of fp16."""
        scale = getattr(self._engine.optimizer, "loss_scale", 1) or 1
        return (float(scale) / self.divisor(),)

    def backward(self, loss: Tensor) -> None:
        """Differentiate ``loss ()`` as DeepSpeed does."""
        self._engine.backward(loss)

    def _counts_steps(self) -> bool:
        """Whether the engine steps by its own count of ``step()`` calls."""
        managed = getattr(self._engine, "managed_gradient_accumulation", lambda: True)()
        by_hand = getattr(self._engine, "_is_gradient_accumulation_boundary", None) is not None
        return managed and not by_hand

    def check_opening(self, n_micro: int) -> None:
        """A window is one round of ``gradient_accumulation_steps`` micro-batches."""
        n, at = self._engine.gradient_accumulation_steps(), self._engine.micro_steps
        if self._counts_steps() and (n_micro != n or at % n):
            raise RuntimeError(
                f"DeepSpeed steps after every {n} micro-batches (gradient_accumulation_steps), but "
                f"this window declares {n_micro} and begins after {at}. Give each window {n}, call "
                f"engine.step() after each of them, and fill an epoch's last window up with "
                f"micro-batches whose labels are all ignored"
            )
        self._opened_at = at

    def check_closing(self, n_micro: int) -> None:
        """``engine.step()`` follows each micro-batch; the last one may come after the window."""
        made = self._engine.micro_steps - self._opened_at
        if self._counts_steps() and made not in (n_micro - 1, n_micro):
            raise RuntimeError(
                f"engine.step() was called {made} times in a window of {n_micro} micro-batches: "
                f"DeepSpeed counts micro-batches by it, and steps only after "
                f"{self._engine.gradient_accumulation_steps()} calls. Call it after each "
                f"acc.backward(...)"
            )


def from_deepspeed(
    cls: Callable[..., Accumulator], engine: Any, *, on_empty: OnEmpty = "zero"
) -> Accumulator:
    """Make an accumulator for ``engine, *_ = deepspeed.initialize(...)``: declared counts only.

    ``engine.step()`` follows each micro-batch, as DeepSpeed wants it, and steps after the last one
    of a window. Its optimizers keep gradients outside of ``.grad``, so nothing is watched.

    Examples:
        >>> acc = LossAccumulator.from_deepspeed(engine)  # doctest: +SKIP
        >>> with acc.window(counts):  # doctest: +SKIP
        ...     for batch in micro_batches:
        ...         acc.backward(fusedce.model_loss(engine, batch))
        ...         engine.step()
    """
    runs = DeepSpeedEngine(engine)
    return cls(process_group=engine.seq_data_parallel_group, on_empty=on_empty, _engine=runs)


def from_mesh(
    cls: Callable[..., Accumulator],
    mesh: Any,
    token_dims: str | Sequence[str],
    model: Any = None,
    *,
    pipeline_dim: str | None = None,
    schedule: Any = None,
    has_loss: bool | None = None,
    grad_reduction: Literal["mean", "sum"] = "mean",
    backward_divisor: float = 1,
    on_empty: OnEmpty = "zero",
    grad_scaler: Any = None,
    losses: Mapping[str, float] | None = None,
    watch: bool = True,
    name: str | None = None,
) -> Accumulator:
    """Make an accumulator for the ranks along ``token_dims`` of a ``DeviceMesh``.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> acc = LossAccumulator.from_mesh(mesh, "dp", torch.nn.Linear(2, 2))

    Args:
        mesh: e.g. ``init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "tp"))``.
        token_dims: the dimensions over which tokens differ: data and context parallel ones,
            not tensor parallel ones. An empty list: every rank holds the same tokens. Several are
            flattened into one new group, by one collective of all ranks of the mesh.
        model: as for the class; in a pipeline this rank's stages.
        pipeline_dim: the dimension over which a pipeline's stages lie. All of them open the
            same windows (``acc.window()`` without counts where there is no loss) and call
            ``finish``; the schedule needs ``scale_grads=False``, and
            ``loss_fn=lambda out, y: acc.scale(...)`` (``examples/pipeline.py``).
        schedule: the pipeline's schedule, to refuse one that divides gradients itself.
        has_loss: whether this rank computes the loss; by default, the last stage does.
        grad_reduction, backward_divisor, on_empty, grad_scaler, losses, watch, name: as for the
            class.
    """
    if getattr(schedule, "scale_grads", False):
        raise ValueError(
            f"schedule: {type(schedule).__name__} would divide all gradients by its number of "
            f"micro-batches, on top of the tokens: make it with scale_grads=False"
        )
    pipeline = None
    if pipeline_dim is not None:
        dims = [token_dims] if isinstance(token_dims, str) else list(token_dims)
        is_last = mesh.get_local_rank(pipeline_dim) == mesh[pipeline_dim].size() - 1
        pipeline = Pipeline(
            stages=Ranks(submesh(mesh, pipeline_dim)),
            everyone=Ranks(submesh(mesh, [*dims, pipeline_dim])),
            has_loss=is_last if has_loss is None else has_loss,
        )
    return cls(
        model,
        process_group=submesh(mesh, token_dims),
        grad_reduction=grad_reduction,
        backward_divisor=backward_divisor,
        on_empty=on_empty,
        grad_scaler=grad_scaler,
        losses=losses,
        watch=watch,
        name=name,
        _pipeline=pipeline,
    )


def from_accelerator(
    cls: Callable[..., Accumulator],
    accelerator: Any,
    model: Any = None,
    *,
    on_empty: OnEmpty = "zero",
    losses: Mapping[str, float] | None = None,
    watch: bool = True,
    name: str | None = None,
) -> Accumulator:
    """Make an accumulator for a loop that uses ``accelerate``.

    ``backward`` calls ``accelerator.backward``, and its constant division by
    ``gradient_accumulation_steps``, also in a shorter last window, is undone. Streaming fits
    ``accelerator.accumulate``; with declared counts draw the micro-batches of a window first
    and do not use ``accumulate``: the dataloader is then exhausted before the last window is
    computed, and ``accumulate`` would end the step at each of its micro-batches
    (``examples/accelerate_loop.py`` shows both). It works on one device, and with DDP, FSDP or
    DeepSpeed (declared counts only, nothing is watched).

    Examples:
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        >>> model = accelerator.prepare(torch.nn.Linear(2, 2))
        >>> acc = LossAccumulator.from_accelerator(accelerator, model)

    Args:
        model: what ``accelerator.prepare`` has returned.
        on_empty, losses, watch, name: as for the class.
    """
    engine = AccelerateEngine(accelerator)
    return cls(
        model,
        process_group=token_ranks_of(accelerator),
        on_empty=on_empty,
        losses=losses,
        watch=watch and engine.no_streaming is None,
        name=name,
        _engine=engine,
    )


def token_ranks_of(accelerator: Any) -> Any:
    """The mesh of an accelerator's ranks that hold distinct tokens; ``None``: all ranks."""
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


# ---- the backward that runs ---------------------------------------------------------------------

# Torch has no public name for "which backward runs" or for "call me when it has ended, its engine's
# reductions included"; DDP and FSDP use these two as well.


def current_backward() -> int:
    """The id of the backward that runs in this thread, counted in the process; -1 for none."""
    return torch._C._current_graph_task_id()


def backward_reaches(leaf: Tensor) -> bool:
    """Whether the running backward adds to the gradient of this leaf ``(...)``.

    That of ``torch.autograd.grad`` adds to none, ``backward(inputs=...)`` to its inputs alone.
    """
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # an input of `torch.autograd.grad`
        return False


def backward_keeps_graph() -> bool:
    """Whether another backward may follow over the graph of the running one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward has ended, after DDP's and FSDP's callbacks."""
    queue = Variable._execution_engine.queue_callback
    # Callbacks run in the order in which they were queued. DDP and FSDP queue theirs, which
    # complete the gradients, later in this backward; one queued at its end runs after them.
    queue(lambda: queue(callback))


# ---- gradients that an engine holds elsewhere ---------------------------------------------------

# With set_requires_gradient_sync(False) FSDP2 keeps the unsharded gradients of a micro-batch
# inside, where zero_grad does not reach them, until the last micro-batch of the window; with
# set_requires_all_reduce(False) HSDP keeps the sharded ones. If that last one never comes, they
# would be added to the next window. FSDP2 has no public way to see or to drop them.


def _fsdp2_groups(module: torch.nn.Module) -> list[Any]:
    found: list[Any] = []
    for one in module.modules() if dist.is_available() and dist.is_initialized() else ():
        state: Any = _composable_state._get_module_state(one)
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 there was one
            groups = [getattr(state, "_fsdp_param_group", None)]
        found += [group for group in groups if group is not None]
    return found


def parameters_of(module: torch.nn.Module) -> list[Tensor]:
    """The parameters that an optimizer has; between forward and backward FSDP shows others."""
    own = {
        id(p._unsharded_param): p.sharded_param
        for group in _fsdp2_groups(module)
        for p in group.fsdp_params
        if hasattr(p, "_unsharded_param")
    }
    for flat in _fsdp1_flat_parameters(module):  # (with use_orig_params: views of the whole one)
        for infos, parameters in (
            (flat._param_infos, flat._params),
            (flat._shared_param_infos, flat._shared_params),
        ):
            for (name, holder, *_), p in zip(infos, parameters or (), strict=False):
                own[id(getattr(holder, name))] = p
    found = module.parameters()
    return [own.get(id(p), p) for p in found] if own else list(found)


def _fsdp1_flat_parameters(module: torch.nn.Module) -> list[Any]:
    handles = (getattr(x, "_handle", None) for x in module.modules() if _is_fsdp1(x))
    return [handle.flat_param for handle in handles if handle is not None]


def is_of_fsdp1(parameter: Tensor) -> bool:
    """Whether FSDP1 has flattened a parameter, so that a rank holds a part of it."""
    return getattr(parameter, "_fsdp_flattened", False)


def fsdp1_around(module: torch.nn.Module) -> Any:
    """The FSDP1 wrapper that holds all parameters of a module; ``None`` if none does."""
    first = next(filter(_is_fsdp1, module.modules()), None)
    n = len(list(module.parameters()))
    return first if first is not None and len(list(first.parameters())) == n else None


def is_held_by_fsdp2(module: torch.nn.Module) -> bool:
    """Whether gradients wait inside FSDP2 or HSDP."""
    return any(
        group._partial_reduce_output is not None
        or any(
            p.unsharded_accumulated_grad is not None
            or getattr(getattr(p, "_unsharded_param", None), "grad", None) is not None
            for p in group.fsdp_params
        )
        for group in _fsdp2_groups(module)
    )


def drop_held(module: torch.nn.Module) -> None:
    """Forget the gradients that wait inside FSDP2 or HSDP."""
    for group in _fsdp2_groups(module):
        group._partial_reduce_output = None
        for p in group.fsdp_params:
            if getattr(p, "_unsharded_param", None) is not None:
                p._unsharded_param.grad = None
            if p.unsharded_accumulated_grad is not None:  # before torch 2.15 a buffer of its own
                p.unsharded_accumulated_grad = None


def _is_fsdp1(module: torch.nn.Module) -> bool:
    return hasattr(module, "_fsdp_wrapped_module")  # isinstance would import FSDP1
