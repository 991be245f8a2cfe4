"""Mean rows of a head: the exact one, which gives mean logits, and one of a few classes."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.contract.problem import Problem
from fusedce.contract.rounding import acc_dtype

SAMPLE = 128  # classes of a sample
_ROWS = 1024  # of the head that are widened at a time


def sample(weight: Tensor) -> Tensor:
    """``(K,)`` int64: classes of ``weight (V, H)``, evenly chosen, at most `SAMPLE`."""
    V = len(weight)
    return torch.arange(0, V, -(-V // SAMPLE), device=weight.device)


def sampled_mean_row(weight: Tensor) -> Tensor:
    """``(H,)`` fp32 or fp64: about the mean of the rows of ``weight (V, H)``, from a sample.

    Rounding changes the sum of a token's entries of the logits' gradient. In d_hidden, the change
    meets what all rows of the head share; adding it times this row undoes that.
    """
    return weight[sample(weight)].to(acc_dtype(weight.dtype)).mean(0)


class MeanLogit:
    """``zmean = sum_v c_v z_v / V``, which costs nothing per logit.

    Not by matrix products, which may round their operands where the user lets float32 ones.
    """

    def __init__(self, problem: Problem) -> None:
        weight, bias = problem.weight, problem.bias
        acc = acc_dtype(weight.dtype)
        rows, H = weight.shape
        c = weight.new_ones(rows, dtype=acc)
        if problem.class_weight is not None:
            c = problem.class_weight.to(acc)
        c = c / rows
        row = torch.zeros(H, dtype=torch.float64, device=weight.device)
        for some, c_some in zip(weight.split(_ROWS), c.split(_ROWS), strict=True):
            row += some.to(acc).mul(c_some[:, None]).sum(0)
        of_bias = torch.zeros((), dtype=torch.float64, device=weight.device)
        if bias is not None:  # a masked class (-inf) of weight 0 is no target
            of_bias += (c * bias.to(acc).masked_fill(c == 0, 0)).sum()
        self.row, self.bias = row.to(acc), of_bias  # (H,), ()
        self.scale = problem.logit_scale

    def of(self, h: Tensor) -> Tensor:
        """``(C,)`` float64 for ``h (C, H)``."""
        return self.scale * ((h * self.row).sum(1).double() + self.bias)
