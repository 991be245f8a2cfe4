"""``F.cross_entropy`` of lazy logits, as one autograd function that runs the fused loss.

:class:`FusedCall` holds the arguments of the call, :class:`LossPlan` these with the head's inputs,
and :class:`FusedLoss` is the function of the lazy logits. Which code computes the loss:

=====================================================  ============================================
no gradient is wanted                                  ``LossPlan.compute``, ``FusedCall.fused``
a sum or mean of a plain head in one dtype: no LoRA,   ``LossWithGrads``, ``FusedCall.with_grads``:
added bias, class weights, shards or monitors, all     the loss with its gradients, without a graph
classes, no smoothing under a soft-cap
any other loss                                         ``LossGraph``: ``LossPlan.compute`` with a
                                                       graph that leads to the head's inputs
``torch.compile`` traces the call                      ``FusedCall.fused`` in the traced graph
code reads the gradient of the logits (a hook)         ``FusedCall.gradient_of_real``
=====================================================  ============================================

Each of the first four begins with ``FusedCall.problem``, the record that the fused loss takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable, forward_ad

from fusedce.contract.checks import autocast_dtype
from fusedce.contract.objective import Factor, expected, expecting
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.results import LossSum
from fusedce.head.call import HeadCall
from fusedce.head.lazy.grad import LogitsGrad, Term, check_not_batched
from fusedce.head.lazy.logits import LazyLogits, LogitsSource, Memory
from fusedce.head.lazy.steps import Bias, LogitsSteps, Projected, as_options
from fusedce.head.recipe import Recipe, memory_budget_of_head, no_autocast
from fusedce.head.report import LossObserver, Result, expected_factor
from fusedce.loss.cross_entropy import fused_cross_entropy, reduced
from fusedce.loss.fused_ce import SumWithGrads, ce_with_grads, checked_ce, sharded_loss_sum


class FusedCall(NamedTuple):
    """Arguments of a call of ``F.cross_entropy``, and the fused losses for them.

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

    def copy(self) -> FusedCall:
        """The same call; later writes into its labels and class weights do not count."""
        weight = None if self.weight is None else self.weight.detach().clone()
        return self._replace(target=self.target.clone(), weight=weight)

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
            observer = LossObserver.of_this_thread()
            monitor = () if observer is None else observer.monitor
            with self._expecting():
                if sharded:
                    out = sharded_loss_sum(problem, monitor=monitor, vocab_size=p.classes.stop)
                else:
                    out = checked_ce(problem, monitor)
            if observer is not None:
                observer.observe(out, self.reduction)
            return self.sum_or_mean(*out)

    def with_grads(self, p: Projected, recipe: Recipe, wanted: Wanted) -> SumWithGrads | None:
        """The loss sum with its gradients; ``None`` if they need a graph."""
        observer = LossObserver.of_this_thread()
        if self.weight is not None or self.reduction == "none" or recipe.has_sharded_vocabulary():
            return None
        if observer is not None and observer.monitor:
            return None
        problem = self.problem(p, recipe)
        with no_autocast(p.hidden.device), self._expecting():
            found = ce_with_grads(problem, wanted)
        if observer is not None and found is not None:
            observer.observe(LossSum(found.loss_sum, found.n_valid), self.reduction)
        return found

    def sum_or_mean(self, loss_sum: Tensor, n_valid: Tensor) -> Tensor:
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
    observer = LossObserver.of_this_thread()
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


# ---- the loss as a function of lazy logits ---------------------------------------------------

_ENGINE = Variable._execution_engine


class LossPlan(NamedTuple):
    """The inputs of a loss that can be fused: the head's call, its leaves and the steps."""

    call: HeadCall
    fused_call: FusedCall
    p: Projected  # the logits after the steps
    hidden: Tensor  # (..., H), a leaf
    tensors: list[Tensor]  # parameters of the head, leaves
    bias: Tensor | None  # (V,), added to the logits
    steps: LogitsSteps
    dtype: torch.dtype | None  # of the loss; None: not cast

    def of_dtype(self, loss: Tensor) -> Tensor:
        """``loss`` cast to the plan's dtype."""
        return loss if self.dtype is None or self.dtype == loss.dtype else loss.to(self.dtype)

    def compute(self) -> Tensor:
        """The loss, with a graph that leads to the plan's leaves."""
        return self.of_dtype(self.fused_call.fused(self.p, self.call.recipe.of(self.tensors)))


class LossGraph:
    """A loss whose gradients come from a graph of its own."""

    def __init__(self, plan: LossPlan) -> None:
        self.plan, self.loss = plan, plan.compute()
        self.saved: tuple[Tensor, ...] = ()

    def gradients(self, saved: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Gradients of the hidden state, the parameters and the added bias."""
        every = (self.plan.hidden, *self.plan.tensors, self.plan.bias)
        inputs = tuple([x for x in every if x is not None and x.requires_grad])
        if not inputs:
            return [None for _ in every]
        found = iter(_gradients(self.loss, upstream, inputs))
        return [next(found) if x is not None and x.requires_grad else None for x in every]


def _gradients(root: Tensor, upstream: Tensor, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
    """``torch.autograd.grad`` inside a backward pass, without its checks."""
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    found: Sequence[Any] = _ENGINE.run_backward(
        (root,), (upstream,), keep, False, inputs, True, False
    )
    return found


class LossWithGrads:
    """A loss that was computed together with its gradients.

    It needs a plain head: no adapters, no added bias, all classes. A graph leads from the hidden
    state to the rows of the loss; it is skipped if these are all rows in the same order.
    """

    def __init__(self, plan: LossPlan, found: SumWithGrads) -> None:
        self.plan, self.saved = plan, found.saved
        self.found = found._replace(saved=())
        self.whole = plan.p.hidden is plan.hidden or _is_same_rows(plan.p.hidden, plan.hidden)
        self.loss = plan.of_dtype(plan.fused_call.sum_or_mean(found.loss_sum, found.n_valid))

    @staticmethod
    def of(plan: LossPlan) -> LossWithGrads | None:
        """The loss of a plan; ``None`` if its gradients need a graph."""
        call, p, hidden = plan.call, plan.p, plan.hidden
        if call.recipe.adapters or p.bias is not None or p.factor is not None:
            return None
        if p.classes != slice(0, call.V) or any(x.dtype != hidden.dtype for x in plan.tensors):
            return None
        found = plan.fused_call.with_grads(
            p, call.recipe.of(plan.tensors), Wanted(True, *call.wanted)
        )
        return None if found is None else LossWithGrads(plan, found)

    def gradients(self, saved: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Gradients of the hidden state, the parameters, and ``None`` for the added bias."""
        found, plan = self.found, self.plan
        upstream = upstream.to(found.loss_sum.dtype)
        if plan.fused_call.reduction == "mean":
            upstream = upstream / plan.fused_call.over(found.n_valid)
        rows, *tensors = found.gradients(saved, upstream)
        assert rows is not None
        if self.whole:
            hidden = rows.view(plan.hidden.shape)
        else:
            (hidden,) = _gradients(plan.p.hidden, rows.view(plan.p.hidden.shape), (plan.hidden,))
        return [hidden, *tensors[: len(plan.tensors)], None]


def _is_same_rows(x: Tensor, hidden: Tensor) -> bool:
    """Whether a view of all of the hidden state has its rows in the same order."""
    return (
        x.is_contiguous()
        and hidden.is_contiguous()
        and x.numel() == hidden.numel()
        and x.data_ptr() == hidden.data_ptr()
    )


def plan_of(x: LazyLogits, wanted: bool, *args: Any, **kwargs: Any) -> LossPlan | None:
    """The plan of ``F.cross_entropy(x, *args, **kwargs)``; ``None`` if it cannot be fused.

    ``wanted`` says whether gradients are wanted.
    """
    steps, call = x.steps, x.memory.call
    if steps is None:
        return None
    hidden, tensors = call.leaves()
    hidden.requires_grad_(wanted)
    if not wanted:
        tensors = [t.detach() for t in tensors]
    found = fused_call_of(call.module, hidden, call.V, steps, *args, **kwargs)
    if found is None:
        return None
    (p, fused_call), bias = found, None
    if call.recipe.has_sharded_vocabulary() and not _is_sharded_loss(p):
        return None
    if p.bias is not None:
        wants = wanted and any(s.bias.requires_grad for s in steps if isinstance(s, Bias))
        bias = p.bias.detach().requires_grad_(wants)
        p = p._replace(bias=bias)
    dtype = None if autocast_dtype(call.device) is not None else x.like.dtype
    return LossPlan(call, fused_call, p, hidden, tensors, bias, steps, dtype)


def _is_sharded_loss(p: Projected) -> bool:
    """Whether the loss of a sharded vocabulary takes these operands: the first classes, as is."""
    return p.bias is None and p.factor is None and (p.classes.start or 0) == 0


class FusedLoss(torch.autograd.Function):
    """The fused loss as an autograd function of the lazy logits."""

    @staticmethod
    def forward(ctx: Any, x: LazyLogits, fused: LossGraph | LossWithGrads) -> Tensor:
        """The loss, which is computed already."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*fused.saved)
        fused.saved = ()  # they are freed by the backward pass
        # This memory keeps the logits of now; later writes into x do not change it.
        ctx.fused, ctx.logits = fused, Memory(x.memory.call, x.recorded, x.memory)
        ctx.fused_call, ctx.like = fused.plan.fused_call.copy(), x.like
        return fused.loss.detach()  # the loss itself would be held by its own node

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """A lazy gradient of the logits.

        Raises:
            RuntimeError: ``create_graph=True``, or a batch of gradients.
        """
        if grad is None:
            return None, None
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused loss has no second derivative (create_graph=True): compute the loss "
                "from logits + 0, which are real ones, or call fusedce.restore_loss_head(model)"
            )
        check_not_batched(grad)
        fused, plan = ctx.fused, ctx.fused.plan
        *input_grads, bias = fused.gradients(ctx.saved_tensors, grad)
        left = tuple([s for s in reversed(plan.steps) if s.undone])
        term = Term(plan.call, tuple(input_grads), bias, left)

        logits, fused_call = LogitsSource(ctx.logits), ctx.fused_call

        def make(operation: str) -> Tensor:
            return fused_call.gradient_of_real(logits.materialize(operation), grad)

        return LogitsGrad(ctx.like, grad.device, (term,), None, make), None


# This `apply` skips the checks for torch.func, whose transforms get no fused loss.
_apply = super(torch.autograd.Function, FusedLoss).apply


def _cross_entropy(func: Callable[..., Any], x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return NotImplemented  # torch.func, or tangents of the logits
    wanted = torch.is_grad_enabled() and x.requires_grad
    plan = plan_of(x, wanted, *args, **kwargs)
    if plan is None:
        return NotImplemented
    plan.call.report.fused()
    loss = _apply(x, LossWithGrads.of(plan) or LossGraph(plan)) if wanted else plan.compute()
    if (observer := LossObserver.of_this_thread()) is not None:
        observer.results.append(Result.of(loss))
    return loss


LazyLogits.above[F.cross_entropy] = _cross_entropy
