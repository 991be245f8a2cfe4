"""What options of the loss bring into the training pass of the Triton backend, chunk by chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.mean_logit import MeanLogit
from fusedce.backends.triton.operands import padded
from fusedce.contract.objective import slopes, token_losses
from fusedce.contract.problem import Problem


class ChunkFactors(NamedTuple):
    """Options of one chunk of tokens, and what the kernel says of its rows."""

    problem: Problem  # token weights are the chunk's
    y: Tensor  # (C,) labels, in range
    padding: Tensor | None  # (C,) bool: rows that are none, inside a CUDA graph
    zmean: Tensor | None  # (C,) fp64, with label smoothing
    terms: (
        Tensor  # (4, C) fp32: derivatives by nll and lse, of the latter by lse, by a logit's mean
    )
    class_weight: Tensor | None  # (V,) fp32, at most 1, padded, with label smoothing
    lse: Tensor  # (C,) fp32, for the kernel to fill

    def losses(self, nll: Tensor) -> Tensor:
        """``(C,)`` losses from what the kernel found."""
        losses = token_losses(self.problem, self.y, nll.double(), self.lse.double(), self.zmean)
        return losses if self.padding is None else losses.masked_fill(self.padding, 0)


class RowFactors:
    """Options of a loss, from which :meth:`chunk` cuts."""

    def __init__(
        self, problem: Problem, V: int | None = None, mean: MeanLogit | None = None
    ) -> None:
        """``V`` and ``mean``: of all classes, where ``weight`` has not a row of each."""
        self.problem, self.V = problem, problem.weight.shape[0] if V is None else V
        self.mean = MeanLogit(problem) if mean is None and problem.label_smoothing else mean
        self.class_weight = None
        self.largest = torch.ones((), dtype=torch.float32, device=problem.weight.device)
        if self.mean is not None and problem.class_weight is not None:
            c = problem.class_weight.float()
            self.largest = c.abs().amax().clamp_(min=torch.finfo(torch.float32).tiny)
            self.class_weight = padded(c / self.largest)

    def chunk(
        self,
        rows: Tensor | slice,
        h: Tensor,  # (C, H), padding 0
        y: Tensor,  # (C,)
        padding: Tensor | None,  # (C,) bool
    ) -> ChunkFactors:
        C, device = len(h), h.device
        problem = self.problem.rows(rows)
        y = y.long().clamp(0, self.V - 1)
        zero = torch.zeros(C, dtype=torch.float64, device=device)
        at_0, at_1 = slopes(problem, y, zero), slopes(problem, y, zero + 1)
        shift = zero + at_0.zmean * self.largest / self.V
        terms = torch.stack([zero + at_0.nll, zero + at_0.lse, at_1.lse - at_0.lse + zero, shift])
        return ChunkFactors(
            problem,
            y,
            padding,
            None if self.mean is None else self.mean.of(h.float()),
            terms.float(),
            self.class_weight,
            torch.empty(C, dtype=torch.float32, device=device),
        )
