"""The buffers of the gradients: allocated, added to chunk by chunk, written out once."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.contract.problem import Problem, Wanted


def waiting_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which a gradient waits for its upstream factor.

    The unscaled gradient of a sum can leave float16's range although the scaled one fits it, so
    float16 waits in float32. The other dtypes have the range of float32 or more.
    """
    return torch.float32 if dtype == torch.float16 else dtype


class Gradients:
    """Gradients of hidden, weight and bias, in ``dtype``; ``None`` where not wanted.

    The weight's is summed in float32 (float64) over the chunks. Where there is one chunk alone,
    that sum is inside of a product, and the buffer has the dtype that is wanted in the end.
    """

    def __init__(
        self,
        problem: Problem,
        wanted: Wanted,
        *,
        dtype: torch.dtype,
        chunks: int,  # 0: all gradients are 0
        every_row: bool = False,  # every row of hidden will be written
        accumulate: bool = False,  # also over a single chunk
    ) -> None:
        hidden, weight, bias = problem.hidden, problem.weight, problem.bias
        device = hidden.device
        acc = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.dtype = dtype
        self.hidden = self.weight = self.bias = None
        if wanted.hidden:
            fill = torch.empty if every_row and chunks else torch.zeros
            self.hidden = fill(hidden.shape, dtype=dtype, device=device)
        if wanted.weight:
            narrow = chunks == 1 and not accumulate
            fill = torch.empty if chunks else torch.zeros
            self.weight = fill(weight.shape, dtype=dtype if narrow else acc, device=device)
        if wanted.bias and bias is not None:
            self.bias = torch.zeros(bias.shape, dtype=acc, device=device)

    def add_rows(
        self,
        y: Tensor,  # (C,) classes, in range
        h: Tensor,  # (C, H)
        coefficient: Tensor,  # (C,)
    ) -> None:
        """Gradients of the head by single logits: ``weight[y] += coefficient * h``."""
        if self.weight is not None:
            _add_rows(self.weight, y, h * coefficient[:, None])
        if self.bias is not None:
            _add_rows(self.bias, y, coefficient)

    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        """``d_hidden, d_weight, d_bias`` in ``dtype``, (0,) where not wanted."""
        grads = (self.hidden, self.weight, self.bias)
        d_hidden, d_weight, d_bias = (
            torch.empty(0, dtype=self.dtype) if g is None else g.to(self.dtype) for g in grads
        )
        return d_hidden, d_weight, d_bias


def _add_rows(total: Tensor, y: Tensor, rows: Tensor) -> None:
    """``total[y] += rows``, repeated labels summed in the dtype of ``rows`` before any rounding."""
    if total.dtype == rows.dtype and total.device.type == "cpu":
        total.index_add_(0, y, rows)
        return
    unique, inverse = y.unique(return_inverse=True)
    summed = rows.new_zeros(len(unique), *rows.shape[1:])
    summed.index_put_((inverse,), rows, accumulate=True)  # sorts first: deterministic everywhere
    total[unique] = (total[unique].to(rows.dtype) + summed).to(total.dtype)
