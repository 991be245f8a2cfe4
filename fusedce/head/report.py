"""Records of a replaced head: losses fused, logits computed, and the code that needed them.

With ``FUSEDCE_EXPLAIN=1`` in the environment, each place that needs logits is printed once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

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
    """Counts of losses and logits while a head was replaced, with places and notes."""

    def __init__(self, since: str | None = None) -> None:
        self.since, self.losses = since or time.strftime("%Y-%m-%d %H:%M:%S"), 0
        self.places: dict[tuple[str, str], Place] = {}
        self.notes: list[str] = []

    def __deepcopy__(self, memo: object) -> HeadCounts:
        return HeadCounts(self.since)

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
        if _LABEL_SMOOTHER in line:
            self.note(_SMOOTHED)
        self.places[operation, line] = place._replace(times=place.times + 1)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)
            _explain(text)


def report_of(heads: Sequence[HeadCounts], active: bool) -> HeadReport:
    """The report for the user of all heads of a model; ``active``: whether they are in use now."""
    places = tuple(p for head in heads for p in head.places.values())
    return HeadReport(
        active=active and bool(heads),
        since=min((head.since for head in heads), default=None),
        losses_fused=sum(head.losses for head in heads),
        logits_made=sum(p.times for p in places),
        places=places,
        notes=tuple(dict.fromkeys(note for head in heads for note in head.notes)),
    )


def _explain(text: str) -> None:
    if os.environ.get("FUSEDCE_EXPLAIN") == "1":
        print(f"fusedce: {text}", file=sys.stderr)


def _users_line() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
