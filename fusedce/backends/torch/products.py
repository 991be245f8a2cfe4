"""Matrix products: how this CPU multiplies inputs of a dtype.

A loss needs products of bfloat16 matrices with float32 results, which no operator of torch has on a
CPU. Two libraries inside torch have them. With AMX, MKL's ``gemm_bf16bf16f32`` takes about as long
as a bfloat16 product; without, longer than a float32 one. oneDNN's ``brgemm`` is as fast with AMD's
AVX-512 instructions; on Intel without AMX it is slower than float32. Both read bfloat16, add in
float32 and change no setting of the process.

=====================  ===============================  ===============================
inputs                 logits                           gradients
=====================  ===============================  ===============================
bf16, AMX              MKL: float32 results             MKL: float32 results
bf16, AMD AVX512_BF16  oneDNN: float32 results          oneDNN: float32 results
bf16, CUDA             bf16 operands, float32 result    bf16 operands, float32 result
bf16 otherwise         widened to float32               widened to float32
fp16                   widened (CUDA: as bf16)          widened to float32
fp32, fp64             as they are                      as they are
=====================  ===============================  ===============================

Products of bfloat16 have float32 results: if one were rounded before the labels' rows are
subtracted, the error would be that of a larger number. Only a weight's gradient that waits in
bfloat16 (see ``saved_grad_dtypes``) is written in it, except for the labels' rows.

On a CPU, products of widened operands have full precision (float64 under "medium") whatever
``torch.set_float32_matmul_precision`` says: the user's float32 inputs follow it, as in
``F.linear``, and bfloat16 and float16 ones do not. On CUDA "high" rounds float16's gradients of
logits to TF32, whose eleven bits eager's gradients in float16 have as well.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.contract.problem import acc_dtype

_BLOCK = 2**22  # elements of a product that waits in memory of its own to be added

_MKL = "gemm_bf16bf16f32_"
_BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_COLUMNS, _INNER = 1024, 1024  # of a block of oneDNN
_LEFT = 2**18  # elements of its first operand: what a core's own cache holds
_PACKED = 2**20  # elements of the second operand that are packed at a time
_TRIED = "2.13"  # the oldest version of torch with which oneDNN's kernel was run
_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Products(NamedTuple):
    """Products of inputs of one dtype on one device."""

    inputs: torch.dtype
    logits: torch.dtype  # of the operands
    gradients: torch.dtype  # of the operands
    acc: torch.dtype  # of logits and sums

    @classmethod
    def of(cls, hidden: Tensor) -> Products:
        """The dtypes of the GEMMs of ``hidden (N, H)``, by its dtype and device."""
        dtype, acc = hidden.dtype, acc_dtype(hidden.dtype)
        if hidden.is_cuda and acc != dtype:
            return cls(dtype, dtype, dtype if dtype == torch.bfloat16 else acc, acc)
        if dtype == torch.bfloat16 and hidden.is_cpu and bf16_gemm() is not None:
            return cls(dtype, dtype, dtype, acc)
        return cls(dtype, acc, acc, acc)

    @property
    def exact_bf16(self) -> bool:
        """Whether bfloat16 operands have products in float32."""
        return self.logits == self.inputs != self.acc

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        """``out = a @ b``, or ``out += a @ b``: (m, k), (k, n), (m, n).

        ``a`` and ``b`` are of one dtype, ``out`` of the same, of ``acc`` or of the inputs'. It is
        contiguous: rows of a buffer.
        """
        widened = self.inputs != a.dtype == self.acc and out.is_cpu
        doubled = widened and _reduced_precision()  # no setting reaches float64
        if a.dtype == out.dtype and not doubled:
            return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        gemm = bf16_gemm() if a.dtype == torch.bfloat16 and out.is_cpu else None
        if gemm is not None:
            assert out.is_contiguous()
            if not a.numel() * b.numel():
                return out if add else out.zero_()
            gemm.multiply(a, b, out, add=add)
            return out
        if out.is_cuda and a.dtype != out.dtype:
            if not add:
                return torch.mm(a, b, out_dtype=out.dtype, out=out)
            if widens_addmm(out.device, a.dtype):  # torch 2.11
                return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        b = b.double() if doubled else b
        step = max(_BLOCK // max(b.shape[1], 1), 1)
        for rows, some in zip(a.split(step), out.split(step), strict=True):
            if out.is_cuda:
                product = torch.mm(rows, b, out.dtype)
            else:
                product = torch.mm(rows.to(b.dtype), b)
            if add:
                some.add_(product)
            else:
                some.copy_(product)
        return out

    def by_onednn(self, w: Tensor) -> bool:
        """Whether oneDNN multiplies for logits instead of BLAS: of bfloat16 that was widened.

        MKL's float32 product takes 20 to 40% longer than oneDNN's on AMD's CPUs; but it sums in
        more parts. The gradients of float32 would show oneDNN's 1.5 to 2 times the error, while
        of bfloat16 it is far below the rounding.
        """
        widened = self.inputs == torch.bfloat16 and self.logits == self.acc and w.is_cpu
        onednn = torch.backends.mkldnn
        both = onednn.is_available() and torch.backends.mkl.is_available()
        return widened and both and bool(onednn.enabled)


@functools.cache
def widens_addmm(device: torch.device, dtype: torch.dtype) -> bool:
    from fusedce.backends.triton.products import widens

    return device.type == "meta" or widens(torch.addmm, device, dtype)


def _reduced_precision() -> bool:
    """Whether the user lets float32 products of a CPU round their operands."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision not in ("none", "ieee")
    return torch.get_float32_matmul_precision() == "medium"


class Bf16(NamedTuple):
    """A product of bf16 matrices with a float32 result."""

    name: str
    multiply: Callable[..., None]  # (a, b, out, add=False), of contiguous out


def bf16_gemm() -> Bf16 | None:
    """The product of bf16 with float32 results that is fast on this CPU; ``None``: none is.

    Chosen by what does not change from run to run, not by timing: a busy machine must not change
    the bits.
    """
    if _amx_for_mkl():
        return _checked(MKL)
    return _checked(ONEDNN) if onednn_usable() else None


@functools.cache
def _checked(gemm: Bf16) -> Bf16 | None:
    """The product, if it is there and right."""
    if gemm is MKL and of_torch(_MKL) is None:
        return None
    # A user's default dtype and device are not those of the library.
    cpu: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    a = torch.linspace(-1, 1, 48 * 100, **cpu).view(48, 100).bfloat16()
    b = torch.linspace(1, -2, 100 * 32, **cpu).view(100, 32).bfloat16()
    for add in (False, True):
        exact = a.double() @ b.double() + add
        found = torch.ones(48, 32, **cpu) if add else torch.full((48, 32), torch.nan, **cpu)
        gemm.multiply(a, b, found, add=add)
        if not torch.allclose(found.double(), exact, 1e-5, 1e-4):
            return None
    return gemm


def cpu_has(name: str) -> bool:
    """Whether ``torch.cpu`` has this probe, and it is true on this CPU."""
    probe = getattr(torch.cpu, name, None)
    return probe is not None and bool(probe())


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


# ---- MKL ----------------------------------------------------------------------------------------


def _amx_for_mkl() -> bool:
    """Whether MKL uses AMX here: this CPU and system have it, and no variable limits MKL."""
    if not (cpu_has("_is_amx_tile_supported") and cpu_has("_init_amx")):
        return False
    limits = (os.environ.get(name, "") for name in ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"))
    return all(re.fullmatch(r"|AUTO|AVX512_E[4-9]", limit.strip().upper()) for limit in limits)


def _by_mkl(
    a: Tensor,  # (m, k)
    b: Tensor,  # (k, n)
    out: Tensor,  # (m, n) fp32
    *,
    add: bool = False,
) -> None:
    """``out (+)= a @ b``, as Fortran sees it: ``out.T (+)= b.T @ a.T``.

    The Fortran form takes pointers to its integers: on a little-endian machine 64-bit ones are read
    right by libraries with 32-bit and with 64-bit integers. The call lets other threads run.
    """
    gemm, (m, k), n = of_torch(_MKL), a.shape, b.shape[1]
    assert gemm is not None
    (of_a, a, stride_a), (of_b, b, stride_b) = _by_rows(a), _by_rows(b)
    integer, real = ctypes.c_int64, ctypes.c_float
    gemm(
        of_b, of_a, *(ctypes.byref(integer(x)) for x in (n, m, k)), ctypes.byref(real(1)),
        ctypes.c_void_p(b.data_ptr()), ctypes.byref(integer(stride_b)),
        ctypes.c_void_p(a.data_ptr()), ctypes.byref(integer(stride_a)),
        ctypes.byref(real(1 if add else 0)),
        ctypes.c_void_p(out.data_ptr()), ctypes.byref(integer(n)),
    )  # fmt: skip


def _by_rows(x: Tensor) -> tuple[bytes, Tensor, int]:
    """A matrix whose rows, or whose columns (``T``), have neighbouring elements; its stride."""
    for letter, y in ((b"N", x), (b"T", x.t())):
        if y.stride(1) == 1 and y.stride(0) >= y.shape[1]:
            return letter, x, y.stride(0)
    x = x.contiguous()
    return b"N", x, max(x.stride(0), x.shape[1])


# ---- oneDNN -------------------------------------------------------------------------------------
#
# Torch exports oneDNN's ``brgemm`` as ``at::native::cpublas::brgemm`` for its own attention. No
# version promises that symbol: without it, in a version older than those that were tried, or where
# its answer is wrong, products are of widened operands, which take twice the time. The mangled name
# holds the types of all parameters, so another signature is another name.
#
# The kernel runs on one thread a call and reads the second operand in pairs of rows. So a product
# is made from blocks, which the threads of torch's own OpenMP pool take by turns: other threads
# would share the cores with that pool, which spins for a while after each of torch's operators.


def onednn_usable() -> bool:
    """Whether oneDNN has fast bfloat16 instructions on this CPU, other than AMX.

    Asked before every product: the kernel aborts the process if oneDNN is switched off.
    """
    return bool(torch.backends.mkldnn.enabled) and _allowed() and library() is not None


def _allowed() -> bool:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", ""))
    limit = limit.strip().upper()
    if _is_older(_TRIED) or not (cpu_has("_is_avx512_bf16_supported") and of_amd()):
        return False
    if cpu_has("_is_amx_tile_supported"):  # with AMX the kernel wants another layout
        return False
    return re.fullmatch(r"|ALL|DEFAULT|AVX512_CORE_(BF16|FP16|AMX.*)|AVX10.*", limit) is not None


@functools.cache  # (to compare versions takes 14 us)
def _is_older(version: str) -> bool:
    return torch.__version__ < version


@functools.cache
def of_amd() -> bool:
    """Whether AMD made this CPU, as Linux says."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


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


def _by_onednn(
    a: Tensor,  # (m, k) bf16
    b: Tensor,  # (k, n) bf16
    out: Tensor,  # (m, n) fp32, contiguous
    *,
    add: bool = False,
) -> None:
    """``out (+)= a @ b``."""
    if not onednn_usable():
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
    """``(k / 2, n)`` pairs of ``b (k, n)``, the second row's element in the upper half."""
    if b.stride(0) == 1 and not b.stride(1) % 2 and not b.storage_offset() % 2:
        return b.t().view(torch.int32).t().contiguous()  # half as many elements to move
    # (half the time of `torch.stack`, which copies element by element)
    rows: dict[str, Any] = {"dtype": torch.int32, "memory_format": torch.contiguous_format}
    pairs = b[1::2].view(torch.int16).to(**rows).bitwise_left_shift_(16)
    return pairs.bitwise_or_(b[0::2].view(torch.uint16).to(**rows))


def _multiply_packed(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    found = library()
    assert found is not None
    (kernel, parallel), (m, k), n = found, a.shape, out.shape[1]
    # (A call from Python takes some 5 us: blocks of few columns are taller.)
    rows = min(_LEFT // k, -(-m // torch.get_num_threads()))
    columns_first = itertools.product(range(0, n, _COLUMNS), range(0, m, rows))
    blocks = [(row, column) for column, row in columns_first]
    of_a, of_b, of_out = a.data_ptr(), b.data_ptr(), out.data_ptr()
    stride_a = a.stride(0)
    threads = min(torch.get_num_threads(), len(blocks))
    waiting, done = iter(blocks), []

    def task(_: Any) -> None:
        for row, column in waiting:  # (the next of a list's iterator is one step of Python's)
            kernel(
                min(rows, m - row), min(_COLUMNS, n - column), k, stride_a, n, n, add,
                of_a + 2 * row * stride_a, of_b + 4 * column,
                of_out + 4 * (row * n + column), True,
            )  # fmt: skip
            done.append(row)

    parallel(_TASK(task), None, threads, 0)
    if len(done) < len(blocks):
        raise RuntimeError("a thread of torch's pool could not multiply its blocks")


MKL = Bf16("MKL's gemm_bf16bf16f32 (AMX)", _by_mkl)
ONEDNN = Bf16("oneDNN's brgemm (AVX512_BF16)", _by_onednn)
