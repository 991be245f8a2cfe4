"""Time and memory of one call, measured in the process that runs it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fusedce.measure import median_seconds

_BURST_SECONDS = 2.0  # slow calls are made fewer times


def time_call(
    call: Callable[[], object], device: str, calls: int, warm_up: bool = True
) -> dict[str, list[float]]:
    """``seconds`` of each of ``calls`` calls, and ``wall_seconds``; one more warms up.

    On a CPU ``warm_up=False`` leaves that one out: for calls that are already warm.
    """
    if torch.device(device).type == "cpu" and not warm_up:
        seconds = []
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}
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
    module = torch.get_device_module(device)
    call()
    free(device)
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    result = call()
    module.synchronize()
    peak = module.max_memory_allocated() - before
    del result
    return int(peak)


def free(device: str) -> None:
    """Give back what the allocator keeps: the other processes want it."""
    if torch.device(device).type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize()
        module.empty_cache()
