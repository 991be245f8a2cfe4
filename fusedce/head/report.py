"""What a replaced head has done: losses fused, logits made, and who made them.

With ``FUSEDCE_EXPLAIN=1`` in the environment, each place that makes logits is printed once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from fusedce.head.clock import CLOCK

_PACKAGES = tuple(str(Path(m).parent) + os.sep for m in (torch.__file__, __file__))


class Place(NamedTuple):
    """Somebody who needed real logits."""

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


class Once:
    """Something that a compiled graph has done: its code makes one of these at each run.

    A chain of them is a count that ``torch.compile`` adds to without asking how much it is, which
    would compile the code anew for each number.
    """

    def __init__(self, before: Once | None) -> None:
        self.before = before


def _length(chain: Once | None) -> int:
    n = 0
    while chain is not None:
        n, chain = n + 1, chain.before
    return n


class Report:
    """Counts while a head is replaced."""

    def __init__(self, since: str) -> None:
        self.since = since
        self.losses = self.made_by_graphs = 0
        self.places: dict[tuple[str, str], Place] = {}
        self.notes: list[str] = []
        self.losses_in_graphs = self.made_in_graphs = Once(None)
        CLOCK.reports.add(self)

    def __getstate__(self) -> dict[str, object]:
        self.collect()
        return self.__dict__

    def __deepcopy__(self, memo: object) -> Report:
        return Report(self.since)

    def collect(self) -> None:
        """Add what compiled graphs have done since."""
        self.losses += _length(self.losses_in_graphs) - 1
        self.made_by_graphs += _length(self.made_in_graphs) - 1
        self.losses_in_graphs = self.made_in_graphs = Once(None)

    def fused(self) -> None:
        self.losses += 1

    def made(self, operation: str, shape: tuple[int, ...], size: int) -> None:
        line = _users_line()
        place = self.places.get((operation, line))
        if place is None:
            place = Place(operation, line, tuple(shape), size, 0)
            _explain(f"logits {tuple(shape)}, {size / 2**20:.1f} MiB, for {operation} at {line}")
        self.places[operation, line] = place._replace(times=place.times + 1)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            _explain(text)

    def summary(self, active: bool) -> HeadReport:
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
