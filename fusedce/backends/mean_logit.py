"""The mean row of a head, which gives mean logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedce.contract.problem import Problem
from fusedce.contract.rounding import acc_dtype

_ROWS = 1024  # of the head that are widened at a time


def _same(x: Tensor) -> Tensor:
    return x


class MeanLogit:
    """``zmean = sum_v c_v z_v / V``, which costs nothing per logit.

    Not by matrix products, which may round their operands where the user lets float32 ones.
    """

    def __init__(
        self, problem: Problem, V: int | None = None, total: Callable[[Tensor], Tensor] = _same
    ) -> None:
        """``total`` adds up ``(H + 1,)`` fp64 over all that hold some of the ``V`` classes."""
        weight, bias = problem.weight, problem.bias
        acc = acc_dtype(weight.dtype)
        rows, H = weight.shape
        c = weight.new_ones(rows, dtype=acc)
        if problem.class_weight is not None:
            c = problem.class_weight.to(acc)
        c = c / (rows if V is None else V)
        row = torch.zeros(H, dtype=torch.float64, device=weight.device)
        for some, c_some in zip(weight.split(_ROWS), c.split(_ROWS), strict=True):
            row += some.to(acc).mul(c_some[:, None]).sum(0)
        of_bias = torch.zeros((), dtype=torch.float64, device=weight.device)
        if bias is not None:  # a masked class (-inf) of weight 0 is no target
            of_bias += (c * bias.to(acc).masked_fill(c == 0, 0)).sum()
        numbers = total(torch.cat([row, of_bias[None]]))
        self.row, self.bias = numbers[:-1].to(acc), numbers[-1]  # (H,), ()
        self.scale = problem.logit_scale

    def of(self, h: Tensor) -> Tensor:
        """``(C,)`` float64 for ``h (C, H)``."""
        return self.scale * ((h * self.row).sum(1).double() + self.bias)
