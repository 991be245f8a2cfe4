"""What the losses token by token share: their reduction, the temperature, what comes back."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedce.contract.checks import check_number, check_softcap
from fusedce.contract.objective import Stats
from fusedce.contract.problem import Problem
from fusedce.contract.results import TokenStats, TokenStatsAndMean


def check_reduction(reduction: object) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")


def tempered(problem: Problem, temperature: float | Tensor) -> Problem:
    """The problem with its logits divided by a number, or by each token's own.

    ``(c / t) * tanh((s / t) * x / (c / t))`` is ``c * tanh(s * x / c) / t``.
    """
    if isinstance(temperature, Tensor):
        return problem.but(temperature=temperature)
    t = check_number("temperature", temperature)
    if t <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    check_softcap(problem.softcap)
    return problem.but(
        softcap=None if problem.softcap is None else problem.softcap / t,
        logit_scale=check_number("logit_scale", problem.logit_scale) / t,
    )


def of_tokens(
    logprob: Tensor, stats: Stats, tokens: torch.Size, mean_logit: bool
) -> TokenStats | TokenStatsAndMean:
    """Everything but ``logprob`` in the shape of the tokens."""
    assert stats.argmax is not None
    found = TokenStats(logprob, *(x.view(tokens) for x in (stats.entropy, stats.lse, stats.argmax)))
    return TokenStatsAndMean(*found, stats.zmean.view(tokens)) if mean_logit else found
