"""Peak memory of one call: of a process on a CPU, of the allocator on an accelerator.

On a CPU each measurement has a fresh process, so that leftovers of another call (heap, thread
buffers, an earlier peak) neither count for this one nor hide its peak.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESULT = "peak_extra_bytes="
# The child gets the parent's sys.path: `-c` alone would put the working directory in front, where a
# folder could hide an installed package.
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lib.peaks import _child; _child(*sys.argv[2:])"
)


def peak_extra_bytes(target: str, kwargs: Mapping[str, Any] | None = None) -> int:
    """Peak memory of one call above the level right before it, in bytes, in a fresh process.

    Memory is the anonymous one, which tensors use: pages of libraries and files do not count.

    Args:
        target: ``"module:function"``, importable with this process's ``sys.path``. The function
            builds its inputs, warms up on something small that takes the same code paths, and
            returns the callable to measure, whose result lives until the peak is read.
        kwargs: its keyword arguments; they travel as JSON.

    Raises:
        RuntimeError: the process failed, also where the system is not Linux; the message holds the
            end of its output.
    """
    arguments = [json.dumps(sys.path), target, json.dumps(dict(kwargs or {}))]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments],
        capture_output=True,
        text=True,
        # With glibc's own, growing threshold, blocks freed in the warm-up stay resident and are
        # used again unseen. A fixed one gives every large tensor its own mapping.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(64 * 1024)},
    )
    results = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode != 0 or not results:
        raise RuntimeError(
            f"measuring {target} failed with status {done.returncode}:\n"
            f"{(done.stdout + done.stderr)[-2000:]}"
        )
    return int(results[-1].removeprefix(_RESULT))


def _child(target: str, kwargs: str) -> None:
    module, _, function = target.partition(":")
    call = getattr(importlib.import_module(module), function)(**json.loads(kwargs))
    print(f"{_RESULT}{_host_peak(call)}", flush=True)


def _host_peak(call: Callable[[], object]) -> int:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)  # glibc only
    trim(0)
    if not reset_peak():
        raise RuntimeError(f"measuring the memory of a CPU needs Linux ({_CLEAR_REFS} to write to)")
    before = _resident("VmRSS") - _resident("RssFile")
    result = call()
    # Pages of files stay once they are loaded: those at the peak are those of now, unless some were
    # loaded after it, which a warm-up prevents.
    peak = _resident("VmHWM") - _resident("RssFile")
    del result
    return max(peak - before, 0)  # negative if files were loaded after the peak


def reset_peak() -> bool:
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


def device_peak(call: Callable[[], object], device: str) -> int:
    """Peak of an accelerator's allocator during one warm call, in bytes above the level before."""
    memory = torch.get_device_module(device)
    call()
    memory.synchronize()
    memory.empty_cache()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    result = call()
    memory.synchronize()
    peak = memory.max_memory_allocated()
    del result
    return int(peak - before)
