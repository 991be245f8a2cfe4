"""The output projection: weight, bias, scale and cap; its logits and their slope."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.contract.problem import Problem
from fusedce.contract.rounding import acc_dtype


class Projection(NamedTuple):
    """Logits ``z = scale * (hidden @ weight.T + bias)``, capped to ``softcap * tanh(z / softcap)``.

    Read by rows of ``weight``, stored vocabulary-major, from exact products of the inputs.
    """

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, problem: Problem) -> Projection:
        return cls(problem.weight, problem.bias, problem.logit_scale, problem.softcap)

    @property
    def acc(self) -> torch.dtype:
        """Dtype of logits and sums."""
        return acc_dtype(self.weight.dtype)

    def logits(self, h: Tensor, begin: int, end: int, out: Tensor | None = None) -> Tensor:
        """``(v, C)`` logits of classes ``begin`` to ``end`` for ``h (C, H)`` in ``acc``."""
        w = self.weight[begin:end].to(self.acc)
        if self.bias is not None:
            b = self.bias[begin:end, None].to(self.acc)
            z = torch.addmm(b, w, h.t(), beta=self.scale, alpha=self.scale, out=out)
        else:
            z = self._product(w, h, out)
            if self.scale != 1.0:
                z.mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z

    def _product(self, w: Tensor, h: Tensor, out: Tensor | None) -> Tensor:
        """``w @ h.T`` of operands in ``acc``.

        MKL's float32 product takes 20 to 40% longer than oneDNN's on AMD's CPUs; but it sums in
        more parts. The gradients of float32 would show oneDNN's 1.5 to 2 times the error, while
        of bfloat16 it is far below the rounding.
        """
        if self.weight.dtype != torch.bfloat16 or not (w.is_cpu and _mkl_beside_onednn()):
            return torch.mm(w, h.t(), out=out)
        z: Tensor = torch.ops.mkldnn._linear_pointwise(w, h, None, "none", [], "")
        return z if out is None else out.copy_(z)

    def slope(self, z: Tensor) -> Tensor | None:
        """Derivative of capped logits by those before the cap; ``None`` for 1 everywhere."""
        return None if self.softcap is None else 1 - (z / self.softcap).square_()


def _mkl_beside_onednn() -> bool:
    """Whether `torch.mm` asks MKL where oneDNN could be asked."""
    onednn = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return onednn and torch.backends.mkl.is_available()
