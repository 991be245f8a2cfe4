"""The weight of each token in an optimizer step, and what a loop's steps have optimised.

A token's weight is told from the gradient of its logits (:func:`micro_batch_of`). The weights
of a step's micro-batches on all ranks say which loss it descended (:func:`step_of`); a verdict and
a table say so in words (:func:`verdict`, :func:`table`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS = 128  # positions whose logits are read together
_SMOOTHED = 1e-3  # the least label smoothing that differs from rounding
_TOLERANCE = 0.01  # weights that differ by less are the same: bf16 gradients are rounded
_CERTAIN, _UNEVEN = 0.01, 0.1  # the same for one token, whose label has a probability below 0.99


@dataclass
class Step:
    """One optimizer step, over the micro-batches of all ranks.

    Attributes:
        n_tokens: trained tokens; ``loss``: their mean, nats per token.
        descended: the loss whose gradient this was: ``sum of weight * loss`` over tokens.
        logged: the loss that the loop logged, if :meth:`Audit.log` was called.
        scale: the mean weight of a token over the right one; 1 is right.
        spread: the largest weight of a micro-batch's tokens over the smallest; 1 is right.
        averaged: whether each micro-batch weighs the same, however many tokens it has.
        lost: micro-batches whose gradients were set to zero before the step.
        afterwards: by how much ``.grad`` grew between the last backward and the step.
        even: whether the tokens of each micro-batch weigh the same; else ``scale`` and ``spread``
            are those of means.
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
    even: bool = True


@dataclass
class MicroBatch:
    """A micro-batch of this rank.

    Attributes:
        loss_sum: nats, of ``n_tokens`` trained tokens.
        weight: the mean weight of a token in the gradient of this rank.
        even: whether all tokens have this weight, as far as it is known.
    """

    loss_sum: float
    n_tokens: int
    weight: float
    even: bool = True


def micro_batch_of(logits: Tensor, grad: Tensor) -> MicroBatch:
    """The losses and weights of the trained tokens, from logits and gradient ``(..., V)``.

    A row's gradient is ``w * (softmax - target)``. Beside the label, the target is one number: 0,
    or what label smoothing puts there. So ``w`` is the slope of the gradient over the
    probabilities of the other classes; without smoothing, its entry at the label tells ``w`` best.
    """
    found = []
    rows = zip(logits.flatten(0, -2).split(_ROWS), grad.flatten(0, -2).split(_ROWS), strict=True)
    for z, g in rows:
        trained = g.min(-1).values < 0
        g, logprobs = g[trained].double(), torch.log_softmax(z[trained].double(), -1)
        labels = g.argmin(-1, keepdim=True)
        others = torch.ones_like(g, dtype=torch.bool).scatter_(-1, labels, False)
        slope, offset = _line(logprobs.exp(), g, others)
        of_label = logprobs.gather(-1, labels)[:, 0]
        gap = -torch.expm1(of_label)
        smooth = -offset * g.shape[-1] > _SMOOTHED * slope.clamp(min=0)
        weight = torch.where(smooth, slope, -g.gather(-1, labels)[:, 0] / gap)
        target = logprobs.exp() - g / weight[:, None]
        loss = torch.where(smooth, -(target * logprobs).sum(-1), -of_label)
        found.append(torch.stack([gap, weight, loss])[:, gap > 0])
    gap, weight, loss = torch.cat(found, -1).unbind()
    mean = float((weight * gap).sum() / gap.sum()) if len(gap) else 0.0
    # The weight of a token whose label is nearly certain is a quotient of rounding errors.
    off = (weight - mean).abs()[gap > _CERTAIN] > _UNEVEN * abs(mean)
    return MicroBatch(float(loss.sum()), len(loss), mean, not bool(off.any()))


def _line(x: Tensor, y: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and offset ``(rows,)`` of the least-squares line through ``y`` over ``x (rows, V)``."""
    n = where.sum(-1)
    mean_x, mean_y = ((v * where).sum(-1) / n for v in (x, y))
    dx, dy = ((v - m[:, None]) * where for v, m in ((x, mean_x), (y, mean_y)))
    slope = (dx * dy).sum(-1) / dx.square().sum(-1)
    return slope, mean_y - slope * mean_x


def step_of(micro: list[MicroBatch], averaged_over: int, logged: float | None) -> Step:
    """The step of these micro-batches, whose gradients ``averaged_over`` ranks have averaged."""
    n = sum(m.n_tokens for m in micro)
    weights = [m.weight / averaged_over * n for m in micro]  # 1 if the loop is right
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
        even=all(m.even for m in micro),
    )


def verdict(steps: Sequence[Step], unseen: int = 0) -> str:
    """Say in one sentence what the loop does to the weight of tokens.

    Args:
        steps: those of whose micro-batches the model's forward has returned the loss.
        unseen: optimizer steps without such a micro-batch.
    """
    if not steps and unseen:
        return (
            f"{unseen} optimizer steps were made, but the model itself was never called with "
            f"gradients: a loop that calls fused_ce by hand needs a module whose forward returns "
            f"its LossSum, and the audit needs that module"
        )
    if not steps:
        return "no optimizer step was made: does the optimizer hold the model's parameters?"
    if lost := sum(step.lost for step in steps):
        return (
            f"zero_grad was called before the optimizer step: the gradients of {lost} "
            f"micro-batches were lost"
        )
    if not all(step.even for step in steps):
        return (
            "tokens of one micro-batch weigh differently (weights of classes or of tokens?): the "
            "audit compares micro-batches whose tokens weigh the same"
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
    logged = [(s.logged, s.loss) for s in steps if s.logged is not None]
    off = [(a, b) for a, b in logged if abs(a - b) > _TOLERANCE * max(abs(b), 1e-3)]
    if off:
        said, right = max(off, key=lambda x: abs(x[0] - x[1]))
        found.append(
            f"the loss that is logged is not that of the tokens ({said:.4f} where {right:.4f} is "
            f"right)"
        )
    return "; ".join(found) or (
        "every token weighs the same, and the gradient is that of the mean over all tokens"
    )


def table(steps: Sequence[Step]) -> list[str]:
    """A Markdown table with a line for each step."""
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
