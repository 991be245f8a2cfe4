"""What lazy logits are made of: a head, its input, and the steps taken since."""

from __future__ import annotations

from collections.abc import Callable
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


class Lazy:
    """What the two kinds of lazy logits share.

    As with real tensors, one may be a view of another: then it has a parent and the call that made
    it, and its real logits are made by that call from the parent's. All that follows from looking
    and writing is kept by the root.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._parent: Lazy | None = None
        self._call: tuple[str, tuple[Any, ...], dict[str, Any]] = ("", (), {})
        self._has_views = False
        self._strided: Tensor | None = None
        # Of a root:
        self._real: Tensor | None = None  # the real logits, once somebody has looked
        self._real_version = 0  # of those, when they were made
        self._mutated = False  # somebody has written into them: from then on they are what counts

    @classmethod
    def make(cls, state: State) -> Any:
        """Lazy logits of this kind."""
        return cls(state)

    def strided(self) -> Tensor:
        """A tensor without data (device "meta") of the shape and strides of the real logits."""
        if self._strided is None:
            self._strided = torch.empty(self._state.shape, dtype=self._state.dtype, device="meta")
        return self._strided

    def root(self) -> Lazy:
        return self if self._parent is None else self._parent.root()

    def is_mutated(self) -> bool:
        root = self.root()
        real = root._real
        if real is not None and not torch.compiler.is_compiling() and not real.is_inference():
            root._mutated |= real._version != root._real_version  # through a view of real logits
        return root._mutated

    def mutate(self) -> None:
        """Make the real logits what counts, for somebody who is about to write into them."""
        self.root().materialize(graph=True)
        self.root()._mutated = True

    def wants_graph(self) -> bool:
        """Whether gradients may flow through these logits."""
        s = self._state
        bias = s.bias is not None and s.bias.requires_grad
        return not s.detached and (s.hidden.requires_grad or bias or bool(s.head.trainable()))

    def materialize(self, *, graph: bool | None = None) -> Tensor:
        """The real logits ``shape``; computed at the first call, and once more with a graph.

        ``graph``: whether they need one; by default as grad mode says.
        """
        if graph is None:
            graph = torch.is_grad_enabled()
        graph = graph and self.wants_graph()
        with torch.set_grad_enabled(graph), torch._C.DisableTorchFunctionSubclass():
            if self._parent is not None:
                name, args, kwargs = self._call
                view: Tensor = getattr(self._parent.materialize(graph=graph), name)(*args, **kwargs)
                return view
            mutated = self.is_mutated()
            if self._real is None or (graph and not self._real.requires_grad and not mutated):
                self._real = self._compute()
                if not torch.compiler.is_compiling() and not self._real.is_inference():
                    self._real_version = self._real._version
        return self._real

    def _compute(self) -> Tensor:
        s = self._state
        z = s.head.logits(s.hidden)
        z = (z if s.bias is None else z + s.bias)[..., s.vocabulary]
        for kind, argument in s.steps:
            z = _REAL_STEPS[kind](z, argument)
        return z.movedim(-1, s.class_dim)


_REAL_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda z, number: z * number,
    "div": lambda z, number: z / number,
    "tanh": lambda z, _: z.tanh(),
    "to": lambda z, dtype: z.to(dtype),
}
