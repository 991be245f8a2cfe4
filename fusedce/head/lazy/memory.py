"""What a storage is to a tensor: views of lazy logits share it, and all that is written into it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedce.head.call import HeadCall
from fusedce.head.lazy.steps import Same, Steps
from fusedce.head.lazy.tensor import BELOW


class Recorded(NamedTuple):
    """What was done to logits, and how the loss understands it."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    steps: Steps | None  # None: the loss does not

    def __call__(self, x: Tensor) -> Any:
        return self.func(x, *self.args, **self.kwargs)


class Memory:
    """What views of the same logits share: how they are made, and their values once looked at."""

    values: Tensor | None = None
    viewed = False  # whether there have been views
    _written = False
    _before: Tensor | None = None  # the values when they were given to others unseen
    # A copy can be made from what it is a copy of, as long as that has not changed since.
    parent: weakref.ref[Memory] | None = None
    length = 0  # of the parent's history then

    def __init__(
        self,
        call: HeadCall,
        history: tuple[Recorded, ...] = (),
        parent: Memory | None = None,
    ) -> None:
        self.call, self.history = call, history
        if parent is not None:
            self.parent, self.length = weakref.ref(parent), len(parent.history)

    @property
    def written(self) -> bool:
        """Whether only the values count."""
        if not self._written and self._before is not None and self.values is not None:
            self._written = not torch.equal(self.values, self._before)
        return self._written

    @written.setter
    def written(self, value: bool) -> None:
        self._written = value

    def copy(self) -> Memory:
        """Another memory with the same values, not computed either."""
        if not self.written:
            clone = Recorded(torch.ops.aten.clone.default, (), {}, (Same(),))
            return Memory(self.call, (*self.history, clone), self)
        new = Memory(self.call)
        with torch.no_grad(), BELOW():
            new.values, new.written = self.look("copy").clone(), True
        return new

    def expose(self) -> None:
        """Keep the values as they are now: somebody may write into them unseen."""
        if self._before is None and not self.written and self.values is not None:
            with torch.no_grad(), BELOW():
                self._before = self.values.clone()

    def before(self, optimizer: Optimizer) -> None:
        """Make the values now if the step of this optimizer changes them, or may do so."""
        call = self.call
        if self.values is None and call.changes_with(optimizer) and not call.has_changed():
            if call.needs_all_ranks():  # maybe not all of them keep what these are for
                return
            self.look("optimizer.step")

    def look(self, operation: str) -> Tensor:
        if self.values is None:
            inference = torch.is_inference_mode_enabled() and not self.call.hidden.is_inference()
            with torch.inference_mode(False) if inference else torch.no_grad(), torch.no_grad():
                with BELOW():
                    self.values = self._compute(operation)
        return self.values

    def _compute(self, operation: str) -> Tensor:
        parent = None if self.parent is None else self.parent()
        known = parent is not None and not parent.written and len(parent.history) == self.length
        if parent is not None and known:
            x = parent.look(operation)
            done = self.length
        else:
            x = self.call.logits()
            done = 0
            self.call.report.made(operation, tuple(x.shape), x.nbytes)
        for recorded in self.history[done:]:
            x = recorded(x)
        return x
