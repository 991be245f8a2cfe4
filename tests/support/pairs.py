"""A student and a teacher, for divergences."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

EVERYTHING = {
    "temperature": 1.7, "softcap": 5.0, "teacher_softcap": 8.0, "logit_scale": 0.7,
    "teacher_logit_scale": -1.3, "ce_weight": 0.4, "beta": 0.3,
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A student and a teacher, described by numbers so that a failure can be read and replayed.

    Attributes:
        N, H, teacher_H, V: positions, hidden sizes, vocabulary size.
        dtype, teacher_dtype: of each head; ``None``: the student's.
        ignored: share of ignored labels, 0 to 1; both hidden states hold NaN there.
        spread: standard deviation of the logits.
        bias, token_weight: give these to the loss; weights have both signs, and some are 0.
        options: further keyword arguments of the loss.
        seed: of the random numbers.
    """

    N: int = 9
    H: int = 12
    teacher_H: int = 20
    V: int = 131
    dtype: torch.dtype = torch.float32
    teacher_dtype: torch.dtype | None = None
    ignored: float = 0.0
    spread: float = 1.0
    bias: bool = False
    token_weight: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def tensors(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """``(hidden, weight, teacher_hidden, teacher_weight, labels)`` and keyword arguments."""
        rng = torch.Generator().manual_seed(self.seed)
        of_teacher = self.teacher_dtype or self.dtype

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng)

        hidden = draw(self.N, self.H) * self.spread / self.H**0.5
        there = draw(self.N, self.teacher_H) * self.spread / self.teacher_H**0.5
        labels = torch.randint(self.V, (self.N,), generator=rng)
        ignored = torch.rand(self.N, generator=rng) < self.ignored
        labels[ignored] = -100
        hidden[ignored] = there[ignored] = math.nan
        options = dict(self.options)
        if self.bias:
            options["bias"] = draw(self.V).to(self.dtype)
            options["teacher_bias"] = draw(self.V).to(of_teacher)
        if self.token_weight:
            options["token_weight"] = draw(self.N) * (torch.rand(self.N, generator=rng) < 0.7)
        tensors = (
            hidden.to(self.dtype),
            draw(self.V, self.H).to(self.dtype),
            there.to(of_teacher),
            draw(self.V, self.teacher_H).to(of_teacher),
            labels,
        )
        return tensors, options
