"""``F.cross_entropy`` of lazy logits: one function of them, computed by the fused loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from fusedce.contract.checks import autocast_dtype
from fusedce.contract.denominator import Factor, expected, expecting
from fusedce.head.call import HeadCall
from fusedce.head.items import expected_of_sum
from fusedce.head.lazy.grad import LogitsGrad, Source, Term
from fusedce.head.lazy.logits import LazyLogits, Memory, intercept
from fusedce.head.lazy.steps import Bias, Projected, Steps, scale_and_cap
from fusedce.head.recipe import Recipe, as_they_are
from fusedce.head.tap import LossTap
from fusedce.loss.cross_entropy import fused_cross_entropy
from fusedce.loss.fused_ce import fused_ce


class Request(NamedTuple):
    """A call of ``F.cross_entropy``, and what its mean is divided by instead of its own count."""

    target: Tensor
    weight: Tensor | None
    ignore_index: int
    reduction: str
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
            over = chosen if self.weight is not None else self._over(valid.sum())
            factor = factor / over
        grad = torch.where(valid[..., None], grad * factor[..., None], 0)
        return grad.movedim(-1, dim)

    def _over(self, n_valid: Tensor) -> Tensor:
        return n_valid.clamp(min=1) if self.denominator is None else self.denominator

    def _expected(self) -> Factor | Callable[[], Factor]:
        """What backward will multiply the sum by, as far as is known; ``None`` for a mean."""
        if self.reduction == "mean":
            return None if self.denominator is None else self.denominator.reciprocal()
        told = expected_of_sum()
        return expected() if told is None else told

    def fused(self, p: Projected, recipe: Recipe) -> Tensor:
        """The same without logits."""
        factors = scale_and_cap(p)
        assert factors is not None, "not a loss that can be fused"
        with as_they_are(p.hidden.device):
            rows, weight, bias = recipe.operands(p.hidden)
            if p.bias is not None:
                bias = p.bias if bias is None else bias + p.bias
            if p.classes != slice(0, len(weight)):
                weight = weight[p.classes]
                bias = None if bias is None else bias[p.classes]
            if p.factor is not None:
                rows = (rows * p.factor).to(rows.dtype)
                bias = None if bias is None else (bias * p.factor).to(bias.dtype)
            target = self.target
            if rows.dim() != 2:  # each view has a node of autograd
                rows, target = rows.reshape(-1, rows.shape[-1]), target.reshape(-1)
            options: dict[str, Any] = {
                "bias": bias,
                "ignore_index": self.ignore_index,
                "logit_scale": factors[0],
                "softcap": factors[1],
                "label_smoothing": self.label_smoothing,
            }
            if self.weight is not None or self.reduction == "none":
                options |= {"class_weight": self.weight, "reduction": self.reduction}
                loss = fused_cross_entropy(rows, weight, target, **options)
                return loss.view(self.target.shape) if self.reduction == "none" else loss
            tap = LossTap.current
            monitor = () if tap is None else tap.monitor
            with nullcontext() if torch.compiler.is_compiling() else expecting(self._expected()):
                out = fused_ce(rows, weight, target, monitor=monitor, **options)
            if tap is not None:
                tap.see(out, self.reduction)
            loss_sum, n_valid = out
            return loss_sum if self.reduction == "sum" else loss_sum / self._over(n_valid)


def request_of(
    p_shape: tuple[int, ...],
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
        or target.is_floating_point()
        or tuple(target.shape) != tuple(p_shape)
        or target.device != device
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
    if p is None or p.class_dim != (1 if p.hidden.dim() > 1 else 0) or scale_and_cap(p) is None:
        return None
    return p


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

    def compute(self) -> Tensor:
        loss = self.request.fused(self.p, self.call.recipe.of(self.tensors))
        return loss if self.dtype is None else loss.to(self.dtype)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        every = (self.hidden, *self.tensors, self.bias)
        return tuple(x for x in every if x is not None and x.requires_grad)


def plan_of(x: LazyLogits, wanted: bool, *args: Any, **kwargs: Any) -> Plan | None:
    steps, call = x.steps, x.memory.call
    if steps is None:
        return None
    hidden, tensors = call.leaves()
    hidden.requires_grad_(wanted)
    if not wanted:
        tensors = [t.detach() for t in tensors]
    with torch.set_grad_enabled(wanted):
        p = project(hidden, call.V, steps)
    if p is None:
        return None
    request = request_of(tuple(p.hidden.shape[:-1]), x.device, *args, **kwargs)
    if request is None:
        return None
    bias = None
    if p.bias is not None:
        wants = wanted and any(s.bias.requires_grad for s in steps if isinstance(s, Bias))
        bias = p.bias.detach().requires_grad_(wants)
        p = p._replace(bias=bias)
    dtype = None if autocast_dtype(x.device) is not None else x.dtype
    return Plan(call, request, p, hidden, tensors, bias, steps, dtype)


class FusedLoss(torch.autograd.Function):
    """The loss as a function of the logits; the fused loss has a graph of its own inside."""

    @staticmethod
    def forward(ctx: Any, x: LazyLogits, plan: Plan) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        # As they are now: they may be written into later.
        ctx.logits, ctx.like = Memory(plan.call, x.recorded, x), x.like
        with torch.enable_grad():
            ctx.loss = plan.compute()
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused loss has no second derivative (create_graph=True): call "
                "fusedce.restore_loss_head(model) for this, or look at the logits before the loss"
            )
        plan: Plan = ctx.plan
        memory, layout = ctx.logits, ctx.like
        inputs = plan.inputs
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        found: Any = ()
        if inputs:  # torch.autograd.grad without its checks
            found = _engine_run_backward((ctx.loss,), (grad,), keep, False, inputs, True, False)
        by_id = {id(x): g for x, g in zip(inputs, found, strict=True)}
        comes_to = tuple(by_id.get(id(x)) for x in (plan.hidden, *plan.tensors))
        left = tuple(s for s in reversed(plan.steps) if s.undone)
        bias = None if plan.bias is None else by_id.get(id(plan.bias))
        term = Term(plan.call, comes_to, bias, left)

        logits, request = Source(memory), plan.request

        def make(operation: str) -> Tensor:
            return request.gradient_of_real(logits.look(operation), grad)

        return LogitsGrad(layout, grad.device, (term,), None, make), None


def _cross_entropy(func: Callable[..., Any], x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if torch._C._functorch.maybe_current_level() is not None:  # torch.func
        return NotImplemented
    wanted = torch.is_grad_enabled() and x.requires_grad
    plan = plan_of(x, wanted, *args, **kwargs)
    if plan is None:
        return NotImplemented
    plan.call.report.fused()
    return FusedLoss.apply(x, plan) if wanted else plan.compute()


intercept(F.cross_entropy, _cross_entropy)
