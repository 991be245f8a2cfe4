"""Matrix products: in which dtype a device multiplies inputs, and in which it adds them up.

A loss needs products of two-byte inputs with float32 results. CUDA has them (``out_dtype``). No
operator of torch has them on a CPU: there both operands are widened to float32, which takes up to
twice as long as eager's products in bfloat16, and as long on a CPU without fast instructions for
those. bfloat16 and float16 on a CPU are for tests.

==================  ========  ==========
inputs              operands  results
==================  ========  ==========
bf16, fp16 on CUDA  as is     float32
bf16, fp16 else     float32   float32
fp32, fp64          as is     as is
==================  ========  ==========

Results are rounded to bfloat16 only where they are the weight's gradient, except for the labels'
rows: if those were rounded before the labels' part is subtracted, the error would be that of a
larger number.

On a CPU, products of widened operands have full precision (float64 under "medium") whatever
``torch.set_float32_matmul_precision`` says: the user's float32 inputs follow it, as in
``F.linear``, and bfloat16 and float16 ones do not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...contract.problem import ACC_DTYPE
from ..devices import widens

_BLOCK = 2**22  # elements of a product that waits in memory of its own to be added


class Products(NamedTuple):
    """Products of inputs of one dtype on one device."""

    inputs: torch.dtype
    operands: torch.dtype
    acc: torch.dtype  # of logits and sums

    @classmethod
    def of(cls, hidden: Tensor) -> Products:
        """The dtypes of the GEMMs of ``hidden (N, H)``, by its dtype and device."""
        dtype, acc = hidden.dtype, ACC_DTYPE[hidden.dtype]
        narrow = acc != dtype and widens("mm", hidden.device, dtype)
        return cls(dtype, dtype if narrow else acc, acc)

    @property
    def narrow(self) -> bool:
        """Whether operands of two bytes have products in float32."""
        return self.operands != self.acc

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        """``out = a @ b``, or ``out += a @ b``: (m, k), (k, n), (m, n).

        ``a`` and ``b`` are of one dtype, ``out`` of the same, of ``acc`` or of the inputs'.
        """
        widened = self.inputs != a.dtype == self.acc and on_cpu(out)
        doubled = widened and _reduced_precision()  # no setting reaches float64
        if a.dtype == out.dtype and not doubled:
            return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        wide = out.dtype if a.dtype != self.acc else None  # a result that operands do not have
        if wide and not add:
            return torch.mm(a, b, out_dtype=wide, out=out)
        if wide and widens("addmm", out.device, a.dtype):
            return torch.addmm(out, a, b, out_dtype=wide, out=out)
        b = b.double() if doubled else b
        step = max(_BLOCK // max(b.shape[1], 1), 1)
        for rows, some in zip(a.split(step), out.split(step), strict=True):
            rows = rows.to(b.dtype)
            product = torch.mm(rows, b, out_dtype=wide) if wide else torch.mm(rows, b)
            if add:
                some.add_(product)
            else:
                some.copy_(product)
        return out


def on_cpu(x: Tensor) -> bool:
    """Whether ``x`` is read without a wait, and a tile of logits stays in a cache."""
    return x.device.type == "cpu"


def _reduced_precision() -> bool:
    """Whether the user lets float32 products of a CPU round their operands."""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision not in ("none", "ieee")
    return torch.get_float32_matmul_precision() == "medium"
