"""What options of the loss bring into the training pass of the Triton backend, chunk by chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.backends.torch.tiles import Head, MeanLogit
from fusedce.contract.objective import Objective, slopes, token_losses


class ChunkTerms(NamedTuple):
    """Options of one chunk of tokens."""

    objective: Objective  # token weights are the chunk's
    y: Tensor  # (C,) labels, in range
    padding: Tensor | None  # (C,) bool: rows that are none, inside a CUDA graph
    zmean: Tensor | None  # (C,) fp64, with label smoothing, as the two below
    mean_row: Tensor | None  # (H,) fp32: part of the gradient of hidden,
    mean_factors: Tensor | None  # (C,) fp32: with this factor
    terms: Tensor  # (3, C) fp32: derivatives of the loss by nll and lse, and of the latter by lse
    lse: Tensor  # (C,) fp32, for the kernel to fill
    rows: Tensor  # (C,) fp32, for the kernel to fill: factors of the rows of its gradient

    def losses(self, nll: Tensor) -> Tensor:
        """``(C,)`` losses from what the kernel found."""
        losses = token_losses(self.objective, self.y, nll.double(), self.lse.double(), self.zmean)
        return losses if self.padding is None else losses.masked_fill(self.padding, 0)


class Terms:
    """Options of a loss, from which :meth:`chunk` cuts."""

    def __init__(
        self,
        objective: Objective,
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        logit_scale: float,
    ) -> None:
        self.objective, self.V, self.scale = objective, weight.shape[0], logit_scale
        self.mean = None
        if objective.label_smoothing:
            self.mean = MeanLogit(Head(weight, bias, None, logit_scale), objective.class_weight)

    def chunk(
        self,
        rows: Tensor | slice,
        h: Tensor,  # (C, H), padding 0
        y: Tensor,  # (C,)
        padding: Tensor | None,  # (C,) bool
    ) -> ChunkTerms:
        C, device = len(h), h.device
        part = self.objective.rows(rows)
        y = y.long().clamp(0, self.V - 1)
        zero = torch.zeros(C, dtype=torch.float64, device=device)
        u_nll, u_lse, u_zmean = (zero + u for u in slopes(part, y, zero))
        by_lse = zero + slopes(part, y, zero + 1)[1] - u_lse
        zmean = mean_row = mean_factors = None
        if self.mean is not None:
            if padding is not None:
                u_zmean = u_zmean.masked_fill(padding, 0)
            zmean = self.mean.of(h.float())
            self.mean.gather(h.float(), u_zmean)
            mean_row, mean_factors = self.mean.row, (self.scale * u_zmean).float()
        return ChunkTerms(
            part,
            y,
            padding,
            zmean,
            mean_row,
            mean_factors,
            torch.stack([u_nll, u_lse, by_lse]).float(),
            torch.empty(C, device=device),
            torch.empty(C, device=device),
        )
