"""What the public functions return."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedce.contract.checks import check_number


class LossSum(NamedTuple):
    """An unnormalised loss and the number of tokens it sums over.

    Attributes:
        loss_sum: ``()``, float32 (float64 for float64 inputs): sum over valid tokens, in nats.
        n_valid: ``()``, int64, same device: number of valid tokens. On a GPU, a label out of range
            makes ``loss_sum`` NaN and ``n_valid`` negative (the code holds its position and value;
            :class:`fusedce.LossAccumulator` turns it into the error at its next synchronisation).
    """

    loss_sum: Tensor
    n_valid: Tensor

    def mean(self, denominator: Tensor | float | None = None) -> Tensor:
        """``loss_sum / max(denominator or n_valid, 1)``: nats per token, ``()``, differentiable.

        With gradient accumulation or several ranks, ``denominator`` is the number of valid tokens
        of the whole optimizer step: see :class:`fusedce.LossAccumulator`.

        A ``denominator`` of 0 is none.

        Raises:
            TypeError: ``denominator`` is no number and no tensor.
            ValueError: ``denominator`` is negative, not finite (both seen in Python numbers alone),
                or a tensor with more than one element.
        """
        own = self.n_valid.clamp(min=1)
        if isinstance(denominator, torch.SymInt):
            denominator = torch.scalar_tensor(denominator, dtype=torch.int64)
        if isinstance(denominator, Tensor):
            if denominator.numel() != 1:
                raise ValueError(
                    f"denominator must be one number, got a tensor of shape "
                    f"{tuple(denominator.shape)}"
                )
            given = denominator.reshape(()).to(self.loss_sum)
            return self.loss_sum / torch.where(given == 0, own.to(given), given.clamp(min=1))
        if denominator is None:
            return self.loss_sum / own
        number = check_number("denominator", denominator)
        if number < 0:
            raise ValueError(f"denominator must be at least 0, got {number}")
        return self.loss_sum / (max(number, 1) if number else own)


class TokenStats(NamedTuple):
    """What :func:`fused_logprobs` returns, each of the shape of ``labels``.

    Attributes:
        logprob: log-probability of the label, nats, at most 0; fp32 (fp64 for fp64 inputs).
        entropy: of the distribution over the V classes, nats, at least 0; dtype of logprob.
        lse: log-sum-exp of the logits, nats; dtype of logprob.
        argmax: int64, the likeliest class.
    """

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    argmax: Tensor
