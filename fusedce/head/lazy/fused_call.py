"""Arguments of an ``F.cross_entropy`` call on logits, and its loss by the fused functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fusedce.contract.denominator import Factor, expected, expecting
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import LossSum
from fusedce.head.expected_items import expected_factor
from fusedce.head.lazy.logits import LazyLogits
from fusedce.head.lazy.steps import LogitsSteps, Projected, as_options
from fusedce.head.loss_observer import LossObserver
from fusedce.head.recipe import Recipe, memory_budget_of_head, no_autocast
from fusedce.loss.cross_entropy import fused_cross_entropy
from fusedce.loss.fused_ce import SumApart, ce_apart, checked_ce, sharded_loss_sum
from fusedce.loss.sharded import reduced


class FusedCall(NamedTuple):
    """Arguments of a call of ``F.cross_entropy``.

    ``denominator ()``, in tokens, replaces the count by which ``reduction="mean"`` divides.
    """

    target: Tensor  # int64 or int32, the shape of the logits without the classes
    weight: Tensor | None  # (V,)
    ignore_index: int
    reduction: Literal["none", "mean", "sum"]
    label_smoothing: float
    denominator: Tensor | None
    memory_budget: int | None  # bytes

    def gradient_of_real(self, logits: Tensor, upstream: Tensor) -> Tensor:
        """The gradient of real logits, in float32 or better::

            (p * (a + s * sum(w)) - a * onehot - s * w) / denominator

        with ``p`` the softmax, ``w`` the class weights, ``s`` the smoothing of one class and ``a``
        the remaining weight of the label. It is spelled out because it runs below autograd.
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
            weights = torch.where(valid, w[y], 0).sum()
            over = weights if self.weight is not None else self.over(valid.sum())
            factor = factor / over
        grad = torch.where(valid[..., None], grad * factor[..., None], 0)
        return grad.movedim(-1, dim)

    def over(self, n_valid: Tensor) -> Tensor:
        """The denominator of a mean, ``()`` in tokens."""
        return n_valid.clamp(min=1) if self.denominator is None else self.denominator

    def _expecting(self) -> AbstractContextManager[None]:
        if torch.compiler.is_compiling():
            return nullcontext()
        factor = self._expected()
        return nullcontext() if factor is expected() else expecting(factor)

    def _expected(self) -> Factor | Callable[[], Factor]:
        """Expected upstream gradient of the loss sum; ``None`` for a mean over its own tokens."""
        if self.reduction == "mean":
            return None if self.denominator is None else self.denominator.reciprocal()
        factor = expected_factor()
        return expected() if factor is None else factor

    def problem(self, p: Projected, recipe: Recipe) -> Problem:
        """The record for the fused loss; the arguments were checked with those of the logits."""
        with no_autocast(p.hidden.device):
            rows, weight, bias = recipe.operands(p.hidden)
            if p.bias is not None:
                bias = p.bias if bias is None else bias + p.bias
            if p.classes != slice(0, weight.shape[0]) and not recipe.has_sharded_vocabulary():
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
        """The loss without logits: ``()``, or per token in the shape of the labels."""
        problem = self.problem(p, recipe)
        with no_autocast(p.hidden.device):
            sharded = recipe.has_sharded_vocabulary()
            if sharded and (self.weight is not None or self.reduction == "none"):
                asked = problem.but(class_weight=self.weight)
                loss = reduced(asked, self.reduction, None, vocab_size=p.classes.stop)
                return loss.view(self.target.shape) if self.reduction == "none" else loss
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
            observer = LossObserver.current
            monitor = () if observer is None else observer.monitor
            with self._expecting():
                if sharded:
                    out = sharded_loss_sum(problem, monitor=monitor, vocab_size=p.classes.stop)
                else:
                    out = checked_ce(problem, monitor)
            if observer is not None:
                observer.observe(out, self.reduction)
            return self.reduced(*out)

    def with_grads(self, p: Projected, recipe: Recipe, wanted: Wanted) -> SumApart | None:
        """The loss sum with its gradients; ``None`` if they need a graph."""
        observer = LossObserver.current
        if self.weight is not None or self.reduction == "none" or recipe.has_sharded_vocabulary():
            return None
        if observer is not None and observer.monitor:
            return None
        problem = self.problem(p, recipe)
        with no_autocast(p.hidden.device), self._expecting():
            found = ce_apart(problem, wanted)
        if observer is not None and found is not None:
            observer.observe(LossSum(found.loss_sum, found.n_valid), self.reduction)
        return found

    def reduced(self, loss_sum: Tensor, n_valid: Tensor) -> Tensor:
        """The sum, or the mean if the call asks for it."""
        return loss_sum if self.reduction == "sum" else loss_sum / self.over(n_valid)


def fused_call_of(
    module: nn.Module,
    hidden: Tensor,
    V: int,
    steps: LogitsSteps,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Projected, FusedCall] | None:
    """The operands and the arguments of a loss; ``None`` if the fused loss does not support them.

    Args:
        module: the head, whose memory budget holds for the loss.
        hidden: ``(..., H)``, the head's input.
        V: number of classes of the head.
        steps: the steps from the head's logits to those of the loss.
        target, weight, ...: arguments of ``F.cross_entropy``.
    """
    p = _project(hidden, V, steps)
    if (
        p is None
        or size_average is not None
        or reduce is not None
        or reduction not in ("mean", "sum", "none")
        or not isinstance(target, Tensor)
        or type(target) is LazyLogits
        or target.dtype not in (torch.int64, torch.int32)
        or target.shape != p.hidden.shape[:-1]
        or target.device != hidden.device
        or not 0 <= label_smoothing <= 1
        or (weight is not None and weight.dtype == torch.float64)
    ):
        return None
    observer = LossObserver.current
    denominator = None if observer is None else observer.denominator
    budget = memory_budget_of_head(module)
    return p, FusedCall(
        target, weight, ignore_index, reduction, label_smoothing, denominator, budget
    )


def _project(hidden: Tensor, V: int, steps: LogitsSteps) -> Projected | None:
    """Operands of the logits after these steps; ``None`` if the fused loss lacks one of them."""
    p: Projected | None = Projected(hidden, hidden.dim() - 1, slice(0, V))
    for step in steps:
        p = None if p is None else step.fuse(p)
    if p is None or p.class_dim != (1 if p.hidden.dim() > 1 else 0):
        return None
    return as_options(p)
