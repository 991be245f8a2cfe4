"""Report the versions and devices of this machine, and what fusedce would run there and why."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

import fusedce

from ..backends.choose import default_backend, why_no_kernels, why_not_triton
from ..contract.checks import DTYPES

# The oldest and the newest versions that the test suite has run with.
TESTED = {
    "torch": ("2.8.0", "2.15.0"),
    "triton": ("3.4.0", "3.9.0"),
    "transformers": ("5.17.0", "5.24.0"),
    "accelerate": ("1.15.0", "1.15.0"),
    "peft": ("0.21.2", "0.21.2"),
    "trl": ("1.16.0", "1.16.0"),
}


def report() -> list[str]:
    """The findings as lines, for a terminal or a bug report."""
    python = platform.python_version()
    lines = [f"fusedce {fusedce.__version__}, Python {python}, {platform.platform()}"]
    for name, (oldest, newest) in TESTED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        lines.append(f"  {name:13} {version:14} (tested: {oldest} to {newest})")
    kind = torch.accelerator.current_accelerator() or torch.device("cpu")
    gpus = [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())]
    for device in (torch.device("cpu"), *gpus):
        lines += [f"{device}: {_name(device)}", *(f"  {_backend(device, x)}" for x in DTYPES)]
    return lines


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    runtime = f"CUDA {torch.version.cuda}" if device.type == "cuda" else device.type
    return f"{torch.get_device_module(device).get_device_name(device)}, {runtime}"


def _backend(device: torch.device, dtype: torch.dtype) -> str:
    """What ``backend=None`` picks there, and why."""
    why, name = why_not_triton(device, dtype), str(dtype).removeprefix("torch.")
    try:
        backend = default_backend(device, dtype)
    except RuntimeError as error:
        return f"{name}: nothing; {error}"
    if backend == "triton" and (why := why_no_kernels(device)) is None:
        return f"{name}: Triton's kernels, and torch where H is no multiple of 16"
    return f"{name}: torch; not Triton's kernels: {why or 'they are interpreted here'}"
