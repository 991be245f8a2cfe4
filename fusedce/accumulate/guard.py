"""Checks of what a training loop does to a window's gradients beside the accumulator.

Optimizer steps, ``zero_grad``, clipping, backwards of other losses, factors on a loss, a second
accumulator over the same parameters, pipelines that divide gradients.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _composable_state
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdRef

from fusedce.accumulate import exchange as _exchange
from fusedce.accumulate.arguments import check_module
from fusedce.accumulate.gradients import held_by_fsdp2, norms_of

_Grad = tuple[WeakIdRef, int]  # the gradient that a parameter has, and its version
_TOLERANCE = 1e-4  # of factors: 1/3 in float32 is not 1/3
_WATCHED = 8  # parameters whose gradients are checked, for all of them


class Guard:
    """Watches the gradients of a window, and the optimizers that may step inside it.

    It knows the parameters of guarded optimizers and modules, those that the graph of the first
    loss leads to, and those that ``finish`` was given.
    """

    def __init__(self) -> None:
        self._asked = False  # by the user: then any write into .grad inside a window counts
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._known: dict[int, weakref.ref[Tensor]] = {}  # parameters by id
        self._left: dict[int, _Grad] = {}  # their gradients after the last window
        self._scalers: weakref.WeakSet[torch.amp.GradScaler] | None = None  # found once
        self._warned = self._dropped = self._has_looked = False
        self._why_no_step: Any = lambda: None  # WeakMethod of the open window
        self._start()
        _watch_steps()

    def __reduce__(self) -> Any:
        return Guard, ()  # a copy of an accumulator guards nothing yet

    def _start(self) -> None:
        """Reset the state that belongs to one window."""
        self._streams = False
        self._held: set[int] = set()  # ids of FSDP2 parameters with gradients of other windows
        self._given: set[int] | None = None  # ids of the parameters that finish was given
        # Gradients before the window, norms () of those that should be zero, and the gradients
        # after the last backward.
        self._before: dict[int, _Grad] = {}
        self._stale: dict[int, Tensor] = {}
        self._after: dict[int, _Grad] = {}
        self._backward = -1  # its id
        self._roots: list[Any] = []  # nodes of the graph where it began, until it ends
        self._schedule: Any = None  # the pipeline's, whose loss_fn has given a loss
        # Kinds of faults; () bool: whether it is one; micro-batches before it, None: all.
        self._found: list[tuple[int, Tensor, int | None]] = []

    def add(self, optimizer: Any, module: Any) -> None:
        """Watch an optimizer and, if given, a module; ``TypeError`` for anything else."""
        while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # accelerate's wrapper
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        check_module(module)
        self._optimizers.add(optimizer)
        if module is not None:
            self._modules.add(module)
        self._asked = True
        self._know_guarded()

    # ---- parameters -------------------------------------------------------------------------

    def _know(self, parameters: Iterable[Tensor]) -> None:
        """Watch these parameters too; for FSDP1 with ``use_orig_params``, the original ones."""
        for flat in parameters:
            originals = getattr(flat, "_params", None) or [flat]
            self._known |= {id(p): weakref.ref(p) for p in originals}

    def _know_guarded(self) -> None:
        self._know(p for x in self._optimizers for g in x.param_groups for p in g["params"])
        self._know(p for module in self._modules for p in module.parameters())

    def _alive(self) -> list[Tensor]:
        return [p for ref in self._known.values() if (p := ref()) is not None]

    def _grads(self) -> dict[int, _Grad]:
        """The gradients of the known parameters that have one."""
        found = ((id(p), p.grad) for p in self._alive())
        return {i: _grad_of(x) for i, x in found if x is not None}

    def ddp(self) -> list[DistributedDataParallel]:
        """The DDP modules, of several ranks, inside the guarded modules."""
        found = (x for module in self._modules for x in module.modules())
        several = (x for x in found if isinstance(x, DistributedDataParallel))
        return [x for x in several if dist.get_world_size(x.process_group) > 1]

    # ---- a window opens and ends ----------------------------------------------------------------

    def check_ready(self) -> None:
        """Raise ``RuntimeError`` where no window may open: over gradients left inside FSDP2."""
        if self._dropped and held_by_fsdp2():
            raise RuntimeError(
                "FSDP2 still holds gradients of micro-batches that were dropped, and would add "
                "them to this window: call acc.discard_window(model) first"
            )

    def open(self, why_no_step: Callable[[], str | None], streams: bool) -> None:
        """Start the checks of a window whose method ``why_no_step`` says if no step may follow."""
        self._held = {id(p) for p in held_by_fsdp2()}
        self._streams, self._why_no_step = streams, weakref.WeakMethod(why_no_step)
        self._know_guarded()
        _OPEN[id(self)] = self

    def close(self, dropped: bool) -> None:
        """End the checks of the window; ``dropped`` if its gradients are not to be used."""
        _OPEN.pop(id(self), None)
        self._dropped = dropped
        self._left = self._grads()
        self._known = {i: ref for i, ref in self._known.items() if ref() is not None}
        self._start()

    def check_end(self, given: Sequence[Tensor] | None) -> None:
        """Raise where gradients of the window are not what an optimizer should see.

        ``given``: the parameters that ``finish`` was given; ``None`` for declared counts.
        """
        if given is not None:
            self._given = {id(p) for p in given}
            names = {id(p): name for m in self._modules for name, p in m.named_parameters()}
            new = {i for i, grad in self._grads().items() if self._before.get(i) != grad}
            missing = [p for p in self._alive() if id(p) in new - self._given]
            if missing:
                said = [names.get(id(p), f"one of shape {tuple(p.shape)}") for p in missing[:3]]
                raise RuntimeError(
                    f"parameters: {len(missing)} that have a .grad were not given to finish, and "
                    f"would keep gradients divided by a provisional count: {', '.join(said)}"
                )
            self._know(given)
        if held := [p for p in held_by_fsdp2() if id(p) not in self._held]:
            raise RuntimeError(
                f"FSDP2 still holds the gradients of {len(held)} parameters inside, and an "
                f"optimizer would step without them: call set_requires_gradient_sync(True) before "
                f"the last micro-batch of a window (and discard_window(model) to drop these)"
            )

    # ---- steps ------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise for a step inside an open window, or warn once if the optimizer is not guarded."""
        if (ask := self._why_no_step()) is None:
            return
        guarded = optimizer in self._optimizers
        why = ask()
        if why is None:
            if guarded:
                self._after = {}  # zero_grad may follow the step
            return
        text = (
            f"{type(optimizer).__name__}.step() inside an open window: {why}. Call "
            f"finish(parameters), or leave the `with` block, before the step"
        )
        if guarded:
            raise RuntimeError(text)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{text}. (acc.guard(optimizer) makes this an error; ignore it for an "
                f"optimizer of other parameters.)",
                stacklevel=5,
            )

    # ---- pipelines ----------------------------------------------------------------------------

    def note_schedule(self) -> None:
        """Remember the pipeline's schedule whose ``loss_fn`` runs now, if one does."""
        module = sys.modules.get("torch.distributed.pipelining.schedules")
        frame = None if module is None or self._schedule is not None else sys._getframe(1)
        while frame is not None:
            if frame.f_globals is vars(module) and "self" in frame.f_locals:
                self._schedule = frame.f_locals["self"]
                break
            frame = frame.f_back

    # ---- gradients that are left, gone or written into ----------------------------------------

    def before_backward(self, roots: Sequence[Any], backward: int, done: int) -> None:
        """Look at the gradients as a backward through ``roots`` begins, after ``done`` others."""
        if self._backward == -1:  # those of the step before, or of others
            if not self._has_looked and not _composable_state._module_state_mapping:
                self._know(_leaves(roots))
            self._has_looked, self._before = True, self._grads()
            left = {i for i, x in self._before.items() if x[:1] == self._left.get(i, ())[:1]}
            stale = self._before.keys() if self._streams else left
            norms = norms_of(found := [p for p in self._alive() if id(p) in stale])
            self._stale = dict(zip(map(id, found), norms, strict=True))
        elif backward != self._backward:
            self._look(backward, done)
        self._backward, self._roots = backward, [*self._roots, *roots]
        for other in _open_guards():
            beside = other is not self and other._backward == backward
            streams = beside and (self._streams or other._streams)
            if streams and set(_leaves(roots)) & set(_leaves(other._roots)):
                fault = _exchange.WRITTEN, torch.tensor(True, device="cpu"), None
                self._found.append(fault)
                other._found.append(fault)

    def after_backward(self) -> None:
        """Remember the gradients after a backward."""
        self._roots = []
        mine = ((i, x) for i, x in self._grads().items() if self._before.get(i) != x)
        self._after = dict(mine if self._asked else islice(mine, _WATCHED))

    def _look(self, backward: int | None = None, done: int | None = None) -> None:
        """Note whether gradients of this window's micro-batches are gone, or were written into.

        They and their versions are compared on the host. Only if one differs, they are compared
        with zero, on their device. ``backward``: the one that begins; ``None`` at the window's end.
        """
        now, mine = self._grads(), [p for p in self._alive() if id(p) in self._after]
        changed = [p for p in mine if now.get(id(p)) != self._after[id(p)]]
        if not changed:
            return
        # At the end gradients may be clipped, unscaled or added up over ranks. Beside declared
        # counts, another loss may add to them.
        others = (_next_backward() if backward is None else backward) != self._backward + 1
        alone = backward is not None and not others  # an optimizer may have zeroed some of them
        norms = norms_of([p for p in (changed if alone else mine) if p.grad is not None])
        gone = torch.tensor(True, device="cpu")
        if norms and not (alone and any(p.grad is None for p in changed)):
            gone = (_exchange.together(norms) == 0).all()
        self._found.append((_exchange.GONE, gone, done))
        written = self._asked and backward is not None and (self._streams or not others)
        # DDP makes new buckets, and FSDP1 zeroes what frozen parameters have of a flat gradient.
        written &= any(p.grad is None or p.grad._base is None for p in changed)
        # Stages of a pipeline on one rank have backwards of their own.
        if (written or (self._streams and others)) and self._schedule is None:
            self._found.append((_exchange.WRITTEN, ~gone, done))

    def faults(self, counts: Tensor) -> list[Tensor]:
        """The faults of a window; ``counts (micro-batches,)``: without tokens, zeros are right."""
        self._look()
        now = self._grads()
        for i, norm in self._stale.items():
            changed = i in now and self._before[i] != now[i]  # (a parameter may be gone by now)
            if i in self._given if self._given is not None else changed:
                self._found.append((_exchange.LEFT, norm != 0, None))
        rows: list[Tensor] = []
        if (pipe := self._schedule) is not None and pipe.scale_grads and pipe._n_microbatches > 1:
            one = torch.tensor([pipe._n_microbatches], device="cpu")
            rows.append(_exchange.first(_exchange.DIVIDED, one > 1, one))
        for kind, x, done in self._found:
            some = (counts[:done] > 0).any()[None]
            rows.append(_exchange.first(kind, _exchange.moved(x, some.device) & some))
        return rows

    # ---- factors ----------------------------------------------------------------------------

    def unexpected(self, arrived: Tensor, upstreams: Tensor) -> tuple[Tensor, Tensor]:
        """Which gradients ``arrived (M,)`` are none of ``upstreams (M, U)`` times a loss scale.

        The second result is the factors ``(M,)`` over the likeliest upstream. Loss scales are those
        of ``GradScaler`` objects in this process. Without any, on a device whose values cannot be
        read here and with DeepSpeed, a power of two is accepted too, which other libraries use.
        """
        readable = _exchange.readable(arrived.device)
        factors = arrived[:, None] / _exchange.moved(upstreams, arrived.device)
        fits = ((factors - 1).abs() <= _TOLERANCE) | factors.isnan()
        if not readable or not fits.any(1).all():
            if readable or self._scalers is None:
                self._scalers = weakref.WeakSet(_instances(torch.amp.GradScaler))
            scales = [x._scale for x in self._scalers if x._scale is not None]
            for scale in scales:
                scaled = factors / _exchange.moved(scale, arrived.device).double()
                fits |= (scaled - 1).abs() <= _TOLERANCE
            if not scales and (not readable or "deepspeed" in sys.modules):
                mantissa, exponent = torch.frexp(factors)
                fits |= (mantissa == 0.5) & (exponent > 1)
        return ~fits.any(1), factors[:, 0].contiguous()


def _grad_of(x: Tensor) -> _Grad:
    # FSDP1 makes new views of a flat gradient; a DTensor has the version of its shard.
    return WeakIdRef(x if x._base is None else x._base), getattr(x, "_local_tensor", x)._version


def _next_backward() -> int:
    """The id of a backward that runs now; ids count the backwards of a process."""
    ids: list[int] = []
    with torch.enable_grad():
        x = torch.tensor(0.0, device="cpu", requires_grad=True)
        x.register_hook(lambda _: ids.append(torch._C._current_graph_task_id()))
        x.backward()
    return ids[0]


def _instances(kind: type) -> list[Any]:
    """Find all objects of a class and its subclasses in this process."""
    kinds = [kind]
    for one in kinds:
        kinds += one.__subclasses__()
    return [x for x in gc.get_referrers(*kinds) if isinstance(x, kind)]


def _leaves(nodes: Sequence[Any]) -> Iterator[Tensor]:
    """The parameters whose ``.grad`` a backward through these nodes of a graph adds to."""
    new, visited = {node for node in nodes if node is not None}, set()
    while new:
        variables = (getattr(node, "variable", None) for node in new)
        yield from (x for x in variables if isinstance(x, torch.nn.Parameter))
        visited |= new
        new = {x for node in new for x, _ in node.next_functions if x is not None} - visited


# Guards of the open windows, in their order.
_OPEN: weakref.WeakValueDictionary[int, Guard] = weakref.WeakValueDictionary()
if hasattr(os, "register_at_fork"):  # the open windows belong to the parent process
    os.register_at_fork(after_in_child=_OPEN.clear)


def _open_guards() -> list[Guard]:  # (other threads open and close theirs meanwhile)
    return [guard for ref in _OPEN.valuerefs() if (guard := ref()) is not None]


@functools.cache
def _watch_steps() -> None:
    """Tell the guards of open windows each optimizer's step, from now on."""

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        for guard in _open_guards():
            guard.before_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
