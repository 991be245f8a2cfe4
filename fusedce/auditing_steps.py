"""Audited optimizer steps in numbers, in words and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_TOLERANCE = 0.01  # weights that differ by less are the same: bf16 gradients are rounded


@dataclass
class Step:
    """One optimizer step, over the micro-batches of all ranks.

    Attributes:
        n_tokens: trained tokens; ``loss``: their mean, nats per token.
        descended: the loss whose gradient this was: ``sum of weight * loss`` over tokens.
        logged: what the loop logged, where :meth:`Audit.log` was told.
        scale: the mean weight of a token over the right one; 1 is right.
        spread: the largest weight of a micro-batch's tokens over the smallest; 1 is right.
        averaged: whether each micro-batch weighs the same, however many tokens it has.
    """

    n_tokens: int
    loss: float
    descended: float
    logged: float | None
    scale: float
    spread: float
    averaged: bool


@dataclass
class MicroBatch:
    loss_sum: float
    n_tokens: int
    weight: float  # of a token, in the gradient of this rank


def step_of(micro: list[MicroBatch], averaged_over: int, logged: float | None) -> Step:
    n = sum(m.n_tokens for m in micro)
    weights = [m.weight / averaged_over * n for m in micro]  # 1 where all is right
    shares = [w * m.n_tokens for w, m in zip(weights, micro, strict=True)]
    least = min(weights)
    return Step(
        n_tokens=n,
        loss=sum(m.loss_sum for m in micro) / n,
        descended=sum(m.weight * m.loss_sum for m in micro) / averaged_over,
        logged=logged,
        scale=sum(shares) / n,
        spread=max(weights) / least if least > 0 else math.inf,
        averaged=max(shares) - min(shares) <= _TOLERANCE * max(shares),
    )


def _off(a: float, b: float) -> bool:
    return abs(a - b) > _TOLERANCE * max(abs(b), 1e-3)


def verdict(steps: Sequence[Step]) -> str:
    """In a sentence, what the loop does."""
    if not steps:
        return "no optimizer step was seen: does the optimizer hold the model's parameters?"
    spread = max(step.spread for step in steps)
    scale = sum(step.scale for step in steps) / len(steps)
    found = []
    if spread > 1 + _TOLERANCE:
        uneven = [step for step in steps if step.spread > 1 + _TOLERANCE]
        why = (
            "your micro-batches are averaged"
            if all(step.averaged for step in uneven)
            else "tokens of one step weigh differently"
        )
        found.append(f"{why}: tokens of short ones weigh up to {spread:.1f} x more")
    if abs(scale - 1) > _TOLERANCE:
        found.append(f"gradients are {scale:.3g} x those of the mean over the step's tokens")
    off = [s for s in steps if s.logged is not None and _off(s.logged, s.loss)]
    if off:
        step = max(off, key=lambda s: abs((s.logged or 0) - s.loss))
        found.append(
            f"the loss that is logged is not that of the tokens ({step.logged:.4f} for "
            f"{step.loss:.4f})"
        )
    return "; ".join(found) or (
        "every token weighs the same, and the gradient is that of the mean over all tokens"
    )


def table(steps: Sequence[Step]) -> list[str]:
    """A line for each step, in Markdown."""
    lines = [
        "| step | tokens | true loss | descended | logged | gradient's scale | spread |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for i, s in enumerate(steps):
        logged = "" if s.logged is None else f"{s.logged:.4f}"
        lines.append(
            f"| {i} | {s.n_tokens} | {s.loss:.4f} | {s.descended:.4f} | {logged} | "
            f"{s.scale:.3f} | {s.spread:.2f} |"
        )
    return lines
