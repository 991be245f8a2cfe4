"""Reference losses, written as their definitions with all logits, for reading and for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract.checks import check_choice
from ..contract.problem import KINDS
from ..contract.results import LossSum


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
            float64 gives the reference. The inputs' own dtype gives what eager code computes, and
            so the error that it makes.

    Returns:
        :class:`fusedce.LossSum` with ``loss_sum`` (nats) float64, float32 for a lesser ``dtype``,
        and ``n_valid`` int64 (tokens).

    Examples:
        >>> hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
        >>> reference_ce(hidden, weight, torch.tensor([1, -100, 4])).n_valid
        tensor(2)
    """
    wide = torch.promote_types(dtype, torch.float32)
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    V = len(weight)
    labels = labels.reshape(-1).long()
    counted = labels != ignore_index
    # Ignored positions are dropped before anything is computed: a NaN in them must not spread.
    w = torch.ones_like(counted, dtype=wide) if token_weight is None else token_weight
    w = w.reshape(-1).to(wide)
    used = counted & (w != 0)
    hidden, labels, w = hidden[used], labels[used], w[used]

    logits = _logits(hidden, weight, bias, softcap, logit_scale)
    lse = torch.logsumexp(logits, dim=-1)
    target = (1 - label_smoothing) * F.one_hot(labels, V).to(wide) + label_smoothing / V  # (N, V)
    if class_weight is not None:
        target = target * class_weight.to(wide)
    # A class that is no target at all may have a logit of -inf: 0 * inf is 0 here.
    losses = torch.where(target == 0, 0.0, -target * logits.log_softmax(-1)).sum(-1)
    losses = losses + z_loss * lse**2
    return LossSum((w * losses).sum(), counted.sum())


def reference_kl(
    hidden: Tensor,  # (..., H) any floating dtype
    weight: Tensor,  # (V, H)
    teacher_hidden: Tensor,  # (..., H of the teacher)
    teacher_weight: Tensor,  # (V, H of the teacher)
    labels: Tensor | None = None,  # (...) int64 or int32
    *,
    divergence: str = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    ce_weight: float = 0.0,
    bias: Tensor | None = None,  # (V,)
    teacher_bias: Tensor | None = None,  # (V,)
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    ignore_index: int = -100,
    token_weight: Tensor | None = None,  # (...)
    dtype: torch.dtype = torch.float64,
) -> LossSum:
    """Sum over valid tokens of the loss of :func:`fusedce.fused_kl`, computed with all logits.

    Differentiable by autograd. Memory ``16 * N * V`` bytes: for tests and documentation only.

    Args: as in :func:`fusedce.fused_kl`, without its checks.
        dtype: of the products; what follows is in float32 or better.

    Returns:
        :class:`fusedce.LossSum`.

    Raises:
        ValueError: for another ``divergence`` than these three.

    Examples:
        >>> hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
        >>> reference_kl(hidden, weight, hidden, weight).n_valid
        tensor(3)
    """
    check_choice("divergence", divergence, KINDS)
    wide = torch.promote_types(dtype, torch.float32)
    if labels is None:
        labels, ignore_index = hidden.new_zeros(hidden.shape[:-1], dtype=torch.int64), -1
    labels = labels.reshape(-1).long()
    counted = labels != ignore_index
    w = torch.ones_like(labels, dtype=wide) if token_weight is None else token_weight
    w = w.reshape(-1).to(wide)
    used = counted & (w != 0)

    hidden, teacher_hidden = (
        x.reshape(-1, x.shape[-1])[used].to(dtype) for x in (hidden, teacher_hidden)
    )
    z = _logits(hidden, weight, bias, softcap, logit_scale)
    of_teacher = _logits(
        teacher_hidden, teacher_weight, teacher_bias, teacher_softcap, teacher_logit_scale
    ).detach()
    log_p = (of_teacher / temperature).log_softmax(-1)
    log_q = (z / temperature).log_softmax(-1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        # 0 log 0 is 0, also where autograd looks
        none = log_a == -torch.inf
        gap = log_a.masked_fill(none, 0) - log_b.masked_fill(none, 0)
        return (log_a.exp() * gap).sum(-1)

    if divergence == "jsd" and 0 < beta < 1:
        share = torch.tensor([beta, 1 - beta], dtype=wide, device=z.device).log()
        log_m = torch.logaddexp(share[0] + log_p, share[1] + log_q)
        losses = beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)
    elif divergence == "reverse" or (divergence == "jsd" and beta == 1):
        losses = kl(log_q, log_p)
    else:
        losses = kl(log_p, log_q)
    if ce_weight:
        losses = losses + ce_weight * F.cross_entropy(z, labels[used], reduction="none")
    return LossSum((w[used] * losses).sum(), counted.sum())


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None, scale: float
) -> Tensor:
    """``(N, V)``: the product in the dtype of ``hidden``, what follows in float32 or better."""
    dtype = hidden.dtype
    z = F.linear(hidden, weight.to(dtype), None if bias is None else bias.to(dtype))
    z = z.to(torch.promote_types(dtype, torch.float32)) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)
