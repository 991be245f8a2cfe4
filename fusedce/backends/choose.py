"""Choice of the backend that runs, and the reason why another one cannot."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from fusedce.backends.protocol import Backend

_NAMES = ("torch", "triton")
_TRITON_DEVICES = ("cuda", "xpu")  # ROCm devices are called cuda by torch
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why the Triton backend cannot run there, or ``None`` if it can."""
    if not TRITON_INSTALLED:
        return "triton is not installed (pip install triton)"
    if dtype == torch.float64:
        return "the Triton kernels take float32, bfloat16 and float16, not float64"
    if device.type not in _TRITON_DEVICES and not (device.type == "cpu" and INTERPRETED):
        return (
            f"it needs CUDA, ROCm or XPU tensors, got tensors on {device} "
            f"(TRITON_INTERPRET=1 interprets the kernels on the CPU, slowly, for debugging)"
        )
    return None


def resolve_backend(backend: str | None, hidden: Tensor) -> str:
    """Name of the backend for ``hidden``; an explicit request that cannot run raises.

    Raises:
        ValueError: unknown name.
        RuntimeError: Triton was asked for and cannot run, with the reason.
    """
    if backend is None:
        accelerated = hidden.device.type in _TRITON_DEVICES
        usable = accelerated and why_not_triton(hidden.device, hidden.dtype) is None
        return "triton" if usable else "torch"
    if backend not in _NAMES:
        raise ValueError(f"backend must be None, 'torch' or 'triton', got {backend!r}")
    if backend == "triton":
        reason = why_not_triton(hidden.device, hidden.dtype)
        if reason is not None:
            raise RuntimeError(f"backend='triton' cannot run: {reason}")
    return backend


def get_backend(name: str | None) -> Backend:
    """The backend of that name, imported at its first use (triton is slow to import)."""
    if name == "triton":
        from fusedce.backends import triton

        return triton
    from fusedce.backends import torch as chunked

    return chunked
