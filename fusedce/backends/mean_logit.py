"""The mean logit without a soft-cap: a product with the mean row of the head."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.contract.problem import Problem
from fusedce.contract.rounding import acc_dtype

_ROWS = 1024  # of the head that are widened at a time


class MeanLogit:
    """``zmean = sum_v c_v z_v / V``, which costs nothing per logit.

    Not by matrix products, which may round their operands where the user lets float32 ones.
    """

    def __init__(self, problem: Problem) -> None:
        weight, bias = problem.weight, problem.bias
        acc = acc_dtype(weight.dtype)
        V, H = weight.shape
        c = weight.new_ones(V, dtype=acc)
        if problem.class_weight is not None:
            c = problem.class_weight.to(acc)
        c = c / V
        row = torch.zeros(H, dtype=torch.float64, device=weight.device)
        for some, c_some in zip(weight.split(_ROWS), c.split(_ROWS), strict=True):
            row += some.to(acc).mul(c_some[:, None]).sum(0)
        self.row = row.to(acc)  # (H,)
        self.scale = problem.logit_scale
        self.bias = torch.zeros((), dtype=torch.float64, device=weight.device)
        if bias is not None:  # a masked class (-inf) of weight 0 is no target
            self.bias += (c * bias.to(acc).masked_fill(c == 0, 0)).sum()

    def of(self, h: Tensor) -> Tensor:
        """``(C,)`` float64 for ``h (C, H)``."""
        return self.scale * ((h * self.row).sum(1).double() + self.bias)
