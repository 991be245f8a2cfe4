"""The output projection: weight, bias, scale and cap, and the slope of its logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.contract.problem import Problem
from fusedce.contract.rounding import acc_dtype


class Projection(NamedTuple):
    """Logits ``z = scale * (hidden @ weight.T + bias)``, capped to ``softcap * tanh(z / softcap)``.

    Products of the inputs are exact, and are summed in ``acc``.
    """

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, problem: Problem) -> Projection:
        """The projection of a problem."""
        return cls(problem.weight, problem.bias, problem.logit_scale, problem.softcap)

    @property
    def acc(self) -> torch.dtype:
        """Dtype of logits and sums."""
        return acc_dtype(self.weight.dtype)

    def slope(self, z: Tensor) -> Tensor | None:
        """Derivative of capped logits ``z`` by those before the cap; ``None`` without a cap."""
        return None if self.softcap is None else 1 - (z / self.softcap).square_()
