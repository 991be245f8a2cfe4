"""Measured choice of the forward kernel's blocks: off unless ``FUSEDCE_AUTOTUNE=1``.

The first call for a (device, dtype, H, V, options, versions, source) times every candidate on
random inputs of a fixed number of rows, logs which one it takes, and keeps it in
``$FUSEDCE_CACHE_DIR/forward.json`` (default ``~/.cache/fusedce``). The choice does not depend on
the batch, so that a token's loss has the same bits in every one; it may differ between machines, in
the last bits of fp32.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from fusedce import kernels
from fusedce.backends.triton.archs import Blocks

ROWS = 4096  # enough to fill any device
_log = logging.getLogger("fusedce")
_chosen: dict[str, Blocks] = {}  # of this process


# The compiler, its assembler, the launch, and torch's allocator.
_CANNOT_RUN = (
    triton.CompilationError,
    triton.runtime.errors.PTXASError,
    triton.runtime.errors.OutOfResources,
    torch.OutOfMemoryError,
)


def enabled() -> bool:
    """Whether the environment asks for tuning."""
    return os.environ.get("FUSEDCE_AUTOTUNE", "0").lower() in ("1", "true", "on", "yes")


def choose(key: str, candidates: Sequence[Blocks], measure: Callable[[Blocks], float]) -> Blocks:
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
        _chosen[key] = Blocks(*kept)
        return _chosen[key]
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return candidates[0]
    times: dict[Blocks, float] = {}
    for config in candidates:
        try:
            times[config] = measure(config)
        except _CANNOT_RUN as e:
            why = (str(e) or type(e).__name__).splitlines()[-1]
            _log.warning("fusedce tuning: %s cannot run here: %s", config, why)
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
    """Key of a choice: device, problem, versions, and the kernel's own source."""
    name = torch.get_device_module(device).get_device_name(device)
    kind = str(dtype).removeprefix("torch.")
    versions = f"torch={torch.__version__} triton={triton.__version__} source={source_hash()}"
    return f"{name} {kind} H={H} V={V}{' options' if options else ''} {versions}"


@functools.cache
def source_hash() -> str:
    """Hash of the source files of the forward kernel."""
    folder = Path(kernels.__file__).parent
    code = b"".join((folder / name).read_bytes() for name in ("forward.py", "tile.py"))
    return hashlib.sha256(code).hexdigest()[:16]


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


def _write(key: str, config: Blocks) -> None:
    """Replace the file in one step: other processes may be reading or writing it."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=_file().parent, delete=False) as file:
            json.dump(_read() | {key: config}, file, indent=1)
        os.replace(file.name, _file())
    except OSError as e:
        _log.warning("fusedce tuning: cannot keep the choice in %s: %s", _file(), e)
