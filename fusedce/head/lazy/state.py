"""What lazy logits are made of: a head, its input, and the steps taken since."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Head(Protocol):
    """What lazy logits need of the run of an output head they came from."""

    V: int  # of the whole vocabulary

    def trainable(self) -> list[Tensor]:
        """The parameters of the head that require grad."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Real logits ``(..., V)`` of ``hidden (..., H)``, as the original head makes them."""

    def loss(
        self,
        function: Callable[..., Any],
        hidden: Tensor,  # (N, H)
        labels: Tensor,  # (N,)
        *,
        vocabulary: slice,
        bias: Tensor | None,  # (V,), beside the head's own
        options: dict[str, Any],
    ) -> Any:
        """``function(hidden, weight, labels, bias=..., **options)``, without logits."""


class State(NamedTuple):
    """Everything lazy logits stand for: a head, its input, and what was done since."""

    head: Head
    hidden: Tensor  # (..., H)
    shape: tuple[int, ...]
    dtype: torch.dtype
    vocabulary: slice  # the entries that are left
    class_dim: int  # where the vocabulary is among the dimensions
    bias: Tensor | None = None  # (V,), added to what the head makes before anything else
    steps: tuple[tuple[str, Any], ...] = ()  # ("mul", number), ("tanh", None), ("to", dtype)
    detached: bool = False
    gate: Tensor | None = None  # see `Lazy.gate`


class Lazy:
    """What the two kinds of lazy logits share.

    Nothing is computed until somebody looks. From then on the real logits are what counts, for
    whoever has seen them may have written into them.

    As with real tensors, one may be a view of another: then it has a parent, and the call that made
    it makes its real logits of the parent's.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._parent: Lazy | None = None
        self._call: tuple[str, tuple[Any, ...], dict[str, Any]] = ("", (), {})
        self._has_views = False
        self._traced_views: list[Lazy] = []  # only while torch.compile traces
        self._strided: Tensor | None = None
        self._real: Tensor | None = None

    @classmethod
    def make(cls, state: State) -> Any:
        """Lazy logits of this kind."""
        return cls(state)

    def strided(self) -> Tensor:
        """A tensor without data (device "meta") of the shape and strides of the real logits."""
        if self._strided is None:
            self._strided = torch.empty(self._state.shape, dtype=self._state.dtype, device="meta")
        return self._strided

    def become_view(self, parent: Lazy, name: str, args: Any, kwargs: Any) -> None:
        """Share what is written with ``parent``, of which this is ``parent.name(*args, **kwargs)``.

        While torch.compile traces, strides are symbols, and so nobody knows which calls copy:
        all are made at the first look, before anything can be written.
        """
        self._parent, self._call, parent._has_views = parent, (name, args, kwargs), True
        if torch.compiler.is_compiling():
            parent._traced_views.append(self)

    def looked_at(self) -> bool:
        """Whether the real logits are there, of this or of what it is a view of."""
        return self._real is not None or (self._parent is not None and self._parent.looked_at())

    def gate(self) -> Tensor | None:
        """What gradients of a loss must pass on their way, for others who wait for them."""
        return self._state.gate

    def replace(self, state: State) -> None:
        """Stand for something else from now on."""
        self._state = state

    def is_detached(self) -> bool:
        """Whether no gradient flows from these logits, whatever they are made of."""
        return self._state.detached and self.gate() is not self

    def wants_graph(self) -> bool:
        """Whether gradients may flow through these logits."""
        s = self._state
        if self.is_detached():
            return False
        bias = s.bias is not None and s.bias.requires_grad
        return s.hidden.requires_grad or bias or bool(s.head.trainable())

    def materialize(self) -> Tensor:
        """The real logits ``shape``, computed once: with a graph wherever gradients may flow."""
        if self._real is None:
            with _no_inference(self._state.hidden), torch._C.DisableTorchFunctionSubclass():
                with torch.set_grad_enabled(self.wants_graph()):
                    if self._parent is None:
                        self._real = self._compute()
                    else:
                        name, args, kwargs = self._call
                        self._real = getattr(self._parent.materialize(), name)(*args, **kwargs)
            for view in self._traced_views:
                view.materialize()
        return self._real

    def _compute(self) -> Tensor:
        s = self._state
        z = s.head.logits(s.hidden)
        z = (z if s.bias is None else z + s.bias)[..., s.vocabulary]
        for kind, argument in s.steps:
            z = _REAL_STEPS[kind](z, argument)
        if s.steps and s.steps[-1][0] == "tanh":
            z = z.clone()  # tanh needs its output in backward, and somebody may write into this
        return z.movedim(-1, s.class_dim)


def _no_inference(hidden: Tensor) -> AbstractContextManager[object]:
    """Real logits may be used outside of the inference mode in which somebody looks at them."""
    if torch.compiler.is_compiling() or hidden.is_inference():
        return nullcontext()
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


_REAL_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda z, number: z * number,
    "div": lambda z, number: z / number,
    "tanh": lambda z, _: z.tanh(),
    "to": lambda z, dtype: z.to(dtype),
}


def changed(x: Lazy, hidden: Tensor | None = None, **changes: Any) -> Any:
    """``x`` with another state; its shape follows from the hidden state and the vocabulary."""
    detached = x.is_detached() or not torch.is_grad_enabled()
    state = x._state._replace(**{"gate": x.gate(), "detached": detached} | changes)
    if hidden is not None:
        state = state._replace(hidden=hidden)
    shape = [*state.hidden.shape[:-1], state.vocabulary.stop - state.vocabulary.start]
    shape.insert(state.class_dim, shape.pop())
    return x.make(state._replace(shape=tuple(shape)))


def class_last(x: Lazy) -> bool:
    return x._state.class_dim == len(x._state.shape) - 1
