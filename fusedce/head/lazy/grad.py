"""Gradients of logits that are not computed: what they come to at the head is known already.

The fused loss knows the gradients of the hidden state and of the head's parameters without that of
the logits, which torch's own backward nodes ask for on their way. They get a :class:`LogitsGrad`,
and whatever they do to it is what autograd does:

* undoing a step that the loss took into account (:data:`fusedce.head.lazy.table.STEPS`) takes that
  step off the list of those that are still to be undone; so does moving values around;
* a factor multiplies what it comes to; gradients of other uses of the logits are added, as they
  are, or as a dense part;
* with anything else, and for whoever looks, the numbers themselves are computed.

At the head, nothing is left to be undone; where something is, because somebody's function has a
backward that is not its derivative, the numbers are computed as well. So nothing depends on
autograd's nodes being those that one expects, but memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedce.head.call import HeadCall
from fusedce.head.clock import CLOCK
from fusedce.head.lazy.logits import LazyLogits
from fusedce.head.lazy.memory import Memory
from fusedce.head.lazy.ops import Known, Layout
from fusedce.head.lazy.steps import Step
from fusedce.head.lazy.tensor import BELOW, Lazy, real, write


class Source:
    """Logits that the numbers of a gradient are made of, while somebody has that gradient."""

    def __init__(self, x: LazyLogits | Memory) -> None:
        self.x = x
        CLOCK.sources.add(self)

    def look(self, operation: str) -> Tensor:
        return self.x.look(operation)

    def before(self, optimizer: Optimizer) -> None:
        (self.x if isinstance(self.x, Memory) else self.x.memory).before(optimizer)


def check_not_batched(grad: Tensor) -> None:
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "a replaced head takes one gradient at a time, not many (is_grads_batched=True, "
            "vectorize=True): call fusedce.restore_loss_head(model) for this, since the backward "
            "passes of fusedce's lazy logits cannot be vectorised"
        )


class Term(NamedTuple):
    """The gradient by way of one loss."""

    call: HeadCall
    comes_to: tuple[Tensor | None, ...]  # at the hidden state and the head's parameters
    bias: Tensor | None  # at what was added to the logits, (V,)
    left: tuple[Step, ...]  # that `comes_to` has undone and autograd has not; the last one first
    factors: tuple[Any, ...] = ()  # numbers, or tensors without dimensions

    def scaled(self, x: Tensor | None) -> Tensor | None:
        """What comes to somewhere, with the factors."""
        for factor in self.factors:
            x = None if x is None else x * factor
        return x


# What operators do to gradients that stay lazy (:mod:`fusedce.head.lazy.undo`); `None`: all others.
# Each is given the operator and its arguments, and may answer `NotImplemented`.
RULES: dict[Any, Callable[..., Any]] = {}


class LogitsGrad(Lazy):
    """See the module. ``make`` computes the numbers of its ``terms``.

    As with any tensor, one may be a view of another, its ``base``: ``move`` makes its numbers of
    the base's, and shares their memory as soon as somebody may write into it.
    """

    terms: tuple[Term, ...]
    dense: Tensor | None
    make: Callable[[str], Tensor] | None  # None: without terms
    base: LogitsGrad | None = None
    move: Callable[[Tensor], Tensor]
    numbers: Tensor | None = None
    exposed = False  # its numbers are what counts
    writes = 0
    seen = 0  # how many writes of the base are in these
    reshaped = False  # of the base: the same values in the same order

    @staticmethod
    def __new__(
        cls,
        layout: Layout,
        device: torch.device,
        terms: tuple[Term, ...],
        dense: Tensor | None,
        make: Callable[[str], Tensor] | None = None,
    ) -> LogitsGrad:
        new: LogitsGrad = layout.wrapper(cls, device)
        new.like, new.terms, new.dense, new.make = layout, terms, dense, make
        return new

    def sync(self) -> None:
        """See what has been written into the base."""
        if self.base is not None:
            self.base.sync()
            if self.base.writes != self.seen:
                self._become(self.move(self.base.look("view")))
                self.seen = self.base.writes

    def look(self, operation: str) -> Tensor:
        """The numbers."""
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
        """The numbers for somebody who may write into them."""
        self.sync()
        if not self.exposed:
            if self.base is None:
                self._become(self.look(operation))
            else:
                self._become(self.move(self.base.expose(operation)))
                self.seen = self.base.writes
            self.exposed = True
        assert self.numbers is not None
        return self.numbers

    def _become(self, numbers: Tensor) -> None:
        self.terms, self.dense, self.numbers = (), numbers, numbers
        self.writes += 1

    def begin_write(self, operation: str) -> None:
        self.expose(operation)

    def end_write(self) -> None:
        """Say that these, and so the base, have been written into."""
        self.writes += 1
        if self.base is not None:
            self.base.end_write()
            self.seen = self.base.writes

    @classmethod
    def dispatch(cls, func: Any, op: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with BELOW():
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
