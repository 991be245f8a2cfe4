"""Which implementation runs, and why another one cannot.

A backend is a module with three functions, called with checked arguments, grad mode off:

* ``loss(hidden, weight, labels, bias, ignore_index, softcap, logit_scale)``
  -> ``(loss_sum, n_valid, lse)``, with ``lse (N,)`` zero at ignored positions;
* ``loss_and_grads(..., chunk_tokens, d_hidden, d_weight, d_bias)`` -> ``(loss_sum, n_valid)``,
  filling those of the three buffers that are not ``None``;
* ``scale_(x, g)``: ``x *= g`` in place, ``g`` a 0-d tensor.

Beside it is a module for what is wanted token by token:

* ``token_stats(...)`` -> :class:`fusedce.contract.objective.Stats`, one pass over the logits;
* ``token_grads(..., upstream, d_hidden, d_weight, d_bias)``, from logits computed anew.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

_MODULES = {"torch": "fusedce.backends.torch.training", "triton": "fusedce.backends.triton"}
_TOKEN_MODULES = {
    "torch": "fusedce.backends.torch.per_token",
    "triton": "fusedce.backends.triton.per_token",
}
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
    if backend not in _MODULES:
        raise ValueError(f"backend must be None, 'torch' or 'triton', got {backend!r}")
    if backend == "triton":
        reason = why_not_triton(hidden.device, hidden.dtype)
        if reason is not None:
            raise RuntimeError(f"backend='triton' cannot run: {reason}")
    return backend


def get_backend(name: str) -> ModuleType:
    """The backend's module, imported at its first use (triton is slow to import)."""
    return importlib.import_module(_MODULES[name])


def get_token_backend(name: str) -> ModuleType:
    """The backend's module for statistics and gradients token by token."""
    return importlib.import_module(_TOKEN_MODULES[name])
