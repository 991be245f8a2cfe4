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

from fusedce import agreement
from fusedce.accumulate import faults as _faults
from fusedce.accumulate.arguments import check_module
from fusedce.accumulate.engines import replicas_of
from fusedce.accumulate.gradients import drop_gradients, held_by_fsdp2, norms_of
from fusedce.contract.groups import Ranks, is_dtensor

_TOLERANCE = 1e-4  # of factors: 1/3 in float32 is not 1/3
_HOOKED = 8  # parameters that show for all of them what happens to gradients


class Guard:
    """Watches the gradients of a window, and the optimizers that may step inside it.

    It knows the parameters of guarded optimizers and modules, those that the graph of the first
    loss leads to, and those that ``finish`` was given.
    """

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._known: dict[int, weakref.ref[Tensor]] = {}  # parameters by id
        self._left: dict[int, weakref.ref[Tensor]] = {}  # their gradients after the last window
        self._replicas: weakref.WeakSet[torch.nn.Module] | None = None  # DDP modules, found once
        self._scalers: weakref.WeakSet[torch.amp.GradScaler] | None = None  # found once
        self._warned = self._dropped = self._has_looked = False
        self.watches_writes = False  # whether a write into .grad inside a window is an error
        self._why_no_step: Any = lambda: None  # WeakMethod of the open window
        self._hooks: list[Any] = []
        self._start()
        _watch_steps()

    def __reduce__(self) -> Any:
        return Guard, ()  # a copy of an accumulator guards nothing yet

    def _start(self) -> None:
        """Reset the state that belongs to one window."""
        self._streams, self._is_new = False, True
        self._shared: dict[int, weakref.ref[Tensor]] = {}  # tensors other accumulators add to
        self._held: set[int] = set()  # ids of FSDP2 parameters with gradients of other windows
        self._reduced: dict[int, Any] = {}  # statistics of DDP's last reduced backward before it
        self._given: set[int] | None = None  # ids of the parameters that finish was given
        # Gradients before the window: their versions, and norms () where they should be zero.
        self._before: dict[int, int] = {}
        self._stale: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}  # of the gradients after the last backward
        self._backward = -1  # its id
        self._in_backward = self._foreign = False
        self._schedule: Any = None  # the pipeline's, whose loss_fn has given a loss
        self._found: list[tuple[Callable[..., Exception], Tensor]] = []  # errors, where () is true

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
        self.watches_writes = True
        agreement.GUARDS.add(self)
        self._know_guarded()

    # ---- parameters -------------------------------------------------------------------------

    def _know(self, parameters: Iterable[Tensor]) -> None:
        """Watch these parameters too; of FSDP1's flat ones their originals, if users see these."""
        for flat in parameters:
            originals = getattr(flat, "_params", None) or [flat]
            self._known |= {id(p): weakref.ref(p) for p in originals}

    def _know_guarded(self) -> None:
        self._know(p for x in self._optimizers for g in x.param_groups for p in g["params"])
        self._know(p for module in self._modules for p in module.parameters())

    def _with_grad(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield each known parameter that has a gradient, the gradient, and its version."""
        for ref in self._known.values():
            p = ref()
            if p is not None and (grad := p.grad) is not None:
                yield p, grad, getattr(grad, "_local_tensor", grad)._version  # of the shard

    # ---- a window opens and ends ----------------------------------------------------------------

    def check_ready(self, alone: bool) -> None:
        """Raise ``RuntimeError`` where no window may open: under ``Join``, over FSDP2's leftovers.

        DDP's ``Join`` lets ranks run out of micro-batches by design. A loss does not know its DDP
        module, so the process is searched for such modules, once.
        """
        if self._replicas is None and not alone:
            self._replicas = weakref.WeakSet(_instances(DistributedDataParallel))
        models = (*self._modules, *(self._replicas or ()))
        joined = (getattr(x, "_join_config", None) for x in models)
        if not alone and any(getattr(x, "enable", False) for x in joined):
            raise RuntimeError(
                "Join lets a rank leave while others train on; a LossAccumulator needs each "
                "rank in every window, the others would wait for it. Without Join, give the "
                "rank that has run out micro-batches whose labels are all ignore_index. (A "
                "Join that is over leaves its mark on the model until it is told otherwise: "
                "Join([model], enable=False))"
            )
        if self._dropped and held_by_fsdp2():
            raise RuntimeError(
                "FSDP2 still holds gradients of micro-batches that were dropped "
                "(set_requires_gradient_sync(False)), where zero_grad does not reach them, and "
                "would add them to this window: call acc.discard_window(model) first"
            )

    def open(self, why_no_step: Callable[[], str | None], streams: bool) -> None:
        """Start the checks of a window whose method ``why_no_step`` says if no step may follow."""
        self._held = {id(p) for p in held_by_fsdp2()}
        self._reduced = {id(ddp): _backward_stats(ddp) for ddp in self._ddp()}
        self._streams, self._why_no_step = streams, weakref.WeakMethod(why_no_step)
        self._know_guarded()
        _OPEN[id(self)] = self
        if streams and self.watches_writes:
            self._hook_some()

    def _hook_some(self) -> None:
        """Notice backwards that are not the window's, at some of the parameters."""
        found = [p for ref in self._known.values() if (p := ref()) is not None]
        found = [p for p in found if p.requires_grad and p.is_leaf and not is_dtensor(p)]
        me = weakref.ref(self)

        def accumulated(p: Tensor) -> None:
            guard = me()
            if guard is not None and not guard._in_backward:
                guard._foreign = True

        for p in found[:: max(len(found) // _HOOKED, 1)]:
            self._hooks.append(p.register_post_accumulate_grad_hook(accumulated))

    def close(self, dropped: bool) -> None:
        """End the checks of the window; ``dropped`` if its gradients are not to be used."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        _OPEN.pop(id(self), None)
        self._dropped = dropped
        self._left = {id(p): weakref.ref(grad) for p, grad, _ in self._with_grad()}
        self._known = {i: ref for i, ref in self._known.items() if ref() is not None}
        self._start()

    def drop(self, module: torch.nn.Module) -> None:
        """Forget the gradients of a dropped window."""
        drop_gradients(module)
        self._dropped = False

    def check_end(self, trained: list[Tensor] | None) -> None:
        """Raise where gradients of the window are not what an optimizer should see.

        Args:
            trained: what ``finish`` was given; ``None`` for declared counts.
        """
        if trained is not None:
            self._check_given(trained)
        for ddp in self._ddp():
            before = self._reduced.get(id(ddp))
            grads = any(p.grad is not None for p in ddp.parameters())
            if grads and before is not None and before == _backward_stats(ddp):
                raise RuntimeError(
                    f"DDP has not reduced the gradients of this window over its ranks, each has "
                    f"its own: call the {type(ddp).__name__} module itself in the last "
                    f"micro-batch, not its .module or a method of it, and not inside no_sync()"
                )
        held = [p for p in held_by_fsdp2() if id(p) not in self._held]
        if held:
            raise RuntimeError(
                f"FSDP2 still holds the gradients of {len(held)} parameters inside, and an "
                f"optimizer would step without them: call set_requires_gradient_sync(True) before "
                f"the last micro-batch of a window (and discard_window(model) to drop these)"
            )

    def _check_given(self, trained: list[Tensor]) -> None:
        """Raise if ``finish`` would correct too few gradients, or another accumulator's."""
        self._given = {id(p) for p in trained}
        names = {id(p): name for m in self._modules for name, p in m.named_parameters()}
        missing = [
            names.get(id(p), f"a tensor of shape {tuple(p.shape)}")
            for p, _, version in self._with_grad()
            if id(p) not in self._given and self._before.get(id(p)) != version
        ]
        if missing:
            raise RuntimeError(
                f"parameters: {len(missing)} that have a .grad were not given to finish, and would "
                f"be trained with the gradients of an estimate: {', '.join(missing[:3])}"
            )
        if any((ref := self._shared.get(id(p))) is not None and ref() is p for p in trained):
            raise RuntimeError(
                "two accumulators share gradients while one of them streams: its finish() would "
                "multiply those of the other one too. Use one accumulator, whose window has "
                'several losses: `with acc.window({"next": [...], "second": [...]}):`'
            )
        self._know(trained)

    def mark_shared(self, gradients_of: Iterable[Tensor]) -> None:
        """Tell other streaming accumulators which gradients this one adds to as well."""
        if others := [guard for guard in _open() if guard._streams and guard is not self]:
            found = {id(p): weakref.ref(p) for p in gradients_of}
            for guard in others:
                guard._shared |= found

    def place(self) -> int:
        """The place of this window among the streaming ones opened since the last call."""
        found = [x for x in _open() if x._streams and (x._is_new or x is self)]
        for guard in found:
            guard._is_new = False  # one that was given up does not count for the next
        return found.index(self) if self in found else 0

    # ---- steps ------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise for a step inside an open window, or warn once if the optimizer is not guarded."""
        if (ask := self._why_no_step()) is None:
            return
        guarded = optimizer in self._optimizers
        why = ask()
        if why is None:
            if guarded:
                self._versions = {}  # zero_grad may follow the step
            return
        text = (
            f"{type(optimizer).__name__}.step() inside an open window: {why}, and its gradients "
            f"are not divided by the tokens of the whole window yet. Call finish(parameters), or "
            f"leave the `with` block, before the step"
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

    # ---- pipelines, and ranks that hold the same tokens -----------------------------------------

    def note_schedule(self) -> None:
        """Remember the pipeline's schedule whose ``loss_fn`` runs now, if one does."""
        module = sys.modules.get("torch.distributed.pipelining.schedules")
        frame = None if module is None or self._schedule is not None else sys._getframe(1)
        while frame is not None:
            if frame.f_globals is vars(module) and "self" in frame.f_locals:
                self._schedule = frame.f_locals["self"]
                break
            frame = frame.f_back

    def replicas(self, tokens: Ranks) -> tuple[int, bool]:
        """See :func:`replicas_of`; ``(0, False)`` without a guard."""
        found = [p for ref in self._known.values() if (p := ref()) is not None]
        return replicas_of(found, tokens) if self.watches_writes else (0, False)

    # ---- gradients that are left, gone or written into ----------------------------------------

    def before_backward(self, roots: Sequence[Any], backward: int) -> None:
        """Look at the gradients as a backward through ``roots`` begins."""
        if self._backward == -1:
            self._look_before(roots)
        elif backward != self._backward:
            self._look(others=backward != self._backward + 1)
        self._backward, self._in_backward = backward, True
        self.mark_shared(_leaves(roots))

    def after_backward(self) -> None:
        """Remember the versions of the gradients after a backward."""
        mine = ((id(p), n) for p, _, n in self._with_grad() if self._before.get(id(p)) != n)
        self._versions = dict(mine if self.watches_writes else islice(mine, _HOOKED))
        self._in_backward = False

    def _look_before(self, roots: Sequence[Any]) -> None:
        """Note the gradients that the window finds: those of the step before, or of others."""
        if not self._has_looked and not _composable_state._module_state_mapping:
            self._know(p for p in _leaves(roots) if isinstance(p, torch.nn.Parameter))
        self._has_looked = True
        found = list(self._with_grad())
        self._before = {id(p): version for p, _, version in found}
        stale = [
            p
            for p, grad, _ in found
            if self._streams or ((left := self._left.get(id(p))) and left() is grad)
        ]
        self._stale = dict(zip(map(id, stale), norms_of(stale), strict=True))

    def _look(self, others: bool = True, at_end: bool = False) -> None:
        """Note whether gradients of this window's micro-batches are gone, or were written into.

        Their versions are compared on the host. Only if one differs, the gradients are compared
        with zero, on their device. ``others``: whether another backward may have run since.
        """
        now = {id(p): version for p, _, version in self._with_grad()}
        alive = (i for i, ref in self._known.items() if i in self._versions and ref() is not None)
        if all(now.get(i) == self._versions[i] for i in alive):
            return
        norms = norms_of([p for p, *_ in self._with_grad() if id(p) in self._versions])
        gone = torch.tensor(True, device="cpu")
        if norms:
            gone = (_faults.together(norms) == 0).all()
        self._found.append((_faults.gradients_gone, gone))
        # Stages of a pipeline on one rank have backwards of their own.
        watches = self.watches_writes and self._schedule is None
        if watches and not at_end and (self._streams or not others):
            self._found.append((_faults.gradients_written, ~gone))

    def faults(self, n_tokens: Tensor) -> list[Tensor]:
        """Rows of :mod:`faults` of a window of ``n_tokens ()``; without tokens, zeros are right."""
        self._look(at_end=True)
        now = {id(p): version for p, _, version in self._with_grad()}
        for i, norm in self._stale.items():
            added = self._before[i] != now.get(i) if self._given is None else i in self._given
            if added:
                self._found.append((_faults.gradients_left, norm != 0))
        if self._foreign and self._schedule is None:
            self._found.append((_faults.gradients_written, torch.tensor(True, device="cpu")))
        some = n_tokens > 0
        rows = []
        if (pipe := self._schedule) is not None and pipe.scale_grads and pipe._n_microbatches > 1:
            rows.append(_faults.sure(_faults.divided_by_pipeline, pipe._n_microbatches))
        return rows + [
            _faults.first(kind, (_faults.moved(x, some.device) & some).reshape(1))
            for kind, x in self._found
        ]

    # ---- factors ----------------------------------------------------------------------------

    def unexpected(self, arrived: Tensor, upstreams: Tensor) -> tuple[Tensor, Tensor]:
        """Which gradients ``arrived (M,)`` are none of ``upstreams (M, U)`` times a loss scale.

        Loss scales are those of ``GradScaler`` objects in this process. Without any, on a device
        whose values cannot be read here and with DeepSpeed, a power of two is accepted too: the
        loss scalers of other libraries use these.

        Returns:
            ``(M,)`` bool, and the factors ``(M,)`` over the likeliest upstream.
        """
        readable = _faults.readable(arrived.device)
        factors = arrived[:, None] / _faults.moved(upstreams, arrived.device)
        fits = ((factors - 1).abs() <= _TOLERANCE) | factors.isnan()
        if not readable or not fits.any(1).all():
            if readable or self._scalers is None:
                self._scalers = weakref.WeakSet(_instances(torch.amp.GradScaler))
            scales = [x._scale for x in self._scalers if x._scale is not None]
            for scale in scales:
                scaled = factors / _faults.moved(scale, arrived.device).double()
                fits |= (scaled - 1).abs() <= _TOLERANCE
            if not scales and (not readable or "deepspeed" in sys.modules):
                mantissa, exponent = torch.frexp(factors)
                fits |= (mantissa == 0.5) & (exponent > 1)
        return ~fits.any(1), factors[:, 0].contiguous()

    # ---- what it knows ----------------------------------------------------------------------

    def reduces(self) -> bool:
        """Whether a guarded DDP adds gradients of other ranks at the end of a backward."""
        return bool(self._ddp())

    def _ddp(self) -> list[DistributedDataParallel]:
        """The DDP modules, of several ranks, inside the guarded modules."""
        found = (x for module in self._modules for x in module.modules())
        several = (x for x in found if isinstance(x, DistributedDataParallel))
        return [x for x in several if dist.get_world_size(x.process_group) > 1]


def _instances(kind: type) -> list[Any]:
    """Find all objects of a class and its subclasses in this process."""
    kinds = [kind]
    for one in kinds:
        kinds += one.__subclasses__()
    return [x for x in gc.get_referrers(*kinds) if isinstance(x, kind)]


def _leaves(nodes: Sequence[Any]) -> Iterator[Tensor]:
    """The tensors whose ``.grad`` a backward through these nodes of a graph adds to."""
    new, visited = {node for node in nodes if node is not None}, set()
    while new:
        yield from (node.variable for node in new if hasattr(node, "variable"))
        visited |= new
        new = {x for node in new for x, _ in node.next_functions if x is not None} - visited


def _backward_stats(ddp: DistributedDataParallel) -> Any:
    """DDP's times of its last reduced backward, by parameter; ``None`` if torch keeps none."""
    stats = getattr(getattr(ddp, "reducer", None), "get_backward_stats", None)
    return None if stats is None else stats()


# Guards of the open windows, in their order.
_OPEN: weakref.WeakValueDictionary[int, Guard] = weakref.WeakValueDictionary()
if hasattr(os, "register_at_fork"):  # the open windows belong to the parent process
    os.register_at_fork(after_in_child=_OPEN.clear)


def _open() -> list[Guard]:
    """The guards of the open windows. Other threads open and close theirs meanwhile."""
    return [guard for ref in _OPEN.valuerefs() if (guard := ref()) is not None]


@functools.cache
def _watch_steps() -> None:
    """Tell the guards of open windows each optimizer's step, from now on."""

    def before_step(optimizer: Optimizer, *_: Any) -> None:
        for guard in _open():
            guard.before_step(optimizer)

    register_optimizer_step_pre_hook(before_step)
