"""``F.cross_entropy`` of lazy logits: one function of them, computed by the fused loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Variable

from fusedce.contract.checks import autocast_dtype
from fusedce.contract.denominator import Factor, expected, expecting
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import LossSum
from fusedce.head.call import HeadCall
from fusedce.head.items import expected_of_sum
from fusedce.head.lazy.grad import LogitsGrad, Source, Term
from fusedce.head.lazy.logits import LazyLogits, Memory, intercept
from fusedce.head.lazy.steps import Bias, Projected, Steps, as_options
from fusedce.head.recipe import Recipe, as_they_are
from fusedce.head.tap import LossTap
from fusedce.loss.cross_entropy import fused_cross_entropy
from fusedce.loss.fused_ce import SumApart, ce_apart, checked_ce

_ENGINE = Variable._execution_engine


class Request(NamedTuple):
    """A call of ``F.cross_entropy``, and what its mean is divided by instead of its own count."""

    target: Tensor
    weight: Tensor | None
    ignore_index: int
    reduction: Literal["none", "mean", "sum"]
    label_smoothing: float
    denominator: Tensor | None

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
    return Request(target, weight, ignore_index, reduction, label_smoothing, denominator)


def project(hidden: Tensor, V: int, steps: Steps) -> Projected | None:
    """Logits after these steps, if the fused loss can take them as those of its classes."""
    p: Projected | None = Projected(hidden, hidden.dim() - 1, slice(0, V))
    for step in steps:
        p = None if p is None else step.fuse(p)
    if p is None or p.class_dim != (1 if p.hidden.dim() > 1 else 0):
        return None
    return as_options(p)


class Plan(NamedTuple):
    """A loss that can be fused, with the beginning of its graph."""

    call: HeadCall
    request: Request
    p: Projected
    hidden: Tensor
    tensors: list[Tensor]
    bias: Tensor | None  # what was added to the logits
    steps: Steps
    dtype: torch.dtype | None  # of the loss; None: as it comes

    def of_dtype(self, loss: Tensor) -> Tensor:
        return loss if self.dtype is None or self.dtype == loss.dtype else loss.to(self.dtype)

    def compute(self) -> Tensor:
        return self.of_dtype(self.request.fused(self.p, self.call.recipe.of(self.tensors)))


class Graph:
    """A loss whose gradients a graph of its own gives."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.loss = plan, plan.compute()
        self.saved: tuple[Tensor, ...] = ()

    def result(self) -> Tensor:
        return self.loss.detach()

    def gradients(self, saved: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Those of the hidden state, the parameters and what was added to the logits."""
        every = (self.plan.hidden, *self.plan.tensors, self.plan.bias)
        inputs = tuple([x for x in every if x is not None and x.requires_grad])
        if not inputs:
            return [None for _ in every]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        # torch.autograd.grad without its checks: inputs whose gradients it returns
        args = (self.loss,), (upstream,), keep, False, inputs, True, False
        found = iter(_ENGINE.run_backward(*args))
        return [next(found) if x is not None and x.requires_grad else None for x in every]


class Apart:
    """A loss of the head's own operands: its gradients are there, and no graph has to lead to them.

    So it is where nothing was done to the hidden state but reshaping, and nothing to the weight.
    """

    def __init__(self, plan: Plan, found: SumApart) -> None:
        self.plan, self.saved = plan, found.saved
        self.found = found._replace(saved=())

    @staticmethod
    def of(plan: Plan) -> Apart | None:
        call, p, hidden = plan.call, plan.p, plan.hidden
        if call.recipe.adapters or p.bias is not None or p.factor is not None:
            return None
        if p.classes != slice(0, call.V) or any(x.dtype != hidden.dtype for x in plan.tensors):
            return None
        if p.hidden is not hidden and not _is_same_rows(p.hidden, hidden):
            return None
        found = plan.request.apart(p, call.recipe.of(plan.tensors), Wanted(True, *call.wanted))
        return None if found is None else Apart(plan, found)

    def result(self) -> Tensor:
        found = self.found
        return self.plan.of_dtype(self.plan.request.reduced(found.loss_sum, found.n_valid))

    def gradients(self, saved: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Those of the hidden state, the parameters and ``None``."""
        found, plan = self.found, self.plan
        upstream = upstream.to(found.loss_sum.dtype)
        if plan.request.reduction == "mean":
            upstream = upstream / plan.request.over(found.n_valid)
        hidden, *tensors = found.gradients(saved, upstream)
        assert hidden is not None
        return [hidden.view(plan.hidden.shape), *tensors[: len(plan.tensors)], None]


def _is_same_rows(x: Tensor, hidden: Tensor) -> bool:
    """Whether a view of all of the hidden state has its rows in the same order."""
    return (
        x.is_contiguous()
        and hidden.is_contiguous()
        and x.numel() == hidden.numel()
        and x.data_ptr() == hidden.data_ptr()
    )


def plan_of(x: LazyLogits, wanted: bool, *args: Any, **kwargs: Any) -> Plan | None:
    steps, call = x.steps, x.memory.call
    if steps is None:
        return None
    hidden, tensors = call.leaves()
    hidden.requires_grad_(wanted)
    if not wanted:
        tensors = [t.detach() for t in tensors]
    p = project(hidden, call.V, steps)
    if p is None:
        return None
    request = request_of(p.hidden.shape[:-1], call.device, *args, **kwargs)
    if request is None:
        return None
    bias = None
    if p.bias is not None:
        wants = wanted and any(s.bias.requires_grad for s in steps if isinstance(s, Bias))
        bias = p.bias.detach().requires_grad_(wants)
        p = p._replace(bias=bias)
    dtype = None if autocast_dtype(call.device) is not None else x.like.dtype
    return Plan(call, request, p, hidden, tensors, bias, steps, dtype)


class FusedLoss(torch.autograd.Function):
    """The loss as a function of the logits, with what knows its gradients."""

    @staticmethod
    def forward(ctx: Any, x: LazyLogits, way: Graph | Apart) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*way.saved)
        way.saved = ()  # they are freed by the backward pass
        # As they are now: they may be written into later.
        ctx.way, ctx.logits = way, Memory(x.memory.call, x.recorded, x)
        ctx.like = x.like
        return way.result()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused loss has no second derivative (create_graph=True): call "
                "fusedce.restore_loss_head(model) for this, or look at the logits before the loss"
            )
        way, plan = ctx.way, ctx.way.plan
        *comes_to, bias = way.gradients(ctx.saved_tensors, grad)
        left = tuple([s for s in reversed(plan.steps) if s.undone])
        term = Term(plan.call, tuple(comes_to), bias, left)

        logits, request = Source(ctx.logits), plan.request

        def make(operation: str) -> Tensor:
            return request.gradient_of_real(logits.look(operation), grad)

        return LogitsGrad(ctx.like, grad.device, (term,), None, make), None


# `apply` without questions about torch.func, inside of which no loss is fused.
_apply = super(torch.autograd.Function, FusedLoss).apply


def _cross_entropy(func: Callable[..., Any], x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if torch._C._functorch.maybe_current_level() is not None:  # torch.func
        return NotImplemented
    wanted = torch.is_grad_enabled() and x.requires_grad
    plan = plan_of(x, wanted, *args, **kwargs)
    if plan is None:
        return NotImplemented
    plan.call.report.fused()
    return _apply(x, Apart.of(plan) or Graph(plan)) if wanted else plan.compute()


intercept(F.cross_entropy, _cross_entropy)
