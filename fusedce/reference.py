"""The slow truth: the loss written as its definition, in float64, for reading and for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.loss import LossSum


def reference_ce(
    hidden: Tensor,  # (..., H) any floating dtype
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (...) int64 or int32
    *,
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> LossSum:
    """Cross-entropy sum over valid tokens and their number, computed in float64 with all logits.

    ``z = logit_scale * (hidden @ weight.T + bias)``, then ``softcap * tanh(z / softcap)``;
    ``loss_sum = sum over valid i of (logsumexp(z_i) - z_i[labels_i])``.

    Differentiable by autograd. Memory ``8 * N * V`` bytes: for tests and documentation only.

    Args: as in :func:`fusedce.fused_ce`, without its checks.

    Returns:
        :class:`fusedce.LossSum` with ``loss_sum`` float64 (nats) and ``n_valid`` int64 (tokens).

    Example:
        >>> hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
        >>> reference_ce(hidden, weight, torch.tensor([1, -100, 4])).n_valid
        tensor(2)
    """
    hidden = hidden.reshape(-1, hidden.shape[-1]).double()
    labels = labels.reshape(-1).long()
    valid = labels != ignore_index
    # Ignored rows leave before anything is computed: a NaN in one must reach nobody.
    hidden, labels = hidden[valid], labels[valid]

    logits = hidden @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)

    log_normaliser = torch.logsumexp(logits, dim=-1)
    target = logits.gather(-1, labels[:, None])[:, 0]
    return LossSum((log_normaliser - target).sum(), valid.sum())
