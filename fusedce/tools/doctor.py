"""Report what fusedce would run on this machine, why, and whether its results are right."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import collect_env

import fusedce
from fusedce.backends.choose import INTERPRETED, TRITON_INSTALLED, default_backend, why_not_triton
from fusedce.backends.fallback import refused
from fusedce.contract.checks import DTYPES
from fusedce.contract.results import LossSum

# The oldest and the newest versions that the test suite has run with.
TESTED = {
    "torch": ("2.8.0", "2.15.0"),
    "triton": ("3.4.0", "3.9.0"),
    "transformers": ("5.17.0", "5.24.0"),
    "accelerate": ("1.15.0", "1.15.0"),
    "peft": ("0.21.2", "0.21.2"),
    "trl": ("1.16.0", "1.16.0"),
}
# Allowed error relative to the largest element; a wrong kernel is off by far more than rounding.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def report() -> dict[str, Any]:
    """The findings of `fusedce doctor` as JSON values; ``"right"`` is the verdict."""
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    found = range(torch.accelerator.device_count())
    devices: list[dict[str, Any]] = [
        {
            "device": str(device),
            "name": device_name(device),
            "checks": [_check(device, dtype) for dtype in TOLERANCE],
            "backends": _backend_lines(device),  # after the checks, which launch kernels
        }
        for device in (torch.device("cpu"), *(torch.device(accelerator.type, i) for i in found))
    ]
    triton = "interpreted (TRITON_INTERPRET is set)" if INTERPRETED else "compiled, not interpreted"
    versions = list[dict[str, str | None]]()
    for name, (oldest, newest) in TESTED.items():
        versions.append({"name": name, "version": None, "tested": f"{oldest} to {newest}"})
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[-1]["version"] = importlib.metadata.version(name)
    return {
        "fusedce": fusedce.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "triton_kernels": triton if TRITON_INSTALLED else "none, triton is not installed",
        "devices": devices,
        "right": all(c["right"] for d in devices for c in d["checks"]),
    }


def text(found: dict[str, Any]) -> str:
    """The findings of :func:`report` as text, for a terminal or a bug report."""
    lines = [f"fusedce {found['fusedce']}, Python {found['python']}, {found['platform']}"]
    for row in found["versions"]:
        version = row["version"] or "not installed"
        lines.append(f"  {row['name']:13} {version:14} (tested: {row['tested']})")
    lines.append(f"  Triton kernels: {found['triton_kernels']}")
    for device in found["devices"]:
        lines.append(f"\n{device['device']}: {device['name']}")
        lines += [f"  {line}" for line in device["backends"]]
        for check in device["checks"]:
            verdict = "ok" if check["right"] else "FAILED"
            lines.append(f"  self-check {check['dtype']:9} {verdict}: {check['detail']}")
    return "\n".join(lines)


def _check(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    try:
        error = self_check(device, dtype)
    except Exception as problem:  # a failure is part of the report
        return {"dtype": name, "right": False, "detail": f"{type(problem).__name__}: {problem}"}
    detail = f"largest relative error {error:.1e} of loss and gradients, allowed {TOLERANCE[dtype]}"
    return {"dtype": name, "right": error <= TOLERANCE[dtype], "detail": detail, "error": error}


def self_check(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Largest relative error of loss, d_hidden and d_weight, each in the maximum norm.

    It compares :func:`fusedce.fused_ce` on ``device`` with :func:`fusedce.reference_ce` on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 64, generator=generator).to(dtype)
    weight = (torch.randn(301, 64, generator=generator) / 8).to(dtype)
    labels = torch.randint(301, (37,), generator=generator)
    labels[::7] = -100

    def run(fn: Callable[..., LossSum], where: torch.device) -> list[torch.Tensor]:
        h, w = (x.to(where).requires_grad_() for x in (hidden, weight))
        loss = fn(h, w, labels.to(where)).mean()
        results = (loss.detach(), *torch.autograd.grad(loss, (h, w)))
        return [x.cpu().double() for x in results]

    ours = run(fusedce.fused_ce, device)
    truth = run(fusedce.reference_ce, torch.device("cpu"))  # some devices lack float64
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(ours, truth, strict=True)]
    return float(torch.stack(errors).max())


def _backend_lines(device: torch.device) -> list[str]:
    """The backend that ``backend=None`` picks for each dtype, and why not the other."""
    lines = []
    for dtype in DTYPES:
        # The choice needs no real tensor, so that dtypes which the device lacks are shown too.
        reason = why_not_triton(device, dtype)
        try:
            backend = default_backend(device, dtype)
        except RuntimeError as error:
            backend, reason = "no", str(error)
        if backend == "triton" and (unable := refused(device)):
            backend, why = "torch", f"the Triton kernels do not run here: {unable}"
        elif backend == "triton":
            why = "hidden sizes that are no multiple of 16 go to torch"
        else:
            why = f"not Triton: {reason}" if reason else "Triton on request, backend='triton'"
        lines.append(f"{str(dtype).removeprefix('torch.')}: {backend} backend; {why}")
    return lines


def device_name(device: torch.device) -> str:
    """The name of a device, with what its speed depends on."""
    if device.type == "cpu":
        return f"{platform.machine()}, {torch.get_num_threads()} threads"
    name = torch.get_device_module(device).get_device_name(device)
    if device.type != "cuda":
        return str(name)
    major, minor = torch.cuda.get_device_capability(device)
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    driver = collect_env.get_nvidia_driver_version(collect_env.run) or "unknown"
    return f"{name}, capability {major}.{minor}, {runtime}, driver {driver}"
