"""Matrix products: how this CPU multiplies inputs of a dtype.

A loss needs products of bfloat16 matrices with float32 results, which no operator of torch has on a
CPU. Two libraries that torch carries have them. MKL's ``gemm_bf16bf16f32`` takes about as long as a
bfloat16 product with AMX; without, longer than a float32 one. oneDNN's ``brgemm`` does with AMD's
AVX-512 instructions (`fusedce.backends.torch.brgemm`). Both read bfloat16, add in float32 and
change no setting of the process.

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

Products of bfloat16 have float32 results: one that is rounded before the labels' rows are taken
away from it leaves the rounding error of a larger number. Only a weight's gradient that waits in
bfloat16 (see ``waiting``) is written in it, but for the labels' rows.

On a CPU, products of widened operands have full precision (float64 under "medium") whatever
``torch.set_float32_matmul_precision`` says: the user's float32 inputs follow it, as in
``F.linear``, and bfloat16 and float16 ones do not. On CUDA "high" rounds float16's gradients of
logits to TF32, whose eleven bits eager's gradients in float16 have as well.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.backends.torch import brgemm
from fusedce.contract.problem import acc_dtype

_BLOCK = 2**22  # elements of a product that waits in memory of its own to be added


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


class Bf16(NamedTuple):
    """A product of bf16 matrices with a float32 result."""

    name: str
    multiply: Callable[..., None]  # (a, b, out, add=False), of contiguous out


def bf16_gemm() -> Bf16 | None:
    """The product of bf16 with float32 results that is fast on this CPU; ``None``: none is.

    Asked of what does not change from run to run, not of a clock: a busy machine must not choose
    other bits.
    """
    if _amx_for_mkl():
        return _checked(MKL)
    return _checked(ONEDNN) if brgemm.usable() else None


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
    gemm, (m, k), n = _gemm_of_mkl(), a.shape, b.shape[1]
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


def _gemm_of_mkl() -> Callable[..., None] | None:
    return brgemm.of_torch("gemm_bf16bf16f32_") if sys.byteorder == "little" else None


def _by_rows(x: Tensor) -> tuple[bytes, Tensor, int]:
    """A matrix whose rows, or whose columns (``T``), have neighbouring elements; its stride."""
    for letter, y in ((b"N", x), (b"T", x.t())):
        if y.stride(1) == 1 and y.stride(0) >= y.shape[1]:
            return letter, x, y.stride(0)
    x = x.contiguous()
    return b"N", x, max(x.stride(0), x.shape[1])


MKL = Bf16("MKL's gemm_bf16bf16f32 (AMX)", _by_mkl)
ONEDNN = Bf16("oneDNN's brgemm (AVX512_BF16)", brgemm.multiply)


@functools.cache
def _checked(gemm: Bf16) -> Bf16 | None:
    """The product, if it is there and right."""
    if gemm is MKL and _gemm_of_mkl() is None:
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


def _amx_for_mkl() -> bool:
    """Whether MKL uses AMX here: this CPU and system have it, and no variable limits MKL."""
    if not (brgemm.cpu_has("_is_amx_tile_supported") and brgemm.cpu_has("_init_amx")):
        return False
    limits = (os.environ.get(name, "") for name in ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"))
    return all(re.fullmatch(r"|AUTO|AVX512_E[4-9]", limit.strip().upper()) for limit in limits)


def _reduced_precision() -> bool:
    """Whether the user lets float32 products of a CPU round their operands."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision not in ("none", "ieee")
    return torch.get_float32_matmul_precision() == "medium"
