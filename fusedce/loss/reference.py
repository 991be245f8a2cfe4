"""The slow truth: the loss written as its definition, for reading and for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedce.contract.results import LossSum


def reference_ce(
    hidden: Tensor,  # (..., H) any floating dtype
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (...) int64 or int32
    *,
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weight: Tensor | None = None,  # (...)
    class_weight: Tensor | None = None,  # (V,)
    dtype: torch.dtype = torch.float64,
) -> LossSum:
    """Cross-entropy sum over valid tokens and their number, computed with all logits.

    ``z = logit_scale * (hidden @ weight.T + bias)``, then ``softcap * tanh(z / softcap)``;
    ``loss_sum = sum over valid i of token_weight_i * (CE_i + z_loss * logsumexp(z_i)**2)``, where
    ``CE_i`` is what ``F.cross_entropy`` calls by that name: ``-sum over v of t_v * log p_v`` with
    the smoothed and weighted target ``t = class_weight * ((1 - s) * onehot(labels_i) + s / V)``.

    Differentiable by autograd. Memory ``8 * N * V`` bytes: for tests and documentation only.

    Args: as in :func:`fusedce.fused_ce`, without its checks.
        dtype: of the product of ``hidden`` and ``weight``; what follows is in float32 or better.
            The truth with float64; with the inputs' own dtype, what people write, and so how wrong
            the loss may be.

    Returns:
        :class:`fusedce.LossSum` with ``loss_sum`` (nats) float64, float32 for a lesser ``dtype``,
        and ``n_valid`` int64 (tokens).

    Example:
        >>> hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
        >>> reference_ce(hidden, weight, torch.tensor([1, -100, 4])).n_valid
        tensor(2)
    """
    wide = torch.promote_types(dtype, torch.float32)
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    labels = labels.reshape(-1).long()
    counted = labels != ignore_index
    # What does not count leaves before anything is computed: a NaN in it must reach nobody.
    w = torch.ones(len(labels), device=labels.device) if token_weight is None else token_weight
    w = w.reshape(-1).to(wide)
    used = counted & (w != 0)
    hidden, labels, w = hidden[used], labels[used], w[used]

    bias = None if bias is None else bias.to(dtype)
    logits = F.linear(hidden, weight.to(dtype), bias).to(wide) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)

    lse = torch.logsumexp(logits, dim=-1)
    V = logits.shape[-1]
    target = (1 - label_smoothing) * F.one_hot(labels, V).to(wide) + label_smoothing / V  # (N, V)
    if class_weight is not None:
        target = target * class_weight.to(wide)
    # A class that is no target at all may have a logit of -inf: 0 * inf is 0 here.
    losses = torch.where(target == 0, 0.0, -target * logits.log_softmax(-1)).sum(-1)
    losses = losses + z_loss * lse**2
    return LossSum((w * losses).sum(), counted.sum())
