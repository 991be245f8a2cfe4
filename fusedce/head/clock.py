"""Which optimizers have stepped since: fused ones change parameters and no version counter."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import TensorWeakRef


class Tick:
    """The time between two steps of optimizers. Who keeps one can ask what has stepped since.

    ``torch.compile`` asks nothing about such an object but its type: code compiled once keeps the
    tick of each of its runs.
    """

    def __init__(self) -> None:
        self.next: Tick | None = None
        self.optimizer: weakref.ref[Optimizer] | None = None  # whose step has ended this time

    def steps(self) -> Iterator[Optimizer | None]:
        """The optimizers that have stepped since; ``None`` for one that is gone."""
        tick = self
        while tick.next is not None:
            yield None if tick.optimizer is None else tick.optimizer()
            tick = tick.next


class Handle:
    """Something that lives as long as its owner."""


class Clock:
    def __init__(self) -> None:
        self.now = Tick()
        # Gradients to be made before a step that changes their logits. Torch's weak references to
        # tensors know of those that C++ alone holds, and this handle dies with the tensor.
        self.kept: weakref.WeakKeyDictionary[Handle, TensorWeakRef] = weakref.WeakKeyDictionary()

    def keep(self, grad: Any) -> Handle:
        handle = Handle()
        self.kept[handle] = TensorWeakRef(grad)
        return handle

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        for reference in list(self.kept.values()):
            grad: Any = reference()
            if grad is not None and grad.changes_with(optimizer):
                grad.look("optimizer.step")

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        old, self.now = self.now, Tick()
        old.optimizer, old.next = weakref.ref(optimizer), self.now


CLOCK = Clock()
register_optimizer_step_pre_hook(CLOCK.before)
register_optimizer_step_post_hook(CLOCK.after)
