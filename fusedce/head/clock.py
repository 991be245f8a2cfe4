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


class Clock:
    def __init__(self) -> None:
        self.now = Tick()
        self.kept: weakref.WeakSet[Any] = weakref.WeakSet()  # gradients to be made before a step

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        for grad in list(self.kept):
            grad.look("optimizer.step")
        self.kept.clear()

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        old, self.now = self.now, Tick()
        old.optimizer, old.next = weakref.ref(optimizer), self.now


CLOCK = Clock()
register_optimizer_step_pre_hook(CLOCK.before)
register_optimizer_step_post_hook(CLOCK.after)
