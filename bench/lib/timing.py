"""Time and memory of one call, measured in the process that runs it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from fusedce.measure import device_peak, median_seconds

_BURST_SECONDS = 0.5  # slow calls are made fewer times
# Fields of `nvidia-smi` that say why a burst was slow, and the names they have in a row.
_STATE = {
    "clocks.sm": "sm_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "clocks_throttle_reasons.active": "throttled_by",
}


def time_call(
    call: Callable[[], object], device: str, calls: int, warm_up: bool = True
) -> dict[str, Any]:
    """Time a burst of at most ``calls`` calls, after two that warm up (one on a CPU).

    Returns ``seconds`` of each call. On an accelerator also ``wall_seconds``, the burst's by the
    number of its calls, and ``states``: what :func:`device_state` returned while it ran. The first
    call may compile; the second one decides how many calls a burst has. On a CPU
    ``warm_up=False`` leaves that one out: for calls that are already warm.
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
    call()
    module.synchronize()
    begin = time.perf_counter()
    call()
    module.synchronize()
    once = time.perf_counter() - begin
    calls = max(min(calls, int(_BURST_SECONDS / max(once, 1e-9))), 3)
    events = [[module.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    asked = _ask_state(device)
    begin = time.perf_counter()
    for first, last in events:
        first.record()
        call()
        last.record()
    module.synchronize()
    wall = (time.perf_counter() - begin) / calls
    state = device_state(asked)
    return {
        "seconds": [first.elapsed_time(last) / 1e3 for first, last in events],
        "wall_seconds": [wall],
        **({"states": [state]} if state else {}),
    }


def _ask_state(device: str) -> subprocess.Popen[str] | None:
    """Start `nvidia-smi`, which answers while the burst runs; None where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None or torch.version.hip is not None:
        return None
    number = torch.device(device).index or 0
    query = [program, f"--id={number}", f"--query-gpu={','.join(_STATE)}"]
    return subprocess.Popen(
        [*query, "--format=csv,noheader,nounits"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def device_state(asked: subprocess.Popen[str] | None) -> dict[str, str]:
    """Clock of the multiprocessors (MHz), power (W), temperature and what throttles the device.

    Empty where `nvidia-smi` was not asked or does not answer within five seconds.
    """
    if asked is None:
        return {}
    try:
        said, _ = asked.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.wait()
        return {}
    fields = said.strip().split(", ")
    return dict(zip(_STATE.values(), fields, strict=True)) if len(fields) == len(_STATE) else {}


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
