"""A CUDA device that is none: Triton compiles for it and launches on it, the interpreter runs.

:func:`on_device` gives Triton a driver whose target is an architecture of our choice. Everything
above the driver is Triton's own: what a launch is specialised on, the cache of compilations, the
order of arguments. The assembler is left out; what a driver would load is the PTX text itself.
Tensors are the CPU's. Each launch copies those it is given to simulated memory, and back.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from packaging.version import Version

from ptx.decode import Kernel, decode
from ptx.global_memory import GlobalMemory
from ptx.grid import Grid
from ptx.parse import parse
from ptx.tensor_map import TensorMap

# Compilations are kept between runs, apart from the user's own: these hold no machine code.
_CACHE = Path(tempfile.gettempdir()) / f"fusedce-ptx-{getpass.getuser()}"


class Launch(NamedTuple):
    kernel: str
    ctas: int
    steps: int


class Device:
    """Triton's driver, and what a test may ask of the launches."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)
        self.timing, self.order = "late", 0
        # Triton before 3.7.1 puts no fence between cp.async and wgmma.
        self.fences = Version(version("triton")) >= Version("3.7.1")
        self.launches: list[Launch] = []
        self.texts: dict[str, str] = {}  # by kernel: the PTX that was run last
        self.edit: Any = None  # (kernel, PTX) -> PTX to run instead
        self.shared_limit = 227 * 1024
        self.launcher_cls = functools.partial(_Launcher, self)
        self.utils = self
        self.remarks: Counter[str] = Counter()  # of all launches: questionable, but no fault

    # Triton asks these of a driver and of its utilities.
    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.target.arch  # compilations are kept by device

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": self.shared_limit, "multiprocessor_count": 3}

    def load_binary(self, name, binary, shared, device):
        return None, binary.decode(), 0, 0, 1024

    def ran(self, kernel: str) -> int:
        """Number of launches of each kernel."""
        return sum(launch.kernel == kernel for launch in self.launches)


@contextlib.contextmanager
def on_device(arch: int):
    """Inside, Triton compiles for ``sm_<arch>`` and launches on the :class:`Device` given."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    def text_itself(self, source, *_):
        return source.encode()

    device = Device(arch)
    with (
        mock.patch.dict(vars(driver)),
        mock.patch.object(CUDABackend, "make_cubin", text_itself),
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": str(_CACHE)}),
    ):
        driver.set_active(device)
        yield device


@functools.lru_cache(256)
def decoded(text: str) -> Kernel:
    return decode(parse(text))


class _Launcher:
    """The callable by which Triton launches one compilation."""

    def __init__(self, device: Device, source: Any, metadata: Any) -> None:
        self.device, self.shared = device, metadata.shared
        self.types = list(source.signature.values())
        self.maps = list(getattr(metadata, "tensordesc_meta", None) or ())

    def __call__(self, x, y, z, stream, text, packed, metadata, enter, exit_, *values) -> None:
        device = self.device
        name = decoded(text).program.name
        if device.edit is not None:
            text = device.edit(name, text)
        device.texts[name] = text
        kernel = decoded(text)
        given = [v for v, kind in zip(values, self.types, strict=True) if kind != "constexpr"]
        memory = _Memory(given)
        numbers, maps = self._numbers(given, memory)
        parameters = list(kernel.program.parameters)
        numbers += [0] * (len(parameters) - len(numbers))  # no scratch
        grid = Grid(
            kernel,
            (x, y, z),
            dict(zip(parameters, numbers, strict=True)),
            memory.simulated,
            shared_bytes=self.shared,
            maps=maps,
            timing=device.timing,
            order=1000 * device.order + len(device.launches),
            fences=device.fences,
        )
        device.launches.append(Launch(name, x * y * z, grid.run()))
        device.remarks += grid.remarks
        memory.copy_back()

    def _numbers(self, given: list[Any], memory: _Memory) -> tuple[list[Any], dict[int, TensorMap]]:
        """Arguments as the kernel's parameters take them; a descriptor is five."""
        numbers: list[Any] = []
        maps: dict[int, TensorMap] = {}
        encodings = iter(self.maps)
        for value in given:
            if isinstance(value, torch.Tensor):
                numbers.append(memory.address(value))
            elif hasattr(value, "base"):
                how, handle = next(encodings), 1 + len(maps)  # below all addresses
                if how["fp4_padded"] or getattr(value, "padding", "zero") != "zero":
                    raise NotImplementedError("such tensor maps")
                maps[handle] = TensorMap.encode(
                    memory.address(value.base), how["swizzle"], how["elem_size"],
                    how["block_size"], value.shape, value.strides,
                )  # fmt: skip
                numbers += [handle, *value.shape, *value.strides]
            else:
                numbers.append(value)
        return numbers, maps


class _Memory:
    """Tensors of one launch in simulated memory; of a storage, what its tensors reach."""

    def __init__(self, given: list[Any]) -> None:
        tensors = [getattr(value, "base", value) for value in given]
        tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
        reach: dict[int, list[tuple[int, int]]] = {}
        storages = {}
        for x in tensors:
            storage = x.untyped_storage()
            storages[storage.data_ptr()] = storage
            begin = x.storage_offset() * x.element_size()
            last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            if x.dim() == 2 and x.stride(0) > x.shape[1]:  # padding of the last row belongs to it
                last = x.shape[0] * x.stride(0) - 1
            end = begin + (last + 1) * x.element_size() if x.numel() else begin
            end = min(end, storage.nbytes())
            reach.setdefault(storage.data_ptr(), []).append((begin, end))
        sizes = [storage.nbytes() for storage in storages.values()]
        self.simulated = GlobalMemory(GlobalMemory.room_for(sizes))
        self._placed: dict[int, tuple[int, np.ndarray]] = {}
        for pointer, storage in storages.items():
            if pointer % 16:
                raise ValueError("a tensor's storage that is not aligned to 16 bytes")
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._placed[pointer] = (self.simulated.place(data, reach[pointer]), data)

    def address(self, x: torch.Tensor) -> int:
        storage = x.untyped_storage().data_ptr()
        return self._placed[storage][0] + x.data_ptr() - storage

    def copy_back(self) -> None:
        for address, data in self._placed.values():
            data[:] = self.simulated.read_back(address, data.size)
