"""The record of a loss's inputs and options, from the public functions down to the kernels.

Its fields, in order, are the arguments of the ``torch.library`` operators: each of them begins
with ``Problem(*arguments[: len(Problem._fields)])``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of logits, losses and sums for inputs of ``dtype``: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Problem(NamedTuple):
    """Inputs and options of a loss.

    Public functions fill it with their arguments; :func:`fusedce.contract.checks.checked` turns
    these into what every other layer relies on: flattened, cast, in range. Methods stand in for
    properties and ``_replace``, which torch.compile before 2.9 cannot trace.
    """

    hidden: Tensor  # (N, H) fp32, bf16, fp16 or fp64
    weight: Tensor  # (V, H)
    labels: Tensor  # (N,) int64 or int32
    bias: Tensor | None = None  # (V,)
    token_weight: Tensor | None = None  # (N,) fp32 or fp64
    class_weight: Tensor | None = None  # (V,) fp32 or fp64
    temperature: Tensor | None = None  # (N,) fp32 or fp64: divisor of the logits
    expected_upstream: Tensor | None = None  # () fp32 or fp64: factor that backward will bring
    ignore_index: int | None = -100  # None: no label is ignored; an int once checked
    softcap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None
    memory_budget: int | None = None  # bytes beside inputs and gradients
    backend: str | None = None

    def but(self, **changes: Any) -> Problem:
        """The problem with other values in some fields."""
        return Problem(**{**dict(zip(Problem._fields, self, strict=True)), **changes})

    def valid(self) -> Tensor:
        """``(N,)`` bool: tokens with a label to predict."""
        return self.labels.ne(cast(int, self.ignore_index))

    def plain(self) -> bool:
        """Whether the loss is unweighted cross-entropy without further terms."""
        unweighted = self.token_weight is None and self.class_weight is None
        return self.of_nll_alone() and unweighted

    def of_nll_alone(self) -> bool:
        """Whether a token's loss is its label's ``nll``, times weights: no other statistic."""
        return not (self.label_smoothing or self.z_loss)

    def rows(self, chosen: Tensor | slice) -> Problem:
        """The problem with the weights of the tokens ``chosen``, for their part of the loss."""
        if self.token_weight is None:
            return self
        return self.but(token_weight=self.token_weight[chosen])


NUMBERS = tuple(
    name for name, hint in get_type_hints(Problem).items() if hint in (float, float | None)
)
"""Names of numeric options, which are checked, cast and compared between ranks by this list."""
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
FINITE = (-_HUGE, _HUGE, "finite and in the range of float32")
RANGES = {
    "softcap": (_TINY, _HUGE, "None (no cap), or positive and in the range of float32"),
    "label_smoothing": (0, 1, "in [0, 1]"),
    "beta": (0, 1, "in [0, 1]"),
    "temperature": (1e-30, _HUGE, "positive, at least 1e-30 and finite in float32"),
    "denominator": (0, _HUGE, "at least 0 and finite"),
}
"""Least and largest value of numeric arguments, in words too; of others it is `FINITE`."""


class Wanted(NamedTuple):
    """Results to compute beside the loss: gradients of the inputs, statistics of the tokens."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lse: bool = False
    entropy: bool = False
    zmean: bool = False
    argmax: bool = False

    def but(self, **changes: bool) -> Wanted:
        """The record with other values in some fields."""
        return Wanted(**{**dict(zip(Wanted._fields, self, strict=True)), **changes})

    def gradients(self) -> tuple[bool, bool, bool]:
        """Whether the gradients of hidden, weight and bias are wanted."""
        return self.hidden, self.weight, self.bias


class Projection(NamedTuple):
    """Logits ``z = scale * (hidden @ weight.T + bias)``, capped to ``softcap * tanh(z / softcap)``.

    Products of the inputs are exact, and are summed in ``acc``.
    """

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, problem: Problem) -> Projection:
        """The projection of a problem."""
        return cls(problem.weight, problem.bias, problem.logit_scale, problem.softcap)

    @property
    def acc(self) -> torch.dtype:
        """Dtype of logits and sums."""
        return acc_dtype(self.weight.dtype)

    def slope(self, z: Tensor) -> Tensor | None:
        """Derivative of capped logits ``z`` by those before the cap; ``None`` without a cap."""
        return None if self.softcap is None else 1 - (z / self.softcap).square_()
