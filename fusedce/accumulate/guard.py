"""What happens around an accumulator that it is not told of: steps, other gradients, leftovers."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class Guard:
    """Watches optimizers while a window is open, and what a window's gradients belong to."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._replicas: weakref.WeakSet[torch.nn.Module] | None = None  # DDP's, once looked for
        self._handle: Any = None
        self._warned = False
        self._shared: dict[int, weakref.ref[Tensor]] = {}  # since our window was opened

    def __reduce__(self) -> Any:
        return Guard, ()  # a copy of an accumulator guards nothing yet

    def add(self, optimizer: Any, module: Any) -> None:
        while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # accelerate's wrapper
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        if module is not None and not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        self._optimizers.add(optimizer)
        if module is not None:
            self._modules.add(module)

    # ---- steps ------------------------------------------------------------------------------

    def watch(self, incomplete: Callable[[], str | None]) -> None:
        """Until :meth:`rest`: a step of an optimizer while ``incomplete()`` says why is noted."""
        if self._handle is not None:
            return
        asked = weakref.WeakMethod(incomplete)
        me = weakref.ref(self)

        def before_step(optimizer: Optimizer, *_: Any) -> None:
            ask, guard = asked(), me()
            if ask is not None and guard is not None and (why := ask()) is not None:
                guard._stepped(optimizer, why)

        self._handle = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, self._handle.remove)

    def rest(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._shared = {}
        self.streams(False)

    def _stepped(self, optimizer: Optimizer, why: str) -> None:
        text = (
            f"{type(optimizer).__name__}.step() inside an open window: {why}, and its gradients "
            f"are not divided by the tokens of the whole window yet. Call finish(parameters), or "
            f"leave the `with` block, before the step"
        )
        if optimizer in self._optimizers:
            raise RuntimeError(text)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{text}. (acc.guard(optimizer) makes this an error; for an optimizer of other "
                f"parameters it means nothing.)",
                stacklevel=5,
            )

    def check_join(self) -> None:
        """Raise under DDP's ``Join``, whose ranks run out of micro-batches by design.

        Nobody tells a loss which DDP it came through: the process is searched for them, once.
        """
        if self._replicas is None:
            kinds = (DistributedDataParallel, *DistributedDataParallel.__subclasses__())
            found = [x for x in gc.get_referrers(*kinds) if isinstance(x, DistributedDataParallel)]
            self._replicas = weakref.WeakSet(found)
        for module in (*self._modules, *self._replicas):
            if getattr(getattr(module, "_join_config", None), "enable", False):
                raise RuntimeError(
                    "Join lets a rank leave while others train on; a LossAccumulator needs each "
                    "rank in every window, the others would wait for it. Without Join, give the "
                    "rank that has run out micro-batches whose labels are all ignore_index. (A "
                    "Join that is over leaves its mark on the model until it is told otherwise: "
                    "Join([model], enable=False))"
                )

    # ---- gradients --------------------------------------------------------------------------

    def check_all_given(self, given: Iterable[Tensor]) -> None:
        """Raise if a guarded optimizer or module has a gradient that ``finish`` was not given."""
        known = {id(p) for p in given}
        names = {id(p): name for m in self._modules for name, p in m.named_parameters()}
        of_optimizers = (p for x in self._optimizers for g in x.param_groups for p in g["params"])
        of_modules = (p for m in self._modules for p in m.parameters())
        missing = {
            id(p): names.get(id(p), f"a tensor of shape {tuple(p.shape)}")
            for p in (*of_optimizers, *of_modules)
            if p.grad is not None and id(p) not in known
        }
        if missing:
            raise RuntimeError(
                f"parameters: {len(missing)} that have a .grad were not given to finish, and would "
                f"be trained with the gradients of an estimate: "
                f"{', '.join(list(missing.values())[:3])}"
            )

    def streams(self, now: bool) -> None:
        """Whether this accumulator's window will correct the gradients at its end."""
        (_STREAMING.add if now else _STREAMING.discard)(self)

    def others_stream(self) -> bool:
        return any(guard is not self for guard in _STREAMING)

    def touch_others(self, gradients_of: Callable[[], Iterable[Tensor]]) -> None:
        """Tell other accumulators that stream whose gradients are not theirs alone."""
        others = [guard for guard in _STREAMING if guard is not self]
        if others:
            tensors = list(gradients_of())
            for guard in others:
                guard._shared |= {id(p): weakref.ref(p) for p in tensors}

    def check_own(self, trained: Iterable[Tensor]) -> None:
        """Raise if another accumulator has added to these gradients, or corrected them."""
        if any((ref := self._shared.get(id(p))) is not None and ref() is p for p in trained):
            raise RuntimeError(
                "two accumulators share gradients while one of them streams: its finish() would "
                "multiply those of the other one too. Use one accumulator, whose window has "
                'several losses: `with acc.window({"next": [...], "second": [...]}):`'
            )


_STREAMING: weakref.WeakSet[Guard] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # open windows are the parent's
    os.register_at_fork(after_in_child=_STREAMING.clear)
