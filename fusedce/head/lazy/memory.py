"""The memory that views of lazy logits share, as views of a tensor share a storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedce.head.call import HeadCall
from fusedce.head.lazy.steps import LogitsSteps, Same
from fusedce.head.lazy.tensor import NO_TORCH_FUNCTION


class Recorded(NamedTuple):
    """An operator that was applied to logits, and the steps that the loss takes for it."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    steps: LogitsSteps | None  # None: the loss cannot fuse it

    def __call__(self, x: Tensor) -> Any:
        return self.func(x, *self.args, **self.kwargs)


class Memory:
    """The values that views of the same logits share, or the operators that compute them.

    Attributes:
        values: the real logits, once computed.
        viewed: whether there have been views.
        history: operators applied to the logits of ``call``.
        parent, length: the memory that this is a copy of, and how long its history was then. A copy
            is computed from its parent as long as that has not changed.
    """

    values: Tensor | None = None
    viewed = False
    _written = False
    _before: Tensor | None = None  # the values when their memory was exposed
    parent: weakref.ref[Memory] | None = None
    length = 0

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
        """Whether the values were written into, so that the history no longer describes them."""
        if not self._written and self._before is not None and self.values is not None:
            self._written = not torch.equal(self.values, self._before)
        return self._written

    @written.setter
    def written(self, value: bool) -> None:
        self._written = value

    def copy(self) -> Memory:
        """A memory with the same values, which stays lazy if this one was not written into."""
        if not self.written:
            clone = Recorded(torch.ops.aten.clone.default, (), {}, (Same(),))
            return Memory(self.call, (*self.history, clone), self)
        new = Memory(self.call)
        with torch.no_grad(), NO_TORCH_FUNCTION():
            new.values, new.written = self.materialize("copy").clone(), True
        return new

    def expose(self) -> None:
        """Copy the values now, to find out later whether code has written into them."""
        if self._before is None and not self.written and self.values is not None:
            with torch.no_grad(), NO_TORCH_FUNCTION():
                self._before = self.values.clone()

    def before(self, optimizer: Optimizer) -> None:
        """Compute the values now if a step of this optimizer changes them, or may do so."""
        call = self.call
        if self.values is None and call.changes_with(optimizer) and not call.has_changed():
            if call.needs_all_ranks():  # another rank may not hold these logits
                return
            self.materialize("optimizer.step")

    def materialize(self, operation: str) -> Tensor:
        """The values, computed at the first call for ``operation``."""
        if self.values is None:
            inference = torch.is_inference_mode_enabled() and not self.call.hidden.is_inference()
            with torch.inference_mode(False) if inference else torch.no_grad(), torch.no_grad():
                with NO_TORCH_FUNCTION():
                    self.values = self._compute(operation)
        return self.values

    def _compute(self, operation: str) -> Tensor:
        parent = None if self.parent is None else self.parent()
        known = parent is not None and not parent.written and len(parent.history) == self.length
        if parent is not None and known:
            x = parent.materialize(operation)
            done = self.length
        else:
            x = self.call.logits()
            done = 0
            self.call.report.made(operation, tuple(x.shape), x.nbytes)
        for recorded in self.history[done:]:
            x = recorded(x)
        return x
