"""Products of bfloat16 matrices with float32 results by oneDNN's kernel, for AMD's CPUs.

`torch.mm` rounds a product of bfloat16 to bfloat16, which would cost the loss its exactness, and
widened operands take twice the time there. (On Intel's CPUs without AMX a product of bfloat16 takes
longer than one of float32: `bench/LOG.md`.) The kernel behind both, ``brgemm``, has float32
results; torch exports it as ``at::native::cpublas::brgemm`` for its own attention. No torch version
promises that symbol: without it, in a version older than those that were tried, or where its answer
is wrong, products are of widened operands. Its mangled name holds the types of all parameters, so
another signature is another name.

The kernel runs on one thread a call and reads the second operand in pairs of rows. So a product is
made from blocks, which the threads of torch's own OpenMP pool take by turns: other threads would
share the cores with that pool, which spins for a while after each of torch's operators.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_ROWS, _COLUMNS, _INNER = 256, 1024, 1024  # of a block: what a core's own cache holds
_PACKED = 2**20  # elements of the second operand that are packed at a time
_TRIED = "2.13"  # the oldest version of torch with which this was run
_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def usable() -> bool:
    """Whether oneDNN multiplies bfloat16 by fast instructions of this CPU, and it is not AMX.

    Asked before every product: the kernel ends the process where oneDNN is switched off.
    """
    return bool(torch.backends.mkldnn.enabled) and _allowed() and library() is not None


def _allowed() -> bool:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", ""))
    limit = limit.strip().upper()
    if torch.__version__ < _TRIED or not (cpu_has("_is_avx512_bf16_supported") and of_amd()):
        return False
    if cpu_has("_is_amx_tile_supported"):  # with AMX the kernel wants another layout
        return limit in ("AVX512_CORE_BF16", "AVX512_CORE_FP16")
    return re.fullmatch(r"|ALL|DEFAULT|AVX512_CORE_(BF16|FP16|AMX.*)|AVX10.*", limit) is not None


def cpu_has(name: str) -> bool:
    """Whether this CPU has what a function of ``torch.cpu`` asks for."""
    probe = getattr(torch.cpu, name, None)
    return probe is not None and bool(probe())


@functools.cache
def of_amd() -> bool:
    """Whether AMD made this CPU, as Linux says."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def of_torch(name: str) -> Any | None:
    """A function of the library that holds torch's operators of a CPU; ``None``: it has none."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = getattr(ctypes.CDLL(str(path)), name)
    except (OSError, AttributeError):
        return None
    function.restype = None
    return function


@functools.cache
def library() -> tuple[Callable[..., None], Callable[..., None]] | None:
    """oneDNN's kernel, and OpenMP's parallel region; ``None`` where torch does not export them."""
    kernel, parallel = of_torch(_BRGEMM), of_torch("GOMP_parallel")
    if kernel is None or parallel is None:
        return None
    size, flag, pointer = ctypes.c_int64, ctypes.c_bool, ctypes.c_void_p
    kernel.argtypes = [*[size] * 6, flag, pointer, pointer, pointer, flag]
    parallel.argtypes = [_TASK, pointer, ctypes.c_uint, ctypes.c_uint]
    return kernel, parallel


def multiply(
    a: Tensor,  # (m, k) bf16
    b: Tensor,  # (k, n) bf16
    out: Tensor,  # (m, n) fp32, contiguous
    *,
    add: bool = False,
) -> None:
    """``out (+)= a @ b``."""
    if not usable():
        raise RuntimeError("oneDNN was switched off while a loss was computed")
    k, n = b.shape
    step = min(_INNER, max(_PACKED // n // 64 * 64, 64))
    for first in range(0, k, step):
        some, others = a[:, first : first + step], b[first : first + step]
        if some.shape[1] % 2:
            some = torch.nn.functional.pad(some, (0, 1))
            others = torch.nn.functional.pad(others, (0, 0, 0, 1))
        if some.stride(1) != 1 or some.stride(0) < some.shape[1]:
            some = some.contiguous()
        _multiply_packed(some, _packed(others), out, add=add or first > 0)


def _packed(b: Tensor) -> Tensor:
    """``(k / 2, n, 2)``: ``b (k, n)`` with pairs of rows side by side."""
    if b.stride(0) == 1 and not b.stride(1) % 2 and not b.storage_offset() % 2:
        return b.t().view(torch.int32).t().contiguous()  # half as many elements to move
    return torch.stack((b[0::2], b[1::2]), -1)


def _multiply_packed(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    found = library()
    assert found is not None
    kernel, parallel = found
    (m, k), n = a.shape, out.shape[1]
    columns_first = itertools.product(range(0, n, _COLUMNS), range(0, m, _ROWS))
    blocks = [(row, column) for column, row in columns_first]
    of_a, of_b, of_out = a.data_ptr(), b.data_ptr(), out.data_ptr()
    stride_a = a.stride(0)

    def block(row: int, column: int) -> None:
        kernel(
            min(_ROWS, m - row), min(_COLUMNS, n - column), k, stride_a, n, n, add,
            of_a + 2 * row * stride_a, of_b + 4 * column,
            of_out + 4 * (row * n + column), True,
        )  # fmt: skip

    threads = min(torch.get_num_threads(), len(blocks))
    if threads == 1:
        for row, column in blocks:
            block(row, column)
        return
    waiting, done = iter(blocks), []

    def task(_: Any) -> None:
        for row, column in waiting:  # (the next of a list's iterator is one step of Python's)
            block(row, column)
            done.append(row)

    parallel(_TASK(task), None, threads, 0)
    if len(done) < len(blocks):
        raise RuntimeError("a thread of torch's pool could not multiply its blocks")
