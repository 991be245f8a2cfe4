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
            z = torch.mm(w, h.t(), out=out)
            if self.scale != 1.0:
                z.mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z

    def slope(self, z: Tensor) -> Tensor | None:
        """Derivative of capped logits by those before the cap; ``None`` for 1 everywhere."""
        return None if self.softcap is None else 1 - (z / self.softcap).square_()
