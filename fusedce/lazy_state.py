"""What lazy logits are made of: a head, its input, and the steps taken since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Head(Protocol):
    """What lazy logits need of the output head they came from."""

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
    """What the two kinds of lazy logits share."""

    def __init__(self, state: State) -> None:
        self._state, self._real, self._mutated = state, None, False

    _state: State
    _real: Tensor | None  # the real logits, once somebody has looked
    _mutated: bool  # somebody has written into them: from then on they are what counts

    @classmethod
    def make(cls, state: State) -> Any:
        """Lazy logits of this kind."""
        return cls(state)

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
        if self._real is None or (graph and not self._real.requires_grad and not self._mutated):
            s = self._state
            with torch.set_grad_enabled(graph), torch._C.DisableTorchFunctionSubclass():
                z = s.head.logits(s.hidden)
                z = (z if s.bias is None else z + s.bias)[..., s.vocabulary]
                for kind, argument in s.steps:
                    z = _REAL_STEPS[kind](z, argument)
                self._real = z.movedim(-1, s.class_dim)
        return self._real


_REAL_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda z, number: z * number,
    "div": lambda z, number: z / number,
    "tanh": lambda z, _: z.tanh(),
    "to": lambda z, dtype: z.to(dtype),
}
