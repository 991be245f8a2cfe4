"""Measured choice of the forward kernel's blocks: off unless ``FUSEDCE_AUTOTUNE=1``.

The first call for a (device, dtype, H, V, options) times every candidate on random inputs of a
fixed number of rows, logs which one it takes, and keeps it in ``$FUSEDCE_CACHE_DIR/forward.json``
(default ``~/.cache/fusedce``). The choice does not depend on the batch, so that a token's loss has
the same bits in every one; it may differ between machines, in the last bits of fp32.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from fusedce.backends.triton.archs import ForwardConfig

ROWS = 4096  # enough to fill any device
_log = logging.getLogger("fusedce")
_chosen: dict[str, ForwardConfig] = {}  # of this process


def enabled() -> bool:
    """Whether the environment asks for tuning."""
    return os.environ.get("FUSEDCE_AUTOTUNE", "0").lower() in ("1", "true", "on", "yes")


def choose(
    key: str, candidates: Sequence[ForwardConfig], measure: Callable[[ForwardConfig], float]
) -> ForwardConfig:
    """The candidate with the least ``measure(config)`` milliseconds; each key is measured once.

    ``key`` names everything the choice may depend on. The first candidate is the default, taken for
    the time being while a CUDA graph is captured. One that does not compile or fit on this device
    is passed over, and named in the log.

    Raises:
        RuntimeError: none of them runs.
    """
    if key in _chosen:
        return _chosen[key]
    kept = _read().get(key)
    if kept in [list(c) for c in candidates]:
        _chosen[key] = ForwardConfig(*kept)
        return _chosen[key]
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return candidates[0]
    times: dict[ForwardConfig, float] = {}
    for config in candidates:
        try:
            times[config] = measure(config)
        except (triton.CompilationError, triton.runtime.errors.OutOfResources) as e:
            _log.warning("fusedce tuning: %s cannot run here: %s", config, str(e).splitlines()[-1])
    if not times:
        raise RuntimeError(f"no configuration of the forward kernel runs for {key}")
    best = min(times, key=lambda c: times[c])
    _log.warning(
        "fusedce tuning: %s: %.3f ms with %s (default: %s)",
        key, times[best], best, f"{times[candidates[0]]:.3f} ms" if candidates[0] in times else "-",
    )  # fmt: skip
    _chosen[key] = best
    _write(key, best)
    return best


def key_of(device: torch.device, dtype: torch.dtype, H: int, V: int, options: bool) -> str:
    name = torch.get_device_module(device).get_device_name(device)
    kind = str(dtype).removeprefix("torch.")
    return f"{name} {kind} H={H} V={V}{' options' if options else ''} triton={triton.__version__}"


def _file() -> Path:
    folder = os.environ.get("FUSEDCE_CACHE_DIR")
    return (Path(folder) if folder else Path.home() / ".cache" / "fusedce") / "forward.json"


def _read() -> dict[str, Any]:
    try:
        known = json.loads(_file().read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        _log.warning("fusedce tuning: %s is not readable (%s): measuring again", _file(), e)
        return {}
    return known if isinstance(known, dict) else {}


def _write(key: str, config: ForwardConfig) -> None:
    """Replace the file in one step: other processes may be reading or writing it."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_file().parent, delete=False) as file:
            json.dump(_read() | {key: config}, file, indent=1)
        os.replace(file.name, _file())
    except OSError as e:
        _log.warning("fusedce tuning: cannot keep the choice in %s: %s", _file(), e)
