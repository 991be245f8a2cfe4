"""The report of a replaced head, and observers of its losses as they are computed.

Users read a :class:`HeadReport`; ``FUSEDCE_EXPLAIN=1`` prints each place that needs logits, once. A
trainer's mixin and :func:`fusedce.model_loss` enter a :class:`LossObserver`, to count tokens
themselves.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract.results import LossSum, MonitoredLossSum

_PACKAGES = tuple(str(Path(m).parent) + os.sep for m in (torch.__file__, __file__))


_NOT_RUN = (
    "the head has not run since it was replaced: was the model compiled before, or does other code "
    "compute its loss (Liger's or TRL's patches, a product with the weight)?"
)
_UNREAD = "the head has run, but nothing has used its logits yet"


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
    notes: tuple[str, ...]  # why the original head runs, its own code makes the logits, or tokens
    # are counted by labels
    calls: int = 0  # how often the head has run

    def __str__(self) -> str:
        if self.since is None:
            how = "; ".join(self.notes) or "fusedce.replace_loss_head(model) replaces it"
            return f"the output head is the model's own: {how}"
        lines = [
            f"replaced since {self.since}" + ("" if self.active else ", but not active now"),
            f"losses fused: {self.losses_fused}; logits made: {self.logits_made}",
            *(
                f"  {p.times} x {p.operation} at {p.line}: {p.shape}, {p.bytes / 2**20:.1f} MiB"
                for p in self.places
            ),
            *self.notes,
        ]
        if not (self.losses_fused or self.logits_made or self.notes):
            lines.append(_UNREAD if self.calls else _NOT_RUN)
        return "\n".join(lines)


class HeadCounts:
    """Counts of fused losses and real logits while a head was replaced, with places and notes."""

    def __init__(self, since: str | None = None) -> None:
        self.since = since or time.strftime("%Y-%m-%d %H:%M:%S")
        self.calls = self.losses = 0
        self.places: dict[tuple[str, str], Place] = {}
        self.notes: list[str] = []

    def __deepcopy__(self, memo: object) -> HeadCounts:
        return HeadCounts(self.since)

    def count_logits(self, operation: str, shape: tuple[int, ...], size: int) -> None:
        """Count logits of ``size`` bytes that ``operation`` needed."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
            frame = frame.f_back
        line = f"{frame.f_code.co_filename}:{frame.f_lineno}"  # of the user's code
        place = self.places.get((operation, line), Place(operation, line, shape, size, 0))
        if not place.times:
            _explain(f"logits {shape}, {size / 2**20:.1f} MiB, for {operation} at {line}")
        self.places[operation, line] = place._replace(times=place.times + 1)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)
            _explain(text)


def _explain(text: str) -> None:
    if os.environ.get("FUSEDCE_EXPLAIN") == "1":
        print(f"fusedce: {text}", file=sys.stderr)


class LossObserver:
    """Collects, inside its ``with`` block, the sums of every fused ``F.cross_entropy``.

    Losses per token and losses with class weights are not collected, nor are those of other
    threads.

    Args:
        denominator: ``()``, in tokens: losses with ``reduction="mean"`` divide by it instead of by
            their own count.
        monitor: names of the sums to compute beside each loss.
        label_smoothing: of losses that have none of their own, in [0, 1].
        token_scaled: whether each token's loss is times its own probability, without gradient
            (dynamic fine-tuning, :func:`fusedce.recipes.token_scaled_loss`).

    Attributes:
        current: the observer that this thread has entered.
        losses: ``(loss_sum, n_valid, reduction)`` of each loss, in order.
        graphs: each loss as the model gets it, differentiable.
        ignored: the ``ignore_index`` of each loss.
        monitors: the sums that ``monitor`` names, in the same order
            (:class:`fusedce.contract.results.MonitoredLossSum`).

    Raises:
        RuntimeError: another observer is entered already.
    """

    current: ContextVar[LossObserver | None] = ContextVar("fusedce_observer", default=None)

    def __init__(
        self,
        denominator: Tensor | None = None,
        *,
        monitor: Collection[str] = (),
        label_smoothing: float = 0.0,
        token_scaled: bool = False,
    ) -> None:
        self.denominator, self.monitor = denominator, monitor
        self.label_smoothing, self.token_scaled = label_smoothing, token_scaled
        self.monitors: list[Mapping[str, Tensor]] = []
        self.losses: list[tuple[Tensor, Tensor, str]] = []
        self.graphs: list[Tensor] = []
        self.ignored: list[int] = []

    @property
    def reductions(self) -> list[str]:
        """The reduction of each loss."""
        return [reduction for *_, reduction in self.losses]

    def observe(self, out: LossSum, reduction: str, ignore_index: int) -> None:
        """Collect one loss."""
        self.ignored.append(ignore_index)
        # The sum may be the loss itself, which the model may change in place.
        self.losses.append((out.loss_sum.detach().clone(), out.n_valid, reduction))
        if isinstance(out, MonitoredLossSum):
            self.monitors.append(out.monitors)

    def __enter__(self) -> LossObserver:
        if self.current.get() is not None:
            raise RuntimeError("a LossObserver is entered already: leave its block first")
        self.current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.current.set(None)
