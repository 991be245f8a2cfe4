"""Divergences of a student from a teacher over the whole vocabulary, without either's logits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..autograd import dispatch
from ..contract.divergence import checked_divergence
from ..contract.groups import local_of
from ..contract.problem import Divergence, Outputs, Problem, Task
from ..contract.results import LossSum, MonitoredLossSum
from ..ranks.door import Vocabulary, divergence_task, no_labels
from .fused_ce import check_outputs, monitored_sums

Kind = Literal["forward", "reverse", "jsd"]


def fused_kl(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) floats
    teacher_hidden: Tensor,  # (..., H of the teacher)
    teacher_weight: Tensor,  # (V, H of the teacher) dtype of teacher_hidden
    labels: Tensor | None = None,  # (...) int64 or int32
    *,
    divergence: Kind = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    ce_weight: float = 0.0,
    bias: Tensor | None = None,  # (V,) floats
    teacher_bias: Tensor | None = None,  # (V,) dtype of teacher_hidden
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    token_weight: Tensor | None = None,  # (...) numbers or bool
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    monitor: Collection[str] = (),
) -> LossSum:
    """Sum over positions of the divergence of a student from a teacher, without the logits.

    With the logits of :func:`fused_ce` of both, ``p = softmax(teacher's / temperature)`` and
    ``q = softmax(student's / temperature)``, nats at each position whose label counts::

        "forward"   KL(p || q) = sum over v of p[v] * log(p[v] / q[v])
        "reverse"   KL(q || p) = sum over v of q[v] * log(q[v] / p[v])
        "jsd"       beta * KL(p || m) + (1 - beta) * KL(q || m),   m = beta * p + (1 - beta) * q

    ``loss_sum`` is the sum of ``token_weight * (divergence + ce_weight * CE)``, where ``CE`` is the
    student's cross-entropy of the label at temperature 1. For gradients of the size they have at
    temperature 1 (Hinton et al., arXiv:1503.02531) write ``fused_kl(...) * temperature**2``.

    Examples:
        >>> hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(100, 16)
        >>> teacher_hidden, teacher_weight = torch.randn(6, 24), torch.randn(100, 24)
        >>> fused_kl(hidden, weight, teacher_hidden, teacher_weight).mean().backward()

    Args:
        teacher_hidden: ``(..., H)`` with the leading shape of ``hidden``; its H may be another, and
            its dtype too (but float64 if and only if the student's is float64).
        teacher_weight, teacher_bias: ``(V, H)`` and ``(V,)``, of the same classes.
        teacher_softcap, teacher_logit_scale: of the teacher's logits.
        labels: ``(...)``, class indices or ``ignore_index``: which positions count, and the targets
            of the cross-entropy of ``ce_weight``. ``None``: all positions count.
        divergence: "forward", "reverse" or "jsd".
        beta: for "jsd", in [0, 1]: the teacher's share of the mixture ``m``. 0 gives "forward", 1
            "reverse", as in TRL (arXiv:2306.13649).
        temperature: positive divisor of both heads' finished logits.
        ce_weight: finite weight of the cross-entropy beside the divergence, in the same pass.
        monitor: names out of ``("correct", "entropy")``: the student's at temperature 1, as in
            :func:`fused_ce`. They take one more product of the head's size, without gradient.
        hidden, weight, bias, ...: the student's; these and the others are as in :func:`fused_ce`.
            Both heads' rows are split alike among the ranks of ``process_group``.

    Returns:
        :class:`LossSum`, ``(loss_sum, n_valid)`` in nats and tokens: ``loss_sum`` float32 (float64
        for float64 inputs), differentiable in ``hidden``, ``weight`` and ``bias``. With
        ``monitor``, a :class:`MonitoredLossSum`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`fused_ce`. ``ValueError`` also if the teacher
            has another number of classes, or for ``ce_weight`` or the monitor "correct" without
            labels; ``RuntimeError`` for
            a sharded vocabulary with ``backend="triton"``.

    Note:
        The teacher gets no gradient. The student's are computed in the forward pass, chunk by
        chunk: four products of the head's size, one of them the teacher's. Both heads' logits are
        held for one chunk, in float32.

        The divergence of two nearly equal distributions does not cancel, and it is never negative
        beyond rounding. A class whose logit is -inf for both takes no part; one that is -inf for
        the student alone makes "forward" infinite, and for the teacher alone "reverse".
    """
    task, vocabulary = _asked(
        hidden, weight, teacher_hidden, teacher_weight, labels,
        divergence=divergence, beta=beta, temperature=temperature, ce_weight=ce_weight,
        bias=bias, teacher_bias=teacher_bias, softcap=softcap, teacher_softcap=teacher_softcap,
        logit_scale=logit_scale, teacher_logit_scale=teacher_logit_scale,
        ignore_index=ignore_index, token_weight=token_weight,
        chunk_tokens=chunk_tokens, memory_budget=memory_budget, backend=backend,
        process_group=process_group, tokens_sharded=tokens_sharded, vocab_size=vocab_size,
        monitor=monitor,
    )  # fmt: skip
    out = dispatch.loss_sum(task)[0]
    if not monitor:
        return out
    wanted = Outputs(argmax="correct" in monitor, entropy="entropy" in monitor)
    with torch.no_grad():
        _, values = dispatch.loss_sum(Task(task.problem, wanted), vocabulary.stats_of)
    return MonitoredLossSum.of(out, monitored_sums(task.problem, monitor, values))


def fused_kl_tokens(
    hidden: Tensor,  # (..., H) fp32, bf16, fp16 or fp64
    weight: Tensor,  # (V, H) floats
    teacher_hidden: Tensor,  # (..., H of the teacher)
    teacher_weight: Tensor,  # (V, H of the teacher) dtype of teacher_hidden
    labels: Tensor | None = None,  # (...) int64 or int32
    *,
    divergence: Kind = "forward",
    beta: float = 0.5,
    temperature: float = 1.0,
    ce_weight: float = 0.0,
    bias: Tensor | None = None,  # (V,) floats
    teacher_bias: Tensor | None = None,  # (V,) dtype of teacher_hidden
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    ignore_index: int | None = -100,
    token_weight: Tensor | None = None,  # (...) numbers or bool
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,  # bytes
    backend: str | None = None,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
) -> Tensor:
    """:func:`fused_kl` position by position: ``(...)`` nats, 0 at ignored positions.

    Exact under any upstream gradient: backward computes both heads' logits once more (six products
    of the head's size instead of four) and leaves out positions whose upstream gradient is 0.

    Args, Raises: as :func:`fused_kl`.

    Returns:
        float32 (float64 for float64 inputs), the leading shape of ``hidden``; differentiable in
        ``hidden``, ``weight`` and ``bias``.

    Examples:
        >>> hidden, weight = torch.randn(2, 3, 16), torch.randn(100, 16)
        >>> fused_kl_tokens(hidden, weight, hidden, weight).abs().max()
        tensor(0.)
    """
    task, vocabulary = _asked(
        hidden, weight, teacher_hidden, teacher_weight, labels, reduction="none",
        divergence=divergence, beta=beta, temperature=temperature, ce_weight=ce_weight,
        bias=bias, teacher_bias=teacher_bias, softcap=softcap, teacher_softcap=teacher_softcap,
        logit_scale=logit_scale, teacher_logit_scale=teacher_logit_scale,
        ignore_index=ignore_index, token_weight=token_weight,
        chunk_tokens=chunk_tokens, memory_budget=memory_budget, backend=backend,
        process_group=process_group, tokens_sharded=tokens_sharded, vocab_size=vocab_size,
    )  # fmt: skip
    losses = dispatch.token_losses(task)
    return vocabulary.tokens.own(losses)[0].view(local_of(hidden).shape[:-1])


def _asked(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    labels: Tensor | None = None,
    process_group: Any = None,
    tokens_sharded: bool = False,
    vocab_size: int | None = None,
    reduction: str = "sum",
    divergence: str = "forward",
    monitor: Collection[str] = (),
    **options: Any,
) -> tuple[Task, Vocabulary]:
    """Checked records of the arguments; without labels every position gets a valid one."""
    of_teacher = {name: options.pop(name) for name in Divergence._fields if name in options}
    student = Problem(hidden, weight, cast(Tensor, labels), **options)
    if labels is None and isinstance(hidden, Tensor):
        student = student.replace(labels=no_labels(hidden), ignore_index=None)
    given = Divergence(teacher_hidden, teacher_weight, kind=divergence, **of_teacher)

    asked: dict[str, Any] = {"reduction": reduction}

    def check(here: Problem, shard: bool) -> Divergence:
        check_outputs(monitor, None, here.labels, ("correct", "entropy"))
        if "correct" in monitor and labels is None:
            raise ValueError("labels must be given with monitor 'correct': they are compared")
        asked["monitor"] = ", ".join(sorted(monitor))
        return checked_divergence(here, given.local() if shard else given, labels, shard=shard)

    sharding = process_group, tokens_sharded, vocab_size
    return divergence_task(student, sharding, asked, check)
