"""Facts about each type of device that the backends use: one row a type.

To add a type, add a row to :data:`DEVICE_TYPES`. Without a row the torch backend computes, with
operators that torch has on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

Generation = tuple[int, int] | str


class DeviceType(NamedTuple):
    """A type of device."""

    # Triton's kernels are made for it, and torch's properties of a device have `total_memory`.
    triton: bool = False
    processors: str = "multi_processor_count"  # property: how many programs run at once
    # A device's compute capability or name, by which `archs.ARCHITECTURES` finds its blocks.
    generation: Callable[[torch.device], Generation] | None = None
    wide_products: bool = False  # products may take `out_dtype`; which do is tried on the device
    tf32: bool = False  # products follow torch's setting of TF32
    graphs: bool = False  # launches can be captured
    float64: bool = True  # losses are summed in it


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _gcn(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])


DEVICE_TYPES = {
    "cuda": DeviceType(
        triton=True, generation=_capability, wide_products=True, tf32=True, graphs=True
    ),
    "rocm": DeviceType(triton=True, generation=_gcn, wide_products=True, graphs=True),
    "xpu": DeviceType(triton=True, processors="gpu_subslice_count"),
    "mps": DeviceType(float64=False),
}
_OTHER = DeviceType()


def type_of(device: torch.device) -> DeviceType:
    """The row of ``device``. Torch calls ROCm's devices cuda."""
    rocm = device.type == "cuda" and torch.version.hip is not None
    return DEVICE_TYPES.get("rocm" if rocm else device.type, _OTHER)


@functools.cache
def generation_of(device: torch.device) -> Generation | None:
    """Compute capability or name of ``device``."""
    generation = type_of(device).generation
    return None if generation is None else generation(device)


@functools.cache
def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None for other devices."""
    if not type_of(device).triton:
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def capturing(device: torch.device) -> bool:
    """Whether a graph is captured: nothing may wait then, so all rows are computed."""
    if not type_of(device).graphs:
        return False
    return bool(torch.get_device_module(device).is_current_stream_capturing())


@functools.cache
def widens(name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch.mm`` or ``torch.addmm`` has a float32 result there, and the right one.

    CUDA's ``mm`` has it, and ``addmm`` from torch 2.11 on. An earlier ``addmm`` took ``out_dtype``
    and gave a wrong result (pytorch issue 154086), so a product of small whole numbers, which is
    exact, is compared. The one wait of a process is here.
    """
    if not type_of(device).wide_products:
        return False
    whole = torch.arange(256, device=device).view(16, 16) % 13 - 6
    x, out = whole.to(dtype), torch.ones(16, 16, device=device, dtype=torch.float32)
    exact = x.float() @ x.float()
    try:
        if name == "mm":
            torch.mm(x, x, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, x, x, out_dtype=torch.float32, out=out)
            exact += 1
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.equal(out, exact)
