"""Tell whether tensors have changed, by version counters and by the steps of optimizers.

Steps are counted because fused optimizers change parameters without a version counter.
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
    """The time between two optimizer steps; a tick that is kept knows the steps since.

    ``torch.compile`` guards on nothing but the type of such an object, so that code compiled once
    can keep the tick of each of its runs.
    """

    def __init__(self) -> None:
        self.next: Tick | None = None
        self.optimizer: weakref.ref[Optimizer] | None = None  # whose step has ended this tick

    def steps(self) -> Iterator[Optimizer | None]:
        """The optimizers that have stepped since; ``None`` for one that no longer exists."""
        tick = self
        while tick.next is not None:
            yield None if tick.optimizer is None else tick.optimizer()
            tick = tick.next


class BeforeStep(Protocol):
    """An object that is called before each optimizer step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Prepare for the step of this optimizer."""


class AfterStep(Protocol):
    """Counts of compiled graphs, which are collected after each optimizer step."""

    def collect(self) -> None:
        """Add up the events of compiled graphs; each takes memory until then."""


class Clock:
    """Holds the current :class:`Tick` and calls its listeners around optimizer steps."""

    def __init__(self) -> None:
        self.now = Tick()
        self.reports: weakref.WeakSet[AfterStep] = weakref.WeakSet()
        self.sources: weakref.WeakSet[BeforeStep] = weakref.WeakSet()

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook before a step."""
        for source in list(self.sources):
            source.before_step(optimizer)

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook after a step: begin a new tick."""
        for report in self.reports:
            report.collect()
        old, self.now = self.now, Tick()
        old.optimizer, old.next = weakref.ref(optimizer), self.now


CLOCK = Clock()
register_optimizer_step_pre_hook(CLOCK.before)
register_optimizer_step_post_hook(CLOCK.after)
