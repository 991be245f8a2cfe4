"""Losses made of log-probabilities: policy gradients, preferences, distillation; never of logits.

Each is a few lines on what :func:`fusedce.fused_logprobs` returns, written as its paper writes it,
and returns a :class:`fusedce.LossSum`: a sum and what it is divided by (tokens, pairs, sequences),
for ``.mean()`` or a :class:`fusedce.LossAccumulator` over the whole optimizer step.

A log-probability of a sequence is the sum over its tokens: ``stats.logprob.sum(-1)``, where prompt
and padding are ignored labels. Chosen and rejected answers go through one call, stacked; so do all
of the reference's, under ``torch.no_grad()``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedce.contract.divergence import forward_terms
from fusedce.contract.results import LossSum
from fusedce.loss.logprobs import fused_logprobs


def grpo_loss(
    logprob: Tensor,  # (B, T)
    sampled: Tensor,  # (B, T), of the policy that sampled
    advantage: Tensor,  # (B,) or (B, T)
    used: Tensor,  # (B, T) bool, or numbers of which 0 is False: tokens of the answers
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    reference: Tensor | None = None,  # (B, T), of the reference policy
    kl: float = 0.0,
    entropy: Tensor | None = None,  # (B, T)
    entropy_bonus: float = 0.0,
) -> LossSum:
    """Group-relative policy optimisation (arXiv:2402.03300), normalised by tokens (DAPO).

    With ``r = exp(logprob - sampled)`` and ``d = reference - logprob``, over used tokens::

        -min(r * A, clamp(r, 1 - clip[0], 1 + clip[1]) * A)
            + kl * (exp(d) - d - 1) - entropy_bonus * entropy

    A token that is clipped, or has no advantage, gets no gradient however far the policies are
    apart. An exponential that counts and is beyond the dtype is infinite, as in the formula.

    Returns:
        :class:`fusedce.LossSum` over used tokens, nats where it is the divergence's.

    Raises:
        ValueError: a tensor of another shape; ``kl`` without ``reference``, or ``entropy_bonus``
            without ``entropy``.

    Examples:
        >>> logprob = torch.full((2, 3), -1.0, requires_grad=True)
        >>> used = torch.ones(2, 3, dtype=torch.bool)
        >>> grpo_loss(logprob, logprob.detach(), torch.tensor([1.0, -1.0]), used).n_valid
        tensor(6)
    """
    if kl and reference is None:
        raise ValueError("reference must be given with kl: log-probabilities of that policy")
    if entropy_bonus and entropy is None:
        raise ValueError("entropy must be given with entropy_bonus: fused_logprobs(...).entropy")
    _check_shapes(logprob, sampled=sampled, used=used, reference=reference, entropy=entropy)
    if advantage.shape not in (logprob.shape, logprob.shape[:1]):
        raise ValueError(
            f"advantage must be (B,) = {tuple(logprob.shape[:1])} or (B, T) = "
            f"{tuple(logprob.shape)} (from logprob), got {tuple(advantage.shape)}"
        )
    used = used != 0
    a = advantage if advantage.dim() == logprob.dim() else advantage[:, None]
    logprob = logprob.masked_fill(~used, 0)  # a gradient of infinities would be NaN
    log_ratio = (logprob - sampled.masked_fill(~used, 0)).masked_fill(a == 0, 0)
    # Clipped tokens leave before the differentiable exp, whose overflow would give 0 * inf.
    ratio = log_ratio.detach().exp()
    bound = ratio.clamp(1 - clip[0], 1 + clip[1])
    clipped = ratio * a > bound * a
    loss = -a * torch.where(clipped, bound, log_ratio.masked_fill(clipped, 0).exp())
    if reference is not None and kl:
        d = reference.masked_fill(~used, 0) - logprob
        loss = loss + kl * (torch.expm1(d) - d)
    if entropy is not None and entropy_bonus:
        loss = loss - entropy_bonus * entropy
    return LossSum(loss.masked_fill(~used, 0).sum(), used.sum())


def dpo_loss(
    policy: Tensor,  # (2 B,) log-probabilities of sequences: B chosen, then B rejected
    reference: Tensor,  # (2 B,), of the reference policy
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Direct preference optimisation (arXiv:2305.18290), conservative with ``label_smoothing``.

    With ``m = beta * ((policy - reference)[:B] - (policy - reference)[B:])``::

        -(1 - label_smoothing) * log sigmoid(m) - label_smoothing * log sigmoid(-m)

    Returns:
        :class:`fusedce.LossSum` over pairs.

    Raises:
        ValueError: an odd number of sequences, or shapes that differ.

    Examples:
        >>> dpo_loss(torch.zeros(4), torch.zeros(4)).mean()
        tensor(0.6931)
    """
    if policy.shape != reference.shape or policy.dim() != 1 or len(policy) % 2:
        raise ValueError(
            f"policy and reference must be (2 B,), chosen then rejected, got "
            f"{tuple(policy.shape)} and {tuple(reference.shape)}"
        )
    chosen, rejected = (policy - reference).chunk(2)
    margin = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return LossSum(loss.sum(), torch.tensor(len(loss), device=loss.device))


def kto_loss(
    policy: Tensor,  # (B,) log-probabilities of sequences
    reference: Tensor,  # (B,), of the reference policy
    desirable: Tensor,  # (B,) bool
    divergence: Tensor,  # () estimate of KL(policy || reference), of unrelated pairs
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossSum:
    """Kahneman-Tversky optimisation (arXiv:2402.01306): answers that are good or bad, no pairs.

    With ``r = policy - reference`` and ``d = max(divergence, 0)``, which gets no gradient::

        desirable_weight * (1 - sigmoid(beta * (r - d)))        where desirable
        undesirable_weight * (1 - sigmoid(beta * (d - r)))      elsewhere

    Returns:
        :class:`fusedce.LossSum` over sequences.

    Raises:
        ValueError: ``reference`` or ``desirable`` of another shape than ``policy``, or a
            ``divergence`` of more than one element.

    Examples:
        >>> desirable = torch.tensor([True, False])
        >>> kto_loss(torch.zeros(2), torch.zeros(2), desirable, torch.tensor(0.0)).mean()
        tensor(0.5000)
    """
    _check_shapes(policy, "policy", reference=reference, desirable=desirable)
    if divergence.numel() != 1:
        raise ValueError(f"divergence must be () for all pairs, got {tuple(divergence.shape)}")
    above = beta * (policy - reference - divergence.detach().clamp(min=0))
    loss = torch.where(
        desirable,
        desirable_weight * torch.sigmoid(-above),
        undesirable_weight * torch.sigmoid(above),
    )
    return LossSum(loss.sum(), torch.tensor(len(loss), device=loss.device))


def token_scaled_loss(
    logprob: Tensor,  # (...), anything where not used
    used: Tensor,  # (...) bool, or numbers of which 0 is False
) -> LossSum:
    """Each token's cross-entropy times its own probability, which gets no gradient.

    ``-exp(logprob) * logprob`` summed over used tokens (dynamic fine-tuning, arXiv:2508.05629):
    the gradient of the probability itself, instead of its logarithm's.

    Returns:
        :class:`fusedce.LossSum` over used tokens, nats.

    Raises:
        ValueError: ``used`` of another shape than ``logprob``.

    Examples:
        >>> token_scaled_loss(torch.tensor([-0.5]), torch.tensor([True])).loss_sum
        tensor(0.3033)
    """
    _check_shapes(logprob, used=used)
    used = used != 0
    logprob = logprob.masked_fill(~used, 0)
    factor = logprob.detach().exp()
    loss = -factor * logprob.masked_fill(factor == 0, 0)  # p log p is 0 for p = 0
    return LossSum(loss.sum(), used.sum())


def _check_shapes(like: Tensor, name: str = "logprob", /, **others: Tensor | None) -> None:
    """Raise ValueError for a tensor that is not of the shape of ``like``, called ``name``."""
    for other, x in others.items():
        if x is not None and x.shape != like.shape:
            raise ValueError(
                f"{other} must be {tuple(like.shape)}, as {name}, got {tuple(x.shape)}"
            )


def distillation_loss(
    hidden: Tensor,  # (..., H) of the student
    weight: Tensor,  # (V, H)
    classes: Tensor,  # (..., K) int64 or int32: the teacher's likeliest, all different
    teacher: Tensor,  # (..., K) their log-probabilities
    *,
    bias: Tensor | None = None,  # (V,)
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
) -> LossSum:
    """Forward KL divergence of a student from a teacher of whom K log-probabilities are known.

    All other classes are one class, the tail, of what probability is left: with ``q`` the teacher's
    probabilities, ``exp(teacher)``, and ``p`` the student's::

        sum over k of q[k] * (log q[k] - log p[k])  +  q_tail * (log q_tail - log p_tail)
        q_tail = 1 - sum of q,  p_tail = 1 - sum over k of p[k]

    A lower bound of the divergence over all classes, and equal to it for ``K = V``. Where the
    teacher's hidden states and head are at hand, :func:`fusedce.fused_kl` takes all classes,
    and makes no log-probabilities to store. Its formula is this one's, too, so that no token is
    below 0. Computed in float64 from log-probabilities; no logits of the student. ``p_tail`` is
    taken as at least the rounding of the known classes' probabilities: of one class near 1 it is
    exact down to 1e-38, of several that share the probability to about 1e-7 (float32).

    Args:
        classes: entries of ``ignore_index`` are none; a token with nothing else is not counted.
        teacher: at the temperature of the student's; whatever stands at ignored entries.
        temperature: positive divisor of the student's logits. (For gradients of the size that they
            have at 1, multiply the loss by its square.)
        hidden, weight, bias, softcap, logit_scale, chunk_tokens, memory_budget, backend: as in
            :func:`fusedce.fused_logprobs`.

    Returns:
        :class:`fusedce.LossSum` over tokens, nats; differentiable in hidden, weight and bias.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fusedce.fused_logprobs`; ``ValueError`` for
            ``teacher`` of another shape than ``classes``; ``TypeError`` for an ``ignore_index`` of
            ``None``.

    Examples:
        >>> hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
        >>> teacher, classes = torch.randn(3, 11).log_softmax(-1).topk(4)
        >>> distillation_loss(hidden, weight, classes, teacher).n_valid
        tensor(3)
    """
    if classes.dim() != hidden.dim() or teacher.shape != classes.shape:
        raise ValueError(
            f"classes and teacher must be (..., K) for hidden {tuple(hidden.shape)}, got "
            f"{tuple(classes.shape)} and {tuple(teacher.shape)}"
        )
    if ignore_index is None:
        raise TypeError("ignore_index must be an int, got None: give one that no class has")
    student = fused_logprobs(
        hidden,
        weight,
        classes,
        bias=bias,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        memory_budget=memory_budget,
        backend=backend,
    ).logprob
    known = classes != ignore_index
    counted = known.any(-1)
    log_q = teacher.detach().double().masked_fill(~known, -torch.inf)
    log_p = student.double().masked_fill(~known, -torch.inf)
    p_tail = _log_of_the_rest(log_p, torch.finfo(student.dtype).eps)
    q_tail = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=0).log()
    loss = forward_terms(torch.cat([log_p, p_tail], -1), torch.cat([log_q, q_tail], -1)).sum(-1)
    total = loss.masked_fill(~counted, 0).sum()
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return LossSum(total.to(wide), counted.sum())


def _log_of_the_rest(
    log_p: Tensor,  # (..., K) float64, -inf where there is no class
    eps: float,  # relative rounding of the log-probabilities
) -> Tensor:
    """``log(1 - sum over k of exp(log_p[k]))``, ``(..., 1)``, finite and differentiable.

    One minus the largest is exact, so that a sure student's tail survives. A tail below the
    rounding of the others is noise, whose inverse would scale the gradient: it is raised to that.
    """
    largest, at = log_p.max(-1, keepdim=True)
    tail = -torch.expm1(largest) - log_p.scatter(-1, at, -torch.inf).exp().sum(-1, keepdim=True)
    with torch.no_grad():
        rounding = -(log_p.exp() * log_p).masked_fill(log_p == -torch.inf, 0)
        noise = 4 * eps * rounding.sum(-1, keepdim=True)
        value = torch.maximum(tail, noise).clamp(min=torch.finfo(torch.float32).tiny)
    return value.log() + (tail - tail.detach()) / value  # a raised tail has a gradient, too
