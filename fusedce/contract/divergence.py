"""Checks of a divergence from a teacher, and its plainest formula."""

from __future__ import annotations

import re

from torch import Tensor

from .checks import (
    check_choice,
    check_device,
    check_number,
    check_problem,
    check_tensor_types,
    check_width,
    flattened,
    with_a_row,
)
from .problem import (
    FORWARD,
    JSD,
    KINDS,
    NEVER,
    REVERSE,
    Divergence,
    Problem,
)


def forward_terms(log_q: Tensor, log_p: Tensor) -> Tensor:
    """``p log(p/q) - p + q`` of each class, never negative; differentiable in ``log_q``.

    It is ``(p + q) * (h * (tanh(h) - 1) + tanh(h))`` with ``h = (log q - log p) / 2``. The sum over
    all classes is ``KL(p || q)``, and near equality it does not cancel. A class with -inf for both
    gives 0.
    """
    log_q, log_p = (x.clamp(min=-NEVER) for x in (log_q, log_p))
    half = (log_q - log_p) / 2
    tanh = half.tanh()
    return (log_p.exp() + log_q.exp()) * (half * (tanh - 1) + tanh)


def checked_divergence(
    problem: Problem, divergence: Divergence, labels: object, *, shard: bool
) -> Divergence:
    """Check, cast and flatten the record beside a checked problem, and detach the teacher.

    ``labels`` are the caller's own, ``None`` included; ``problem`` holds others where there are
    none. ``shard``: the heads may have no rows here.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    kind = divergence.kind
    check_choice("divergence", kind, KINDS)
    beta = check_number("beta", divergence.beta)
    if kind == JSD and beta in (0, 1):  # the limits, as TRL takes them
        kind = REVERSE if beta else FORWARD
    if check_number("ce_weight", divergence.ce_weight) and labels is None:
        raise ValueError("labels must be given with ce_weight: the cross-entropy is of them")
    weight = divergence.teacher_weight
    teacher = Problem(
        divergence.teacher_hidden, weight, problem.labels,
        bias=divergence.teacher_bias, softcap=divergence.teacher_softcap,
        logit_scale=divergence.teacher_logit_scale,
    )  # fmt: skip
    try:
        check_tensor_types(teacher)
        if teacher.hidden.shape[:-1] != problem.hidden.shape[:-1]:
            raise ValueError(
                f"hidden must have the leading shape of the student's, "
                f"{tuple(problem.hidden.shape[:-1])}, got {tuple(teacher.hidden.shape[:-1])}"
            )
        teacher = flattened(check_problem(with_a_row(teacher) if shard else teacher))
    except (TypeError, ValueError) as e:
        named = re.sub(r"\b(hidden|weight|bias|softcap|logit_scale)\b", r"teacher_\1", str(e))
        raise type(e)(named) from None
    V, of_teacher = len(problem.weight), len(weight)
    if of_teacher != V:
        shorter = f"teacher_weight[:{V}]" if of_teacher > V else f"weight[:{of_teacher}]"
        how = f"pass {shorter}, if those are the same classes, the others padding"
        if shard:
            how = "pass this rank's rows of it, of the same classes as those of weight"
        raise ValueError(
            f"teacher_weight must have a row for each of the V={V} classes of weight, got "
            f"{of_teacher}: {how}"
        )
    check_device("teacher_hidden", teacher.hidden, problem.hidden)
    check_width("teacher_hidden", teacher.hidden, problem.hidden)
    return divergence.replace(
        teacher_hidden=teacher.hidden.detach(),
        teacher_weight=teacher.weight[:V].detach(),
        teacher_bias=None if teacher.bias is None else teacher.bias[:V].detach(),
        teacher_softcap=teacher.softcap,
        teacher_logit_scale=teacher.logit_scale,
        kind=kind,
        beta=beta,
        temperature=check_number("temperature", divergence.temperature),
        ce_weight=float(divergence.ce_weight),
    )
