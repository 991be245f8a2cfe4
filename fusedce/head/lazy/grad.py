"""Lazy gradients of logits, which carry the gradients of the head's inputs instead of values.

The fused loss computes the gradients of the hidden state and of the head's parameters without that
of the logits. Torch's backward nodes between loss and head need a gradient of the logits; they get
a :class:`LogitsGrad` and do this to it:

* undoing a step that the loss took into account (:data:`fusedce.head.lazy.table.STEPS`) removes
  that step from the list of steps left to undo, and so does rearranging values;
* a factor multiplies the gradients of the head's inputs; gradients of other uses of the logits are
  added, lazy ones as terms and real ones as a dense part;
* for any other operator, and for code that reads values, the real gradient is computed.

At the head no step is left. If one is, because a user's function has a backward that is not its
derivative, the real gradient is computed as well. Unexpected nodes of autograd therefore cost
memory, and never a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedce.head.call import HeadCall
from fusedce.head.lazy.logits import LazyLogits
from fusedce.head.lazy.memory import Memory
from fusedce.head.lazy.ops import LazyLayout, OpInfo
from fusedce.head.lazy.steps import LogitsStep
from fusedce.head.lazy.tensor import NO_TORCH_FUNCTION, Lazy, real, write
from fusedce.head.optimizer_clock import CLOCK


class LogitsSource:
    """Logits from which a real gradient is computed, kept while that gradient exists."""

    def __init__(self, x: LazyLogits | Memory) -> None:
        self.x = x
        CLOCK.sources.add(self)

    def materialize(self, operation: str) -> Tensor:
        """The real logits."""
        return self.x.materialize(operation)

    def before(self, optimizer: Optimizer) -> None:
        """Compute the logits before a step that changes them."""
        (self.x if isinstance(self.x, Memory) else self.x.memory).before(optimizer)


def check_not_batched(grad: Tensor) -> None:
    """Raise ``RuntimeError`` for a batch of gradients, which ``vmap`` passes to a backward."""
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "a replaced head takes one gradient at a time, not many (is_grads_batched=True, "
            "vectorize=True): call fusedce.restore_loss_head(model) for this, since the backward "
            "passes of fusedce's lazy logits cannot be vectorised"
        )


class Term(NamedTuple):
    """The part of a gradient that comes from one loss."""

    call: HeadCall
    input_grads: tuple[Tensor | None, ...]  # of the hidden state and the head's parameters
    bias: Tensor | None  # (V,), gradient of the bias that was added to the logits
    left: tuple[LogitsStep, ...]  # steps that autograd has yet to undo, the last one first
    factors: tuple[Any, ...] = ()  # numbers or () tensors

    def scaled(self, x: Tensor | None) -> Tensor | None:
        """``x`` times the factors; ``None`` stays ``None``."""
        for factor in self.factors:
            x = None if x is None else x * factor
        return x


# Rules by operator (fusedce.head.lazy.grad_rules); the key `None` stands for all others. A rule is
# called with the operator and its arguments, and may return `NotImplemented`.
RULES: dict[Any, Callable[..., Any]] = {}


class LogitsGrad(Lazy):
    """A lazy gradient of logits: see the module.

    Attributes:
        terms: the parts that come from losses.
        dense: a real gradient to be added, or ``None``.
        make: computes the real gradient of the ``terms``; ``None`` without terms.
        base: the gradient that this one is a view of, or ``None``.
        move: computes this view's numbers from those of its base, in the same memory.
        numbers: the real gradient, once computed.
        exposed: whether code may write into ``numbers``, which then replace the terms.
        writes: number of writes into this gradient.
        base_writes: number of the base's writes that ``numbers`` include.
        reshaped: whether this is a view of the base's values in the same order.
    """

    terms: tuple[Term, ...]
    dense: Tensor | None
    make: Callable[[str], Tensor] | None
    base: LogitsGrad | None = None
    move: Callable[[Tensor], Tensor]
    numbers: Tensor | None = None
    exposed = False
    writes = 0
    base_writes = 0
    reshaped = False

    @staticmethod
    def __new__(
        cls,
        layout: LazyLayout,
        device: torch.device,
        terms: tuple[Term, ...],
        dense: Tensor | None,
        make: Callable[[str], Tensor] | None = None,
    ) -> LogitsGrad:
        new: LogitsGrad = layout.wrapper(cls, device)
        new.like, new.terms, new.dense, new.make = layout, terms, dense, make
        return new

    def sync(self) -> None:
        """Take over writes into the base."""
        if self.base is not None:
            self.base.sync()
            if self.base.writes != self.base_writes:
                self._become(self.move(self.base.materialize("view")))
                self.base_writes = self.base.writes

    def materialize(self, operation: str) -> Tensor:
        """The real gradient, without a graph."""
        self.sync()
        if self.numbers is None:
            with torch.no_grad():
                if self.terms and self.make is not None:
                    self.numbers = self.make(operation).to(self.dtype)
                    if self.dense is not None:
                        self.numbers = self.numbers + self.dense
                elif self.dense is not None:
                    self.numbers = self.dense.to(self.dtype, copy=True)
                else:
                    self.numbers = torch.zeros_like(self.like.meta(), device=self.device)
                if self.numbers.stride() != self.like.stride():
                    new = torch.empty_like(self.like.meta(), device=self.device)
                    self.numbers = new.copy_(self.numbers)
        return self.numbers

    def expose(self, operation: str) -> Tensor:
        """The real gradient, for code that may write into it."""
        self.sync()
        if not self.exposed:
            if self.base is None:
                self._become(self.materialize(operation))
            else:
                self._become(self.move(self.base.expose(operation)))
                self.base_writes = self.base.writes
            self.exposed = True
        assert self.numbers is not None
        return self.numbers

    def _become(self, numbers: Tensor) -> None:
        self.terms, self.dense, self.numbers = (), numbers, numbers
        self.writes += 1

    def begin_write(self, operation: str) -> None:
        self.expose(operation)

    def end_write(self) -> None:
        """Count a write into this gradient and into its base."""
        self.writes += 1
        if self.base is not None:
            self.base.end_write()
            self.base_writes = self.base.writes

    @classmethod
    def dispatch(cls, func: Any, op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with NO_TORCH_FUNCTION():
            for x in args[:2]:
                if isinstance(x, LogitsGrad) and x.base is not None:
                    x.sync()
            result = (RULES.get(func) or RULES[None])(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
            name, x = str(func), args[0] if args else None
            if op.writes:
                return write(func, op, args, kwargs)
            if isinstance(x, LogitsGrad) and op.is_view:
                return func(x.expose(name), *real(args[1:], name), **real(kwargs, name))
            return func(*real(args, name), **real(kwargs, name))
