"""Time and memory of several functions side by side, for the commands and for `bench/`.

Times come from interleaved calls, so that a drifting machine (clocks, neighbours) favours none.
Memory comes from a fresh process per measurement, so that leftovers of one function (heap, thread
buffers, an earlier peak) neither count for the next one nor hide its peak.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MMAP_THRESHOLD = 64 * 1024
_RESULT = "peak_extra_bytes="
# The child gets the parent's sys.path: `-c` alone would put the working directory in front, where a
# folder could hide an installed package.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from fusedce.measure import _child; _child(*sys.argv[2:])"
)


def median_seconds(
    fns: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    before_round: Callable[[int], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Wall time of each callable, in seconds: ``repeats`` values each, sorted (median: the middle).

    ``before_round`` is called with the number of each round, 0 for the first.

    Every round calls each function once and starts with another one than the round before. A first
    round warms up and does not count. Accelerators in use are synchronised around each call.

    Raises:
        ValueError: ``repeats`` is not positive.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be >= 1, got {repeats}")
    names = list(fns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(repeats + 1):
        before_round(i)
        start = i % max(len(names), 1)
        for name in names[start:] + names[:start]:
            _synchronize()
            begin = time.perf_counter()
            result = fns[name]()
            _synchronize()
            elapsed = time.perf_counter() - begin
            del result  # freed outside the timed call, and before the next one
            if i:
                seconds[name].append(elapsed)
    return {name: sorted(times) for name, times in seconds.items()}


def peak_extra_bytes(
    target: str, kwargs: Mapping[str, Any] | None = None, *, device: str = "cpu"
) -> int:
    """Peak memory of one call above the level right before it, in bytes, in a fresh process.

    Args:
        target: ``"module:function"``, importable with this process's ``sys.path``. The function
            builds its inputs, warms up on something small that takes the same code paths, and
            returns the callable to measure, whose result lives until the peak is read.
        kwargs: its keyword arguments; they travel as JSON.
        device: ``"cpu"`` for anonymous memory, which tensors use (pages of libraries and files do
            not count), otherwise the accelerator whose allocator to read.

    Raises:
        RuntimeError: the process failed, on a CPU also where the system is not Linux; the message
            holds the end of its output.
    """
    arguments = [json.dumps(sys.path), target, json.dumps(dict(kwargs or {})), device]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments],
        capture_output=True,
        text=True,
        # With glibc's own, growing threshold, blocks freed in the warm-up stay resident and are
        # used again unseen. A fixed one gives every large tensor its own mapping.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD)},
    )
    results = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode != 0 or not results:
        raise RuntimeError(
            f"measuring {target} failed with status {done.returncode}:\n"
            f"{(done.stdout + done.stderr)[-2000:]}"
        )
    return int(results[-1].removeprefix(_RESULT))


def memory_method(device: str = "cpu") -> str | None:
    """How :func:`peak_extra_bytes` measures, for a caption; ``None``: it cannot on this system."""
    if torch.device(device).type != "cpu":
        return "peak of torch's device allocator above the level before the call"
    if _reset_peak():
        return "peak anonymous memory (VmHWM less RssFile) above the level before the call"
    return None


def _child(target: str, kwargs: str, device: str) -> None:
    module, _, function = target.partition(":")
    call = getattr(importlib.import_module(module), function)(**json.loads(kwargs))
    on_cpu = torch.device(device).type == "cpu"
    extra = _host_peak(call) if on_cpu else device_peak(call, torch.device(device))
    print(f"{_RESULT}{extra}", flush=True)


def _host_peak(call: Callable[[], object]) -> int:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)  # glibc only
    trim(0)
    if not _reset_peak():
        raise RuntimeError(f"measuring the memory of a CPU needs Linux ({_CLEAR_REFS} to write to)")
    before = _resident("VmRSS") - _resident("RssFile")
    result = call()
    # Pages of files stay once they are loaded: those at the peak are those of now, unless some were
    # loaded after it, which a warm-up prevents.
    peak = _resident("VmHWM") - _resident("RssFile")
    del result
    return max(peak - before, 0)  # negative if files were loaded after the peak


def device_peak(call: Callable[[], object], device: torch.device) -> int:
    """Peak of an accelerator's allocator during one call, in bytes above the level before it."""
    memory = torch.get_device_module(device)
    memory.synchronize(device)
    memory.reset_peak_memory_stats(device)
    before = memory.memory_allocated(device)
    result = call()
    memory.synchronize(device)
    peak = memory.max_memory_allocated(device)
    del result
    return int(peak - before)


def _reset_peak() -> bool:
    """Set VmHWM to the present resident size; False where the system does not offer it."""
    try:
        _CLEAR_REFS.write_text("5")
        return _resident("VmHWM") > 0
    except OSError:
        return False


def _resident(field: str) -> int:
    """Bytes of a field of this process's status on Linux; 0 where there is none."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _synchronize() -> None:
    for accelerator in (torch.cuda, torch.xpu):
        if accelerator.is_initialized():
            accelerator.synchronize()
