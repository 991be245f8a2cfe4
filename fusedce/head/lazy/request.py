"""A call of ``F.cross_entropy`` on logits, as the fused loss computes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fusedce.contract.denominator import Factor, expected, expecting
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import LossSum
from fusedce.head.items import expected_of_sum
from fusedce.head.lazy.logits import LazyLogits
from fusedce.head.lazy.steps import Projected, Steps, as_options
from fusedce.head.recipe import Recipe, as_they_are
from fusedce.head.tap import LossTap
from fusedce.loss.cross_entropy import fused_cross_entropy
from fusedce.loss.fused_ce import SumApart, ce_apart, checked_ce


class Request(NamedTuple):
    """A call of ``F.cross_entropy``, and what its mean is divided by instead of its own count."""

    target: Tensor
    weight: Tensor | None
    ignore_index: int
    reduction: Literal["none", "mean", "sum"]
    label_smoothing: float
    denominator: Tensor | None
    memory_budget: int | None  # bytes

    def gradient_of_real(self, logits: Tensor, upstream: Tensor) -> Tensor:
        """What the gradient of real logits is, in float32 or better::

            (p * (a + s * sum(w)) - a * onehot - s * w) / denominator

        with ``p`` the softmax, ``w`` the class weights, ``s`` the smoothing of one class and ``a``
        what is left for the label, times its weight. In words, for this is asked below autograd.
        """
        dim = 1 if logits.dim() > 1 else 0
        z = logits.movedim(dim, -1)
        z = z if z.dtype == torch.float64 else z.float()
        V = z.shape[-1]
        valid = self.target.ne(self.ignore_index)
        y = self.target.long().masked_fill(~valid, 0)
        w = torch.ones(V, dtype=z.dtype, device=z.device)
        w = w if self.weight is None else self.weight.to(z.dtype)
        share = self.label_smoothing / V
        label = (1 - self.label_smoothing) * w[y]
        grad = z.softmax(-1).mul_((label + share * w.sum())[..., None]).sub_(share * w)
        grad.scatter_add_(-1, y[..., None], -label[..., None])
        factor = upstream.to(z.dtype)
        if self.reduction == "mean":
            chosen = torch.where(valid, w[y], 0).sum()
            over = chosen if self.weight is not None else self.over(valid.sum())
            factor = factor / over
        grad = torch.where(valid[..., None], grad * factor[..., None], 0)
        return grad.movedim(-1, dim)

    def over(self, n_valid: Tensor) -> Tensor:
        return n_valid.clamp(min=1) if self.denominator is None else self.denominator

    def _expecting(self) -> AbstractContextManager[None]:
        if torch.compiler.is_compiling():
            return nullcontext()
        factor = self._expected()
        return nullcontext() if factor is expected() else expecting(factor)

    def _expected(self) -> Factor | Callable[[], Factor]:
        """What backward will multiply the sum by, as far as is known; ``None`` for a mean."""
        if self.reduction == "mean":
            return None if self.denominator is None else self.denominator.reciprocal()
        told = expected_of_sum()
        return expected() if told is None else told

    def problem(self, p: Projected, recipe: Recipe) -> Problem:
        """What the fused loss is asked, checked by being asked of logits."""
        with as_they_are(p.hidden.device):
            rows, weight, bias = recipe.operands(p.hidden)
            if p.bias is not None:
                bias = p.bias if bias is None else bias + p.bias
            if p.classes != slice(0, weight.shape[0]):
                weight = weight[p.classes]
                bias = None if bias is None else bias[p.classes]
            if p.factor is not None:
                rows = (rows * p.factor).to(rows.dtype)
                bias = None if bias is None else (bias * p.factor).to(bias.dtype)
            target = self.target
            if rows.dim() != 2:  # each view has a node of autograd
                rows, target = rows.reshape(-1, rows.shape[-1]), target.reshape(-1)
            return Problem(
                rows,
                weight,
                target,
                bias=bias,
                ignore_index=self.ignore_index,
                softcap=p.cap,
                logit_scale=p.scale,
                label_smoothing=float(self.label_smoothing),
                memory_budget=self.memory_budget,
            )

    def fused(self, p: Projected, recipe: Recipe) -> Tensor:
        """The same without logits."""
        problem = self.problem(p, recipe)
        with as_they_are(p.hidden.device):
            if self.weight is not None or self.reduction == "none":
                loss = fused_cross_entropy(
                    problem.hidden,
                    problem.weight,
                    problem.labels,
                    bias=problem.bias,
                    ignore_index=self.ignore_index,
                    logit_scale=p.scale,
                    softcap=p.cap,
                    label_smoothing=self.label_smoothing,
                    class_weight=self.weight,
                    reduction=self.reduction,
                    memory_budget=self.memory_budget,
                )
                return loss.view(self.target.shape) if self.reduction == "none" else loss
            tap = LossTap.current
            monitor = () if tap is None else tap.monitor
            with self._expecting():
                out = checked_ce(problem, monitor)
            if tap is not None:
                tap.see(out, self.reduction)
            return self.reduced(*out)

    def apart(self, p: Projected, recipe: Recipe, wanted: Wanted) -> SumApart | None:
        """The sum of the same with its gradients, where it has them without a graph."""
        tap = LossTap.current
        if self.weight is not None or self.reduction == "none":
            return None
        if tap is not None and tap.monitor:
            return None
        problem = self.problem(p, recipe)
        with as_they_are(p.hidden.device), self._expecting():
            found = ce_apart(problem, wanted)
        if tap is not None and found is not None:
            tap.see(LossSum(found.loss_sum, found.n_valid), self.reduction)
        return found

    def reduced(self, loss_sum: Tensor, n_valid: Tensor) -> Tensor:
        return loss_sum if self.reduction == "sum" else loss_sum / self.over(n_valid)


def request_of(
    p_shape: torch.Size,
    device: torch.device,
    memory_budget: int | None,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
) -> Request | None:
    """The call as the fused loss takes it; ``None`` where it does not.

    ``p_shape``: that of the labels it would take.
    """
    if (
        size_average is not None
        or reduce is not None
        or reduction not in ("mean", "sum", "none")
        or not isinstance(target, Tensor)
        or type(target) is LazyLogits
        or target.dtype not in (torch.int64, torch.int32)
        or target.shape != p_shape
        or target.device != device
        or not 0 <= label_smoothing <= 1
        or (weight is not None and weight.dtype == torch.float64)
    ):
        return None
    tap = LossTap.current
    denominator = None if tap is None else tap.denominator
    return Request(
        target, weight, ignore_index, reduction, label_smoothing, denominator, memory_budget
    )


def project(hidden: Tensor, V: int, steps: Steps) -> Projected | None:
    """Logits after these steps, if the fused loss can take them as those of its classes."""
    p: Projected | None = Projected(hidden, hidden.dim() - 1, slice(0, V))
    for step in steps:
        p = None if p is None else step.fuse(p)
    if p is None or p.class_dim != (1 if p.hidden.dim() > 1 else 0):
        return None
    return as_options(p)
