"""``F.cross_entropy`` of lazy logits: one function of them, computed by the fused loss."""

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
from fusedce.head.lazy.grad import LogitsGrad, Source, Term, check_not_batched
from fusedce.head.lazy.logits import LazyLogits
from fusedce.head.lazy.memory import Memory
from fusedce.head.lazy.request import Request, project, request_of
from fusedce.head.lazy.steps import Bias, Projected, Steps
from fusedce.head.recipe import memory_budget_of_head
from fusedce.loss.fused_ce import SumApart

_ENGINE = Variable._execution_engine


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

    def gradients(self, saved: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Those of the hidden state, the parameters and what was added to the logits."""
        every = (self.plan.hidden, *self.plan.tensors, self.plan.bias)
        inputs = tuple([x for x in every if x is not None and x.requires_grad])
        if not inputs:
            return [None for _ in every]
        found = iter(_gradients(self.loss, upstream, inputs))
        return [next(found) if x is not None and x.requires_grad else None for x in every]


def _gradients(root: Tensor, upstream: Tensor, inputs: tuple[Tensor, ...]) -> Sequence[Any]:
    """``torch.autograd.grad`` without its checks, within a backward pass."""
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    found: Sequence[Any] = _ENGINE.run_backward(
        (root,), (upstream,), keep, False, inputs, True, False
    )
    return found


class Apart:
    """A loss of rows of the hidden state and the head's own weight: its gradients are there.

    A graph leads from the hidden state to the rows alone, and need not be asked where they are all
    of it in the same order.
    """

    def __init__(self, plan: Plan, found: SumApart) -> None:
        self.plan, self.saved = plan, found.saved
        self.found = found._replace(saved=())
        self.whole = plan.p.hidden is plan.hidden or _is_same_rows(plan.p.hidden, plan.hidden)
        self.loss = plan.of_dtype(plan.request.reduced(found.loss_sum, found.n_valid))

    @staticmethod
    def of(plan: Plan) -> Apart | None:
        call, p, hidden = plan.call, plan.p, plan.hidden
        if call.recipe.adapters or p.bias is not None or p.factor is not None:
            return None
        if p.classes != slice(0, call.V) or any(x.dtype != hidden.dtype for x in plan.tensors):
            return None
        found = plan.request.apart(p, call.recipe.of(plan.tensors), Wanted(True, *call.wanted))
        return None if found is None else Apart(plan, found)

    def gradients(self, saved: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Those of the hidden state, the parameters and ``None``."""
        found, plan = self.found, self.plan
        upstream = upstream.to(found.loss_sum.dtype)
        if plan.request.reduction == "mean":
            upstream = upstream / plan.request.over(found.n_valid)
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
    budget = memory_budget_of_head(call.module)
    request = request_of(p.hidden.shape[:-1], call.device, budget, *args, **kwargs)
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
        ctx.way, ctx.logits = way, Memory(x.memory.call, x.recorded, x.memory)
        ctx.like = x.like
        return way.loss.detach()  # not itself, whose node would hold it

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused loss has no second derivative (create_graph=True): compute the loss "
                "from logits + 0, which are real ones, or call fusedce.restore_loss_head(model)"
            )
        check_not_batched(grad)
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
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return NotImplemented  # torch.func, or tangents of the logits
    wanted = torch.is_grad_enabled() and x.requires_grad
    plan = plan_of(x, wanted, *args, **kwargs)
    if plan is None:
        return NotImplemented
    plan.call.report.fused()
    return _apply(x, Apart.of(plan) or Graph(plan)) if wanted else plan.compute()


LazyLogits.above[F.cross_entropy] = _cross_entropy
