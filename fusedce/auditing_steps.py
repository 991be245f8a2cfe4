"""Audited optimizer steps in numbers, in words and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_ROUNDS = 50  # of least squares
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
        lost: micro-batches whose gradients were set to zero before the step.
        afterwards: what ``.grad`` was multiplied by between the last backward and the step.

    With class weights all of these are sums of them, where "tokens" stand for a count.
    """

    n_tokens: int
    loss: float
    descended: float
    logged: float | None
    scale: float
    spread: float
    averaged: bool
    lost: int = 0
    afterwards: float = 1.0


class Token(NamedTuple):
    label: int
    weight: float  # in the gradient of this rank
    loss: float


@dataclass
class MicroBatch:
    loss_sum: float
    n_tokens: float
    weight: float  # of a token, in the gradient of this rank
    tokens: list[Token] = field(default_factory=list)  # where logits have told

    @classmethod
    def of(cls, tokens: list[Token]) -> MicroBatch:
        n = len(tokens)
        weight = sum(t.weight for t in tokens) / n if n else 0.0
        return cls(sum(t.loss for t in tokens), n, weight, tokens)

    def multiply(self, factor: float) -> None:
        self.weight *= factor
        self.tokens = [t._replace(weight=t.weight * factor) for t in self.tokens]


def _without_class_weights(micro: list[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches whose tokens are counted by the weight of their class, if that explains theirs.

    A token's weight is then that of its micro-batch times that of its class: both are found by
    least squares of logarithms, in turn. Micro-batches without a common class tell nothing of each
    other, and pass for equal.
    """
    tokens = [t for m in micro for t in m.tokens]
    even = all(abs(t.weight - m.weight) <= _TOLERANCE * m.weight for m in micro for t in m.tokens)
    if even or len(tokens) != sum(m.n_tokens for m in micro) or min(tokens, key=_w).weight <= 0:
        return micro
    of_micro, of_class = [0.0] * len(micro), dict.fromkeys((t.label for t in tokens), 0.0)
    for _ in range(_ROUNDS):
        found: dict[int, list[float]] = {label: [] for label in of_class}
        for a, m in zip(of_micro, micro, strict=True):
            for t in m.tokens:
                found[t.label].append(math.log(t.weight) - a)
        of_class = {label: sum(x) / len(x) for label, x in found.items()}
        of_micro = [
            sum(math.log(t.weight) - of_class[t.label] for t in m.tokens) / len(m.tokens)
            for m in micro
        ]
    for a, m in zip(of_micro, micro, strict=True):
        if any(abs(math.log(t.weight) - a - of_class[t.label]) > _TOLERANCE for t in m.tokens):
            return micro
    weights = {label: math.exp(x) for label, x in of_class.items()}
    return [
        MicroBatch(
            sum(weights[t.label] * t.loss for t in m.tokens),
            sum(weights[t.label] for t in m.tokens),
            math.exp(a),
        )
        for a, m in zip(of_micro, micro, strict=True)
    ]


def _w(token: Token) -> float:
    return token.weight


def step_of(micro: list[MicroBatch], averaged_over: int, logged: float | None) -> Step:
    n_tokens = int(sum(m.n_tokens for m in micro))
    micro = _without_class_weights(micro)
    n = sum(m.n_tokens for m in micro)
    weights = [m.weight / averaged_over * n for m in micro]  # 1 where all is right
    shares = [w * m.n_tokens for w, m in zip(weights, micro, strict=True)]
    least = min(weights)
    return Step(
        n_tokens=n_tokens,
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
    if lost := sum(step.lost for step in steps):
        return (
            f"zero_grad was called between the micro-batches of a step: the gradients of {lost} of "
            f"them were lost"
        )
    spread = max(step.spread for step in steps)
    scale = sum(step.scale for step in steps) / len(steps)
    stepped = sum(step.scale * step.afterwards for step in steps) / len(steps)
    found = []
    if spread > 1 + _TOLERANCE:
        uneven = [step for step in steps if step.spread > 1 + _TOLERANCE]
        why = (
            "your micro-batches are averaged"
            if all(step.averaged for step in uneven)
            else "tokens of one step weigh differently"
        )
        found.append(f"{why}: tokens of short ones weigh up to {spread:.1f} x more")
    # A factor on .grad that does not lead to 1 may be that of clipping.
    if abs(scale - 1) > _TOLERANCE and abs(stepped - 1) > _TOLERANCE:
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
