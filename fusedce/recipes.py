"""Losses made of log-probabilities: policy gradients, preferences, distillation.

Each is a few lines on what :func:`fusedce.fused_logprobs` returns, written as its paper writes it,
and returns a :class:`fusedce.LossSum`: a sum and what it is divided by (tokens, pairs, sequences),
for ``.mean()`` or a :class:`fusedce.LossAccumulator` over the whole optimizer step.

A log-probability of a sequence is the sum over its tokens: ``stats.logprob.sum(-1)``, where prompt
and padding are ignored labels; its mean, for SimPO and ORPO, is that over ``used.sum(-1)``. Chosen
and rejected answers go through one call, stacked; so do all of the reference's, under
``torch.no_grad()``. Inputs of two bytes are computed in float32. Masks are bool, or numbers of
which 0 is False. Nothing broadcasts: a tensor of another shape is a ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract.checks import can_be_read, check_are_tensors, check_choice
from .contract.divergence import forward_terms
from .contract.problem import INFINITE
from .contract.results import LossSum
from .loss.logprobs import fused_logprobs
from .loss.topk import filtered_logprob as filtered_logprob

_ROUNDED_ZERO = 1e-3  # the logarithm of a probability near 1, of two bytes


def grpo_loss(
    logprob: Tensor,  # (B, T)
    sampled: Tensor,  # (B, T), of the policy that sampled
    advantage: Tensor,  # (B,) or (B, T)
    used: Tensor,  # (B, T) bool, or numbers of which 0 is False: tokens of the answers
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    kind: Literal["clipped", "cispo"] = "clipped",
    ratio: Literal["token", "sequence"] = "token",
    normalisation: Literal["token", "sequence", "dr_grpo"] = "token",
    max_length: int | None = None,
    reference: Tensor | None = None,  # (B, T), of the reference policy
    kl: float = 0.0,
    entropy: Tensor | None = None,  # (B, T)
    entropy_bonus: float = 0.0,
) -> LossSum:
    """Group-relative policy optimisation (arXiv:2402.03300), by default normalised by tokens.

    With ``r = exp(logprob - sampled)`` and ``d = reference - logprob``, over used tokens::

        "clipped"   -min(r * A, clamp(r, 1 - clip[0], 1 + clip[1]) * A)
        "cispo"     -min(r, 1 + clip[1]) * A * logprob, with a ratio that gets no gradient

            + kl * (exp(d) - d - 1) - entropy_bonus * entropy

    A token that is clipped, or has no advantage, gets no gradient however far the policies are
    apart; with "cispo" (MiniMax-M1, arXiv:2506.13585) a clipped one gets a bounded gradient. An
    exponential that is not clipped and overflows the dtype is infinite, as in the formula.

    Examples:
        >>> logprob = torch.full((2, 3), -1.0, requires_grad=True)
        >>> used = torch.ones(2, 3, dtype=torch.bool)
        >>> grpo_loss(logprob, logprob.detach(), torch.tensor([1.0, -1.0]), used).n_valid
        tensor(6)

    Args:
        clip: how far below and above 1 a ratio counts. (TRL's ``epsilon_high`` of "cispo" is the
            bound itself, ``1 + clip[1]``.)
        ratio: "sequence" gives all tokens of a sequence the geometric mean of their ratios (GSPO,
            arXiv:2507.18071).
        normalisation: what the sum is divided by. "token": used tokens (DAPO, arXiv:2503.14476).
            "sequence": the mean over each sequence's tokens, then over sequences, as GRPO's paper
            has it. "dr_grpo": sequences times ``max_length``, a constant (arXiv:2503.20783).
        max_length: tokens of the longest answer that may be sampled; for "dr_grpo" only.

    Returns:
        :class:`fusedce.LossSum`: the sum, and what it is divided by: the number of used tokens, of
        sequences, or ``B * max_length``.

    Raises:
        ValueError: a tensor of another shape; ``kl`` without ``reference``, ``entropy_bonus``
            without ``entropy``, "dr_grpo" without ``max_length``, or an unknown name.
    """
    if kl and reference is None:
        raise ValueError("reference must be given with kl: log-probabilities of that policy")
    if entropy_bonus and entropy is None:
        raise ValueError("entropy must be given with entropy_bonus: fused_logprobs(...).entropy")
    if (max_length is None) == (normalisation == "dr_grpo"):
        raise ValueError(f"max_length must be given with 'dr_grpo' alone, got {max_length}")
    check_are_tensors(advantage=advantage)
    _check_shapes(logprob, sampled=sampled, used=used, reference=reference, entropy=entropy)
    if logprob.dim() != 2 or advantage.shape not in (logprob.shape, logprob.shape[:1]):
        raise ValueError(
            f"advantage must be (B,) = {tuple(logprob.shape[:1])} or (B, T) = "
            f"{tuple(logprob.shape)} (from logprob), got {tuple(advantage.shape)}"
        )
    check_choice("kind", kind, ("clipped", "cispo"))
    check_choice("ratio", ratio, ("token", "sequence"))
    check_choice("normalisation", normalisation, ("token", "sequence", "dr_grpo"))
    logprob, used = _wide(logprob), used != 0
    a = advantage if advantage.dim() == 2 else advantage[:, None]
    logprob = logprob.masked_fill(~used, 0)  # a gradient of infinities would be NaN
    log_ratio = logprob - sampled.masked_fill(~used, 0)
    if ratio == "sequence":
        mean = log_ratio.sum(-1, keepdim=True) / used.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = mean.expand_as(log_ratio)
    log_ratio = log_ratio.masked_fill(a == 0, 0)
    # Clipped tokens leave before the differentiable exp, whose overflow would give 0 * inf.
    r = log_ratio.detach().exp()
    if kind == "cispo":
        loss = -r.clamp(max=1 + clip[1]) * a * logprob.masked_fill(a == 0, 0)
    else:
        bound = r.clamp(1 - clip[0], 1 + clip[1])
        clipped = r * a > bound * a
        loss = -a * torch.where(clipped, bound, log_ratio.masked_fill(clipped, 0).exp())
    if reference is not None and kl:
        d = reference.masked_fill(~used, 0) - logprob
        loss = loss + kl * (torch.expm1(d) - d)
    if entropy is not None and entropy_bonus:
        loss = loss - entropy_bonus * _wide(entropy)
    loss, n = loss.masked_fill(~used, 0), used.sum()
    if normalisation == "sequence":
        loss = loss.sum(-1) / used.sum(-1).clamp(min=1)
    if normalisation != "token":
        n = torch.full_like(n, len(used) * (max_length or 1))
    return LossSum(loss.sum(), n)


# The loss of a pair, from the log-ratios of its chosen and rejected answer, each times beta.
_OF_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sigmoid": lambda chosen, rejected: -F.logsigmoid(chosen - rejected),
    "hinge": lambda chosen, rejected: torch.relu(1 - (chosen - rejected)),
    "apo_zero": lambda chosen, rejected: torch.sigmoid(-chosen) + torch.sigmoid(rejected),
    "apo_down": lambda chosen, rejected: torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen),
}


def dpo_loss(
    policy: Tensor,  # (2 B,) log-probabilities of sequences: B chosen, then B rejected
    reference: Tensor,  # (2 B,), of the reference policy
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "hinge", "apo_zero", "apo_down"] = "sigmoid",
) -> LossSum:
    """Direct preference optimisation (arXiv:2305.18290), conservative with ``label_smoothing``.

    With ``c, r = beta * (policy - reference)`` of the chosen and of the rejected answer::

        "sigmoid"   -log sigmoid(c - r)
        "hinge"     max(0, 1 - (c - r))                       (SLiC, arXiv:2305.10425)
        "apo_zero"  1 - sigmoid(c) + sigmoid(r)               (APO, arXiv:2408.06266)
        "apo_down"  sigmoid(c) + 1 - sigmoid(c - r)

    ``label_smoothing`` is the assumed share of pairs whose two answers are swapped.

    Returns:
        :class:`fusedce.LossSum` over pairs.

    Raises:
        ValueError: an odd number of sequences, shapes that differ, or an unknown ``kind``.

    Examples:
        >>> dpo_loss(torch.zeros(4), torch.zeros(4)).mean()
        tensor(0.6931)
    """
    check_choice("kind", kind, tuple(_OF_PAIRS))
    _check_shapes(policy, "policy", reference=reference)
    return _of_pairs(kind, beta * (_wide(policy) - reference), label_smoothing)


def cpo_loss(
    policy: Tensor,  # (2 B,) log-probabilities of sequences: B chosen, then B rejected
    *,
    beta: float = 0.1,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
) -> LossSum:
    """Contrastive preference optimisation (arXiv:2401.08417), without a reference policy.

    ``-log sigmoid(beta * (chosen - rejected) - gamma)``, smoothed and summed as in
    :func:`dpo_loss`. The paper adds the cross-entropy of the chosen answers:
    ``loss.mean() + alpha * nll``. SimPO (arXiv:2405.14734) is this loss with *mean*
    log-probabilities and a margin ``gamma``.

    Examples:
        >>> cpo_loss(torch.tensor([-1.0, -3.0]), beta=1.0, gamma=2.0).mean()
        tensor(0.6931)
    """
    check_are_tensors(policy=policy)
    return _of_pairs("sigmoid", beta * _wide(policy), label_smoothing, gamma)


def orpo_loss(
    policy: Tensor,  # (2 B,) mean log-probabilities of sequences' tokens: B chosen, B rejected
    *,
    beta: float = 0.1,
) -> LossSum:
    """Odds-ratio term of preference optimisation (arXiv:2403.07691), without a reference policy.

    ``-beta * log sigmoid(log odds(chosen) - log odds(rejected))`` with ``odds = p / (1 - p)``. The
    paper adds the cross-entropy of the chosen answers: ``loss.mean() + nll``.

    Examples:
        >>> orpo_loss(torch.tensor([-1.0, -1.0]), beta=1.0).mean()
        tensor(0.6931)
    """
    check_are_tensors(policy=policy)
    log_p = _wide(policy)
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)  # odds of a p of 1 are infinite
    return _of_pairs("sigmoid", log_p - (-torch.expm1(log_p)).log()) * beta


def _of_pairs(kind: str, policy: Tensor, label_smoothing: float = 0, margin: float = 0) -> LossSum:
    """The sum over pairs; ``label_smoothing`` is the share of each loss with swapped answers."""
    if policy.dim() != 1 or len(policy) % 2:
        raise ValueError(f"policy must be (2 B,), chosen then rejected, got {tuple(policy.shape)}")
    chosen, rejected = policy.chunk(2)
    chosen = chosen - margin
    loss = _OF_PAIRS[kind](chosen, rejected)
    if label_smoothing:
        loss = torch.lerp(loss, _OF_PAIRS[kind](rejected, chosen), label_smoothing)
    return LossSum(loss.sum(), torch.full((), len(loss), dtype=torch.int64, device=loss.device))


def kto_loss(
    policy: Tensor,  # (B,) log-probabilities of sequences
    reference: Tensor,  # (B,), of the reference policy
    desirable: Tensor,  # (B,) bool, or numbers of which 0 is False
    divergence: Tensor | float,  # () estimate of KL(policy || reference), of mismatched pairs
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

    Examples:
        >>> desirable = torch.tensor([True, False])
        >>> kto_loss(torch.zeros(2), torch.zeros(2), desirable, torch.tensor(0.0)).mean()
        tensor(0.5000)
    """
    _check_shapes(policy, "policy", reference=reference, desirable=desirable)
    if policy.dim() != 1:
        raise ValueError(
            f"policy must be (B,), a sum over each sequence, got {tuple(policy.shape)}"
        )
    if isinstance(divergence, (int, float)):
        wide = torch.promote_types(policy.dtype, torch.float32)
        divergence = torch.full((), float(divergence), dtype=wide, device=policy.device)
    check_are_tensors(divergence=divergence)
    if divergence.numel() != 1:
        raise ValueError(f"divergence must be (), one number, got {tuple(divergence.shape)}")
    above = beta * (_wide(policy) - reference - divergence.detach().reshape(()).clamp(min=0))
    loss = torch.where(
        desirable != 0,
        desirable_weight * torch.sigmoid(-above),
        undesirable_weight * torch.sigmoid(above),
    )
    return LossSum(loss.sum(), torch.full((), len(loss), dtype=torch.int64, device=loss.device))


def token_scaled_loss(
    logprob: Tensor,  # (...), anything where not used
    used: Tensor,  # (...) bool, or numbers of which 0 is False
) -> LossSum:
    """Each token's cross-entropy times its own probability, which gets no gradient.

    ``-exp(logprob) * logprob`` summed over used tokens (dynamic fine-tuning, arXiv:2508.05629):
    its gradient is minus that of the probability, where cross-entropy has the logarithm's.

    Returns:
        :class:`fusedce.LossSum` over used tokens, nats.

    Examples:
        >>> token_scaled_loss(torch.tensor([-0.5]), torch.tensor([True])).loss_sum
        tensor(0.3033)
    """
    _check_shapes(logprob, used=used)
    used = used != 0
    logprob = _wide(logprob).masked_fill(~used, 0)
    factor = logprob.detach().exp()
    loss = -factor * logprob.masked_fill(factor == 0, 0)  # p log p is 0 for p = 0
    return LossSum(loss.sum(), used.sum())


def _wide(x: Tensor) -> Tensor:
    """Log-probabilities in float32 or better, in which sums over tokens are computed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_shapes(like: Tensor, name: str = "logprob", /, **others: Tensor | None) -> None:
    """Raise an error for what is no tensor of the shape of ``like``, called ``name``."""
    given = {other: x for other, x in others.items() if x is not None}
    check_are_tensors(**{name: like}, **given)
    for other, x in given.items():
        if x.shape != like.shape:
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
    process_group: Any = None,
    vocab_size: int | None = None,
) -> LossSum:
    """Forward KL divergence of a student from a teacher of whom K log-probabilities are known.

    All other classes form one class, the tail, with the rest of the probability: with ``q`` the
    teacher's probabilities, ``exp(teacher)``, and ``p`` the student's::

        sum over k of q[k] * (log q[k] - log p[k])  +  q_tail * (log q_tail - log p_tail)
        q_tail = 1 - sum of q,  p_tail = 1 - sum over k of p[k]

    A lower bound of the divergence over all classes, and equal to it for ``K = V``; where the
    teacher's hidden states and head are at hand, :func:`fusedce.fused_kl` takes all classes. No
    token's loss is below 0. ``p_tail`` is at least the rounding error of the known classes'
    probabilities: it is exact down to 1e-38 if one class is near 1, and to about 1e-7 if several
    share the probability (float32).

    Examples:
        >>> hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
        >>> teacher, classes = torch.randn(3, 11).log_softmax(-1).topk(4)
        >>> distillation_loss(hidden, weight, classes, teacher).n_valid
        tensor(3)

    Args:
        classes: entries equal to ``ignore_index`` are left out; a token without others is ignored.
        teacher: at the student's temperature; ignored entries may hold anything.
        temperature: positive divisor of the student's logits. (For gradients of the size that they
            have at 1, multiply the loss by its square.)
        hidden, weight, bias, softcap, logit_scale, chunk_tokens, memory_budget, backend,
            process_group, vocab_size: as in :func:`fusedce.fused_logprobs`. With a sharded
            vocabulary all ranks hold the same classes, and return the same sum.

    Returns:
        :class:`fusedce.LossSum` over tokens, nats; differentiable in hidden, weight and bias.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fusedce.fused_logprobs`; ``ValueError`` for
            ``teacher`` of another shape than ``classes``, or with a value above 0, as probabilities
            and logits have (on a GPU, where values are not read, the loss is NaN); ``TypeError``
            for an ``ignore_index`` of ``None``.
    """
    check_are_tensors(hidden=hidden, classes=classes, teacher=teacher)
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
        process_group=process_group,
        vocab_size=vocab_size,
    ).logprob
    known = classes != ignore_index
    counted = known.any(-1)
    wrong = (teacher > _ROUNDED_ZERO) & known
    if can_be_read(teacher) and wrong.any():
        raise ValueError(
            f"teacher must be log-probabilities, at most 0, got {float(teacher[wrong][0]):.4g}: of "
            f"probabilities take the logarithm, of logits log_softmax over all classes"
        )
    log_q = teacher.detach().double().masked_fill(~known, -torch.inf).masked_fill(wrong, torch.nan)
    log_p = student.double().masked_fill(~known, -torch.inf)
    log_p = _with_the_rest(log_p, torch.finfo(student.dtype).eps)
    q_tail = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=0).log()
    loss = forward_terms(log_p, torch.cat([log_q, q_tail], -1)).sum(-1)
    loss = loss.masked_fill(loss >= INFINITE, torch.inf)
    return LossSum(loss.masked_fill(~counted, 0).sum().to(student.dtype), counted.sum())


def _with_the_rest(
    log_p: Tensor,  # (..., K) float64, -inf where there is no class
    eps: float,  # relative rounding of the log-probabilities
) -> Tensor:
    """``log_p`` and, as one more class, ``log(1 - sum of exp(log_p))``, finite, differentiable.

    One minus the largest is exact, so that a sure student's tail survives. A tail below the
    rounding of the others is noise, whose inverse would scale the gradient: it is raised to that.
    """
    largest, at = log_p.max(-1, keepdim=True)
    tail = -torch.expm1(largest) - log_p.scatter(-1, at, -torch.inf).exp().sum(-1, keepdim=True)
    with torch.no_grad():
        rounding = -(log_p.exp() * log_p).masked_fill(log_p == -torch.inf, 0)
        noise = 4 * eps * rounding.sum(-1, keepdim=True)
        value = torch.maximum(tail, noise).clamp(min=torch.finfo(torch.float32).tiny)
    rest = value.log() + (tail - tail.detach()) / value  # a raised tail has a gradient, too
    return torch.cat([log_p, rest], -1)
