"""The engine that times calls by turns, for every script.

Rounds go from one call to the next, and each starts with another one, so that a drifting machine
(clocks, neighbours) favours none. What a call raises is its row.

On a CPU ``seconds`` are processor time where torch has one thread, which leaves out the neighbours
on a shared machine, and wall time otherwise. On an accelerator a round is a burst of calls between
events, without waiting between them, as a training loop runs: ``seconds`` is the device's time of
each, ``wall_seconds`` the burst's wall clock by the number of calls (more where Python is the
bottleneck), ``mhz`` the device's clock once a burst is launched. ``rounds`` holds the median of
each round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .peaks import device_peak

Call = Callable[[], object]
_BURST_SECONDS = 0.5  # slow calls are made fewer times


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:150]}"


def measure(
    calls: Mapping[str, Call], device: str, *, rounds: int, burst: int = 1, peaks: bool = False
) -> dict[str, dict[str, Any]]:
    """A row for each call: its times, with ``peaks`` the allocator's peak; or why it ``failed``.

    The first call of each is not among ``seconds``; it may compile. It stands in ``first_seconds``.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        try:
            begin = time.perf_counter()
            call()
            rows[name] = {"first_seconds": time.perf_counter() - begin}
            if peaks:
                rows[name]["extra_peak_bytes"] = device_peak(call, device)
        except Exception as error:
            rows[name] = {"failed": failure(error)}
    alive = [name for name in calls if "failed" not in rows[name]]
    for turn in range(rounds if alive else 0):
        at = turn % len(alive)
        for name in alive[at:] + alive[:at]:
            found = time_call(calls[name], device, burst)
            for kind, values in found.items():
                rows[name].setdefault(kind, []).extend(values)
            rows[name].setdefault("rounds", []).append(statistics.median(found["seconds"]))
    return rows


def time_call(call: Call, device: str, calls: int) -> dict[str, list[float]]:
    """Time a burst of at most ``calls`` calls of a warm function.

    Returns ``seconds`` of each call. On an accelerator also ``wall_seconds``, the burst's by the
    number of its calls. A call that does not count decides how many calls a burst has there.
    """
    if torch.device(device).type == "cpu":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        seconds = []
        for _ in range(calls):
            begin = clock()
            call()
            seconds.append(clock() - begin)
        return {"seconds": seconds}
    module = torch.get_device_module(device)
    module.synchronize()
    begin = time.perf_counter()
    call()
    module.synchronize()
    once = time.perf_counter() - begin
    calls = max(min(calls, int(_BURST_SECONDS / max(once, 1e-9))), 3)
    events = [[module.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    begin = time.perf_counter()
    for first, last in events:
        first.record()
        call()
        last.record()
    clock = _clock(module)  # while the device works
    module.synchronize()
    wall = (time.perf_counter() - begin) / calls
    return {
        "seconds": [first.elapsed_time(last) / 1e3 for first, last in events],
        "wall_seconds": [wall],
        **clock,
    }


def _clock(module: Any) -> dict[str, list[float]]:
    """The device's clock in MHz, where NVIDIA's library for it is installed."""
    try:
        return {"mhz": [float(module.clock_rate())]}
    except (AttributeError, ImportError, RuntimeError):
        return {}


def median(row: Mapping[str, Any]) -> float | None:
    """Median of the row's seconds; ``None`` if it failed."""
    return statistics.median(row["seconds"]) if row.get("seconds") else None
