"""The report of a replaced head, and observers of its losses as they are computed.

Users read a :class:`HeadReport`; ``FUSEDCE_EXPLAIN=1`` prints each place that needs logits, once. A
trainer's mixin and :func:`fusedce.model_loss` enter a :class:`LossObserver`, to count tokens
themselves; :func:`note_items` tells losses by which number a model will divide them.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedce.contract.results import LossSum, MonitoredLossSum

_LABEL_SMOOTHER = "trainer_pt_utils.py"  # of transformers
_SMOOTHED = (
    "label_smoothing_factor of Trainer computes the smoothed loss from log-probabilities, which "
    "need real logits: F.cross_entropy(..., label_smoothing=) in a compute_loss_func is fused"
)
_PACKAGES = tuple(str(Path(m).parent) + os.sep for m in (torch.__file__, __file__))


class Place(NamedTuple):
    """A line of code that needed real logits."""

    operation: str  # of torch, such as "aten.argmax"
    line: str  # "file:line" of the innermost code that is neither torch's nor this package's
    shape: tuple[int, ...]  # of the logits
    bytes: int
    times: int


class HeadReport(NamedTuple):
    """See :func:`fusedce.head_report`."""

    active: bool
    since: str | None  # when the head was replaced, "2026-01-31 12:00:00" in local time
    losses_fused: int
    logits_made: int
    places: tuple[Place, ...]  # in the order of their first time
    notes: tuple[str, ...]  # why the original head runs, or in which dtype the loss is computed

    def __str__(self) -> str:
        if self.since is None:
            return (
                "the output head is the model's own: fusedce.replace_loss_head(model) replaces it"
            )
        lines = [
            f"replaced since {self.since}" + ("" if self.active else ", but not active now"),
            f"losses fused: {self.losses_fused}; logits made: {self.logits_made}",
            *(
                f"  {p.times} x {p.operation} at {p.line}: {p.shape}, {p.bytes / 2**20:.1f} MiB"
                for p in self.places
            ),
            *self.notes,
        ]
        return "\n".join(lines)


class HeadCounts:
    """Counts of fused losses and real logits while a head was replaced, with places and notes."""

    def __init__(self, since: str | None = None) -> None:
        self.since, self.losses = since or time.strftime("%Y-%m-%d %H:%M:%S"), 0
        self.places: dict[tuple[str, str], Place] = {}
        self.notes: list[str] = []

    def __deepcopy__(self, memo: object) -> HeadCounts:
        return HeadCounts(self.since)

    def made(self, operation: str, shape: tuple[int, ...], size: int) -> None:
        """Count logits of ``size`` bytes that ``operation`` needed."""
        line = _users_line()
        place = self.places.get((operation, line), Place(operation, line, shape, size, 0))
        if not place.times:
            _explain(f"logits {shape}, {size / 2**20:.1f} MiB, for {operation} at {line}")
        if _LABEL_SMOOTHER in line:
            self.note(_SMOOTHED)
        self.places[operation, line] = place._replace(times=place.times + 1)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)
            _explain(text)


def _explain(text: str) -> None:
    if os.environ.get("FUSEDCE_EXPLAIN") == "1":
        print(f"fusedce: {text}", file=sys.stderr)


def _users_line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


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
            (:class:`fusedce.contract.results.MonitoredLossSum`).

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
            raise RuntimeError("a LossObserver is entered already: leave its block first")
        LossObserver.current = self
        return self

    def __exit__(self, *_: object) -> None:
        LossObserver.current = None


# ---- the number by which a model will divide its losses --------------------------------------
# Models of transformers add their cross-entropies up and divide the sum by `num_items_in_batch`.
# Knowing it beforehand saves a rounding (fusedce.contract.objective). The number of one forward
# stays until the next. A loss of other code that meets it stays right, and has one rounding more:
# backward multiplies by the real factor over the expected one.

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
