"""``F.cross_entropy`` of lazy logits, as one autograd function that runs the fused loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Variable, forward_ad

from fusedce.contract.checks import autocast_dtype
from fusedce.contract.problem import Wanted
from fusedce.head.call import HeadCall
from fusedce.head.lazy.fused_call import FusedCall, fused_call_of
from fusedce.head.lazy.grad import LogitsGrad, LogitsSource, Term, check_not_batched
from fusedce.head.lazy.logits import LazyLogits
from fusedce.head.lazy.memory import Memory
from fusedce.head.lazy.steps import Bias, LogitsSteps, Projected
from fusedce.loss.fused_ce import SumApart

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

    def __init__(self, plan: LossPlan, found: SumApart) -> None:
        self.plan, self.saved = plan, found.saved
        self.found = found._replace(saved=())
        self.whole = plan.p.hidden is plan.hidden or _is_same_rows(plan.p.hidden, plan.hidden)
        self.loss = plan.of_dtype(plan.fused_call.reduced(found.loss_sum, found.n_valid))

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
        ctx.like = x.like
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

        logits, fused_call = LogitsSource(ctx.logits), plan.fused_call

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
    return _apply(x, LossWithGrads.of(plan) or LossGraph(plan)) if wanted else plan.compute()


LazyLogits.above[F.cross_entropy] = _cross_entropy
