"""Interface of a backend: a module with these functions, for checked problems, in no-grad mode."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from fusedce.backends.gradients import Dtypes
from fusedce.contract.objective import Stats, Upstream
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.task import Task


class Summed(NamedTuple):
    """A sum of losses, or the addends of one, and its gradients."""

    loss: Tensor  # () fp32 or fp64; or (N,), 0 at positions left out
    n_valid: Tensor  # () int64
    factor: Tensor  # () dtype of loss: what the gradients are multiplied by
    d_hidden: Tensor  # (N, H), or (0,) where not wanted; so the others
    d_weight: Tensor
    d_bias: Tensor


class Backend(Protocol):
    """``argmax (N,)`` int64, where given, is filled: with -1 at positions left out."""

    def loss(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """``loss_sum ()`` and ``n_valid ()`` of plain cross-entropy, in one pass."""

    def loss_and_grads(self, task: Task, argmax: Tensor | None) -> Summed:
        """The sum and its wanted gradients, without label smoothing and without shards."""

    def token_stats(self, problem: Problem, wanted: Wanted, argmax: Tensor | None) -> Stats:
        """Statistics of every token, in one pass; with ``argmax`` the largest logit as well."""

    def token_grads(
        self,
        problem: Problem,
        wanted: Wanted,
        lse: Tensor,  # (N,)
        upstream: Upstream,
        dtypes: Dtypes,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients with factors of each token's own, from logits computed anew."""

    def divergence_and_grads(self, task: Task) -> Summed:
        """``(N,)`` losses beside a teacher, or beside given probabilities; as above."""

    def scale_(self, x: Tensor, factor: Tensor) -> None:
        """``x *= factor`` in place, ``factor`` a 0-d tensor; nothing is written where it is 1."""
