"""Records of a replaced head: losses fused, logits computed, and the code that needed them.

With ``FUSEDCE_EXPLAIN=1`` in the environment, each place that needs logits is printed once. Code
that counts tokens itself observes the losses with a :class:`LossObserver`, and :func:`note_items`
tells the losses of a model by which number it will divide them.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fusedce.contract.monitors import MonitoredLossSum
from fusedce.contract.results import LossSum
from fusedce.head.optimizer_clock import CLOCK

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


def added_up(reports: Sequence[HeadReport]) -> HeadReport:
    """The report of several heads of one model."""
    return HeadReport(
        active=all(r.active for r in reports),
        since=min((r.since for r in reports if r.since is not None), default=None),
        losses_fused=sum(r.losses_fused for r in reports),
        logits_made=sum(r.logits_made for r in reports),
        places=tuple(p for r in reports for p in r.places),
        notes=tuple(dict.fromkeys(note for r in reports for note in r.notes)),
    )


class GraphEvent:
    """An event that compiled code records at each run, linked to the event before it.

    The length of the chain is a count. ``torch.compile`` would guard on an integer, and compile the
    code again for each value.
    """

    def __init__(self, before: GraphEvent | None) -> None:
        self.before = before


def _length(chain: GraphEvent | None) -> int:
    n = 0
    while chain is not None:
        n, chain = n + 1, chain.before
    return n


class HeadCounts:
    """Counts of losses and logits while a head was replaced, with places and notes."""

    def __init__(self, since: str) -> None:
        self.since = since
        self.losses = self.made_by_graphs = 0
        self.places: dict[tuple[str, str], Place] = {}
        self.notes: list[str] = []
        self.losses_in_graphs = self.made_in_graphs = GraphEvent(None)
        CLOCK.reports.add(self)

    def __getstate__(self) -> dict[str, object]:
        self.collect()
        return self.__dict__

    def __deepcopy__(self, memo: object) -> HeadCounts:
        return HeadCounts(self.since)

    def collect(self) -> None:
        """Add up the events of compiled graphs."""
        self.losses += _length(self.losses_in_graphs) - 1
        self.made_by_graphs += _length(self.made_in_graphs) - 1
        self.losses_in_graphs = self.made_in_graphs = GraphEvent(None)

    def fused(self) -> None:
        """Count a fused loss."""
        self.losses += 1

    def made(self, operation: str, shape: tuple[int, ...], size: int) -> None:
        """Count logits of ``size`` bytes that ``operation`` needed."""
        line = _users_line()
        place = self.places.get((operation, line))
        if place is None:
            place = Place(operation, line, tuple(shape), size, 0)
            _explain(f"logits {tuple(shape)}, {size / 2**20:.1f} MiB, for {operation} at {line}")
        self.places[operation, line] = place._replace(times=place.times + 1)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)
            _explain(text)

    def summary(self, active: bool) -> HeadReport:
        """The report for the user; ``active`` says whether the head is in use now."""
        self.collect()
        places = tuple(self.places.values())
        made = sum(p.times for p in places) + self.made_by_graphs
        notes = list(self.notes)
        if self.made_by_graphs:
            notes.append(f"{self.made_by_graphs} of the logits were made in compiled graphs")
        return HeadReport(active, self.since, self.losses, made, places, tuple(notes))


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
        results: what each ``F.cross_entropy`` has returned (:class:`Result`); not in compiled code.
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
        observer = cls.current
        if observer is None or torch.compiler.is_compiling():  # a trace cannot ask for its thread
            return observer
        return observer if observer._thread == threading.get_ident() else None

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
