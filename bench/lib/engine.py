"""The engine that measures time and memory for every script.

A call is named as in :mod:`fusedce.measure`: ``"module:function"`` builds it from keywords. It runs
in its own process (or one for all calls of an implementation), so that a crash or an out-of-memory
error is a row of the table. Rounds go from one call to the next, so that a drifting
machine favours none.

On a CPU times come from :func:`fusedce.measure.median_seconds` and memory from
:func:`fusedce.measure.peak_extra_bytes`. On an accelerator a round is a burst of calls between
events, without waiting between them, as a training loop runs: ``seconds`` is the device's time of
each, ``wall_seconds`` the burst's wall clock by the number of calls (more where Python is the
bottleneck), ``states`` the clock, power and throttling during each burst; memory is read from the
device's allocator. ``rounds`` holds the median of each round, for a spread.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from fusedce.measure import memory_method, peak_extra_bytes

from .pool import Pool

# The fields that measuring a call adds to its row.
MEASURED = ("seconds", "wall_seconds", "states", "rounds", "extra_peak_bytes", "failed")


class Call(NamedTuple):
    """One thing to measure."""

    target: str  # "module:function", importable with this process's sys.path
    kwargs: dict[str, Any]
    process: str  # calls of the same name share one
    leaves: int = 0  # bytes of results that are no extra memory, such as gradients


class Engine:
    """Measures calls on one device; close it, or use it in a ``with``."""

    def __init__(
        self,
        device: str,
        *,
        rounds: int | None = None,
        calls: int | None = None,
        timeout: float = 120,
        warm_up: bool = True,  # one more call before those of a round; a CPU can do without
    ) -> None:
        self.device = device
        self.on_cpu = torch.device(device).type == "cpu"
        self.rounds = rounds or (2 if self.on_cpu else 5)
        self.calls = calls or (2 if self.on_cpu else 10)  # of a round
        self.warm_up = warm_up
        self._pool = Pool(timeout)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.close()

    def ask(self, process: str, target: str, kwargs: Mapping[str, Any]) -> tuple[str, Any]:
        """``("ok", target(**kwargs))`` from that process, or ``("error", why)``."""
        return self._pool.ask(process, "run", target, dict(kwargs))

    def measure(
        self,
        calls: Mapping[str, Call],
        *,
        time: bool = True,
        memory: tuple[str, ...] = (),
        held: Mapping[str, dict[str, Any]] | None = None,
        on_row: Callable[[str, dict[str, Any]], object] = lambda name, row: None,
    ) -> dict[str, dict[str, Any]]:
        """Measure each call: ``seconds``, ``wall_seconds`` and ``rounds``, or why it ``failed``.

        ``memory`` names the calls whose ``extra_peak_bytes`` is measured: beyond what was there
        before the call, and what the call leaves. ``held`` is what was measured before: its rounds
        and peaks are not measured again. ``on_row`` is told a call's row whenever it has grown.
        """
        earlier = held or {}
        rows = {
            name: {k: v for k, v in earlier.get(name, {}).items() if k in MEASURED}
            for name in calls
        }
        timed = [n for n in calls if time and len(rows[n].get("rounds", ())) < self.rounds]
        weighed = [n for n in memory if rows[n].get("extra_peak_bytes") is None]
        prepared = [n for n in calls if n in timed or (n in weighed and not self.on_cpu)]
        for name in prepared:
            call = calls[name]
            self._order(rows[name], call.process, "prepare", name, call.target, call.kwargs)
        for i in range(self.rounds):
            first = i % max(len(timed), 1)
            for name in timed[first:] + timed[:first]:
                if len(rows[name].get("rounds", ())) <= i:
                    self._round(rows[name], calls[name], name)
                    on_row(name, rows[name])
        for name in weighed:
            self._peak(rows[name], calls[name], name)
            on_row(name, rows[name])
        for name in prepared:
            self._pool.ask(calls[name].process, "drop", name, self.device)
        return rows

    def _order(self, row: dict[str, Any], process: str, *order: Any) -> Any:
        """The answer, or None with ``failed`` in the row."""
        if "failed" in row:
            return None
        status, answer = self._pool.ask(process, *order)
        if status != "ok":
            row.clear()
            row["failed"] = answer
            return None
        return answer

    def _round(self, row: dict[str, Any], call: Call, name: str) -> None:
        order = ("time", name, self.device, self.calls, self.warm_up)
        answer = self._order(row, call.process, *order)
        if answer is not None:
            for kind, values in answer.items():
                row.setdefault(kind, []).extend(values)
                if kind != "states":
                    row[kind].sort()
            row.setdefault("rounds", []).append(statistics.median(answer["seconds"]))

    def _peak(self, row: dict[str, Any], call: Call, name: str) -> None:
        if "failed" in row:
            return
        if not self.on_cpu:
            peak = self._order(row, call.process, "peak", name, self.device)
            if peak is None:
                return
        else:
            try:
                peak = peak_extra_bytes(call.target, call.kwargs)
            except RuntimeError as e:
                row["failed"] = str(e).strip().splitlines()[-1]
                return
        row["extra_peak_bytes"] = peak - call.leaves

    def memory_method(self) -> str:
        """How memory was measured, for a caption."""
        return memory_method(self.device)


def median(row: Mapping[str, Any]) -> float | None:
    """Median of the row's seconds; ``None`` if it failed."""
    return statistics.median(row["seconds"]) if row.get("seconds") else None
