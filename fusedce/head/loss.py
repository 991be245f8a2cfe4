"""``F.cross_entropy`` of lazy logits: the fused loss of the head's inputs.

Its gradient goes straight to the head's inputs (:class:`Route`). Where code watches the gradient
of the logits, it goes through them instead, as that of torch's own loss does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fusedce.contract.checks import autocast_dtype, memory_budget_of
from fusedce.contract.objective import expected, expecting
from fusedce.head.lazy import Expr, LazyLogits, MakeLogits, check_not_batched
from fusedce.head.observe import LossObserver, Result, expected_factor
from fusedce.head.product import Product, no_autocast
from fusedce.head.rules import NODES, RULES, Rows, as_options
from fusedce.loss.cross_entropy import fused_cross_entropy
from fusedce.loss.fused_ce import fused_ce

Given = dict[Product, tuple[Tensor, ...]]  # the operands of each product, with or without a graph


def _rows(expr: Expr, given: Given) -> Rows | None:
    """The operands from which the fused loss computes these logits; ``None`` if it cannot."""
    if expr.product is not None:
        hidden, weight, *bias = given[expr.product]
        return Rows(hidden, weight, bias[0] if bias else None, hidden.dim() - 1,
                    slice(0, weight.shape[0]))  # fmt: skip
    rule = RULES.get(expr.func)
    args = [_rows(a, given) if isinstance(a, Expr) else a for a in expr.args]
    if rule is None or any(a is None and isinstance(e, Expr) for a, e in zip(args, expr.args, strict=True)):
        return None
    return rule(args[0], expr.before, expr.after, *args[1:], **expr.kwargs)


def _sources(node: Any) -> list[Any] | None:
    """The nodes that made the logits; ``None`` if others than the derivatives of rules stand before.

    A leaf, a user's function, a write or a hooked module is such a node.
    """
    if isinstance(node, MakeLogits._backward_cls):
        return [node]
    if node is None or node.name() not in NODES:
        return None
    below = [_sources(n) for n, _ in node.next_functions if n is not None]
    found = [n for part in below for n in part or ()]
    return None if any(part is None for part in below) else found


def _given(x: LazyLogits) -> Given | None:
    """The operands of the products behind ``x``, with their graph; ``None`` without a straight way."""
    products = x.expr.products()
    if x.memory.written or any(p.watched for p in products):
        return None
    nodes = _sources(x.grad_fn)
    if nodes is None or len(set(products)) < len(products):
        return None  # a part of the same logits may be detached
    given = {p: tuple(p.values(by_all_ranks=True)) for p in products}  # of a frozen, detached part
    for node in nodes:
        if node.given is None or node.product not in given:  # backward has run already
            return None
        given[node.product] = _standing_in(node.product, node.given, given[node.product])
    return given


class StandIn(torch.autograd.Function):
    """A gathered parameter in the place of the one that is sharded now, which gets the gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Hand the gradient on."""
        return grad, None


def _standing_in(product: Product, given: tuple[Any, ...], values: Any) -> tuple[Tensor, ...]:
    given = tuple(x for x in given if x is not None)
    if not product.is_gone():
        return given
    pairs = zip(given[1:], values[1:], strict=True)
    return (given[0], *(StandIn.apply(x, v) if x.requires_grad else v for x, v in pairs))


class Route(torch.autograd.Function):
    """The loss, as a function of the logits and of the fused loss: its gradient goes to one of them."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, fused: Tensor, always: Tensor, native: Any) -> Tensor:
        """Return the fused loss."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits)
        ctx.expr, ctx.native = logits.expr, native
        return fused.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """The gradient of the fused loss; or of the logits, where they are watched."""
        if grad is None:
            return None, None, None, None
        check_not_batched(grad)
        again = torch.is_grad_enabled()
        # With `backward(inputs=...)`, logits may be among the inputs.
        all_of_it = torch._C._will_engine_execute_node(ctx.next_functions[2][0])
        if all_of_it and not again and not any(p.watched for p in ctx.expr.products()):
            return None, grad, None, None
        if again:
            (z,) = ctx.saved_tensors
        else:
            with torch.no_grad():
                z = ctx.expr.values("the gradient of logits").detach().requires_grad_()
        with torch.enable_grad():
            z = z + 0 if again else z
            loss = ctx.native(z)
            (found,) = torch.autograd.grad(loss, z, grad.to(loss.dtype), create_graph=again)
        return found, None, None, None


def _fused(
    x: LazyLogits,
    p: Rows,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: Any,
    label_smoothing: float,
) -> Tensor:
    head, observer = x.expr.products()[0].head, LossObserver.of_this_thread()
    w, bias = p.weight, p.bias
    if p.classes != slice(0, w.shape[0]):
        w, bias = w[p.classes], None if bias is None else bias[p.classes]
    options: dict[str, Any] = {
        "bias": bias, "ignore_index": ignore_index, "softcap": p.cap, "logit_scale": p.scale,
        "label_smoothing": float(label_smoothing),
        "memory_budget": memory_budget_of(head.memory_budget),
    }  # fmt: skip
    if weight is not None or reduction == "none":
        options |= {"class_weight": weight, "reduction": reduction}
        return fused_cross_entropy(p.hidden, w, target, **options)
    denominator = None if observer is None else observer.denominator
    factor = expected_factor() if reduction == "sum" else None
    if reduction == "mean":
        factor = None if denominator is None else denominator.reciprocal()
    expects = reduction == "sum" and factor is None  # then an outer expectation holds
    with nullcontext() if expects or factor is expected() else expecting(factor):
        out = fused_ce(p.hidden, w, target, monitor=observer.monitor if observer else (), **options)
    if observer is not None:
        observer.observe(out, reduction)
    loss_sum, n_valid = out
    if reduction == "sum":
        return loss_sum
    return loss_sum / (n_valid.clamp(min=1) if denominator is None else denominator)


def _cross_entropy(
    func: Callable[..., Any],
    x: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    native = lambda z: func(z, target, *options)  # noqa: E731
    plain = type(x) is LazyLogits and type(target) is Tensor and x.dim() > 0
    wanted = plain and torch.is_grad_enabled() and x.requires_grad
    if (
        not plain
        or x.memory.written
        or target.dtype not in (torch.int64, torch.int32)
        or target.device != x.device
        or size_average is not None
        or reduce is not None
        or reduction not in ("mean", "sum", "none")
        or not 0 <= label_smoothing <= 1
        or (weight is not None and weight.dtype == torch.float64)
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
    ):
        return native(x)
    if wanted:
        given = _given(x)
    else:
        given = {p: tuple(p.values(by_all_ranks=True)) for p in x.expr.products()}
    with torch.set_grad_enabled(wanted), no_autocast(x.device):
        p = None if given is None else _rows(x.expr, given)
        p = None if p is None else as_options(p)
        if p is None or p.class_dim != min(1, x.dim() - 1) or target.shape != p.hidden.shape[:-1]:
            return native(x)
        head = x.expr.products()[0].head
        loss = _fused(x, p, target, weight, ignore_index, reduction, label_smoothing)
    head.report.fused()
    if autocast_dtype(x.device) is None:
        loss = loss.to(x.dtype)
    if wanted:
        target, weight = target.clone(), None if weight is None else weight.detach().clone()
        options = (weight, None, ignore_index, None, reduction, label_smoothing)
        loss = Route.apply(x, loss, torch.empty(0, requires_grad=True), _again(func, x, target, options))
    if (observer := LossObserver.of_this_thread()) is not None:
        observer.results.append(Result.of(loss))
    return loss


def _again(func: Any, x: LazyLogits, target: Tensor, options: Any) -> Callable[[Tensor], Tensor]:
    """Torch's own loss, for the gradient of real logits, in float32 or better."""
    observer = LossObserver.of_this_thread()
    denominator = None if observer is None else observer.denominator

    def native(z: Tensor) -> Tensor:
        z = z if z.dtype == torch.float64 else z.float()
        if options[4] == "mean" and options[0] is None:  # with every label ignored, torch's is NaN
            count = target.ne(options[2]).sum().clamp(min=1) if denominator is None else denominator
            return func(z, target, *options[:4], "sum", *options[5:]) / count
        out: Tensor = func(z, target, *options)
        return out

    return native


LazyLogits.above[F.cross_entropy] = _cross_entropy
