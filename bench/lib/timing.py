"""Time and memory of one call, measured in the process that runs it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fusedce.measure import device_peak, median_seconds

_BURST_SECONDS = 2.0  # slow calls are made fewer times


def time_call(call: Callable[[], object], device: str, calls: int) -> dict[str, list[float]]:
    """``seconds`` of each of ``calls`` calls, and ``wall_seconds``; one more warms up."""
    if torch.device(device).type == "cpu":
        return {"seconds": median_seconds({"": call}, calls)[""]}
    module = torch.get_device_module(device)
    begin = time.perf_counter()
    call()  # untimed: the allocator was emptied for the others
    module.synchronize()
    once = time.perf_counter() - begin
    calls = max(min(calls, int(_BURST_SECONDS / max(once, 1e-9))), 3)
    events = [[module.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    begin = time.perf_counter()
    for first, last in events:
        first.record()
        call()
        last.record()
    module.synchronize()
    wall = (time.perf_counter() - begin) / calls
    return {
        "seconds": [first.elapsed_time(last) / 1e3 for first, last in events],
        "wall_seconds": [wall],
    }


def peak_of_call(call: Callable[[], object], device: str) -> int:
    """Peak of the device's allocator during one call, in bytes above the level before it."""
    call()
    free(device)
    return device_peak(call, torch.device(device))


def free(device: str) -> None:
    """Return the memory that the allocator keeps, which other processes need."""
    if torch.device(device).type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()
