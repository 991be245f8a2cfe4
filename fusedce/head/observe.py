"""The fused losses of a model, observed by code that counts tokens itself.

A trainer's mixin and :func:`fusedce.model_loss` enter a :class:`LossObserver`; :func:`note_items`
tells the losses of a model by which number it will divide them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedce.contract.monitors import MonitoredLossSum
from fusedce.contract.results import LossSum


class Result(NamedTuple):
    """A loss at the moment it was returned; the model may change the tensor in place later."""

    value: Tensor  # () copy, without a graph
    edge: GradientEdge | None  # where its gradient arrives; None if it needs none

    @classmethod
    def of(cls, loss: Tensor) -> Result:
        """The value and the gradient's place of ``loss ()``."""
        edge = get_gradient_edge(loss) if loss.requires_grad else None
        return cls(loss.detach().clone(), edge)


class LossObserver:
    """Collects, inside its ``with`` block, the sums of every fused ``F.cross_entropy``.

    Losses per token and losses with class weights are not collected, nor are those of other
    threads.

    Args:
        denominator: ``()``, in tokens: losses with ``reduction="mean"`` divide by it instead of by
            their own count.
        monitor: names of the sums to compute beside each loss.

    Attributes:
        losses: ``(loss_sum, n_valid, reduction)`` of each loss, in order.
        results: what each ``F.cross_entropy`` has returned (:class:`Result`).
        monitors: the sums that ``monitor`` names, in the same order
            (:class:`fusedce.contract.monitors.MonitoredLossSum`).

    Raises:
        RuntimeError: another observer is entered already.
    """

    current: LossObserver | None = None

    def __init__(self, denominator: Tensor | None = None, *, monitor: Collection[str] = ()) -> None:
        self.denominator, self.monitor = denominator, monitor
        self.monitors: list[Mapping[str, Tensor]] = []
        self.losses: list[tuple[Tensor, Tensor, str]] = []
        self.results: list[Result] = []
        self._thread = threading.get_ident()

    @classmethod
    def of_this_thread(cls) -> LossObserver | None:
        """The observer that is entered, if this thread has made it."""
        ours = cls.current is not None and cls.current._thread == threading.get_ident()
        return cls.current if ours else None

    def observe(self, out: LossSum, reduction: str) -> None:
        """Collect one loss."""
        # The sum may be the loss itself, which the model may change in place.
        self.losses.append((out.loss_sum.detach().clone(), out.n_valid, reduction))
        if isinstance(out, MonitoredLossSum):
            self.monitors.append(out.monitors)

    def __enter__(self) -> LossObserver:
        if LossObserver.current is not None:
            raise RuntimeError(
                "a LossObserver is entered already: observers do not nest, leave its block first"
            )
        LossObserver.current = self
        return self

    def __exit__(self, *_: object) -> None:
        LossObserver.current = None


# ---- the number by which a model will divide its losses --------------------------------------
# Models of transformers add their cross-entropies up and divide the sum by `num_items_in_batch`.
# Knowing it beforehand saves a rounding (fusedce.contract.objective). The number of one forward
# stays until the next, so that a loss of other code may meet a stale one. That is harmless:
# backward multiplies by the real factor over the expected one, and only one rounding is added.

_items: contextvars.ContextVar[Tensor | float | None] = contextvars.ContextVar(
    "fusedce_num_items_in_batch", default=None
)


def note_items(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Hook before a model's forward: keep its ``num_items_in_batch``."""
    if torch.compiler.is_compiling():
        return
    items = kwargs.get("num_items_in_batch")
    number = isinstance(items, (int, float)) and items > 0
    tensor = isinstance(items, Tensor) and items.numel() == 1
    _items.set(items if number or tensor else None)


def expected_factor() -> Tensor | float | None:
    """Expected factor of a sum of losses: 1 / items as a number or ``()``, or ``None``."""
    items = _items.get()
    if isinstance(items, Tensor):
        return items.detach().reshape(()).double().clamp(min=1).reciprocal()
    return None if items is None else 1 / items
