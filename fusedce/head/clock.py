"""Tell whether tensors have changed: version counters, and the steps of optimizers.

Fused optimizers change parameters and no version counter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def version_of(x: Tensor) -> int:
    """Count of writes into a tensor; 0 for inference tensors, which do not count them."""
    return 0 if x.is_inference() else x._version


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


class Source(Protocol):
    """What somebody's gradient is made of."""

    def before(self, optimizer: Optimizer) -> None:
        """A step of this optimizer is next."""


class Report(Protocol):
    """Counts of what compiled graphs do."""

    def collect(self) -> None:
        """Add up, for what is not added up takes memory."""


class Clock:
    def __init__(self) -> None:
        self.now = Tick()
        self.reports: weakref.WeakSet[Report] = weakref.WeakSet()
        self.sources: weakref.WeakSet[Source] = weakref.WeakSet()

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        for source in list(self.sources):
            source.before(optimizer)

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        for report in self.reports:
            report.collect()
        old, self.now = self.now, Tick()
        old.optimizer, old.next = weakref.ref(optimizer), self.now


CLOCK = Clock()
register_optimizer_step_pre_hook(CLOCK.before)
register_optimizer_step_post_hook(CLOCK.after)
