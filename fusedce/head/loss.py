"""``F.cross_entropy`` of lazy logits: the fused loss of the head's inputs, and its gradient.

The fused loss computes the gradients of the head's inputs at once. They travel to the head along
torch's own graph as a :class:`LazyGradient`: hooks, casts and views treat it as the gradient of the
logits, whose values are computed if code reads them. The head unpacks one that nobody has read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from fusedce.contract.checks import autocast_dtype, memory_budget_of, no_autocast
from fusedce.contract.objective import expected, expecting
from fusedce.head.lazy import LazyLogits, facts_of, kept, real, without_data
from fusedce.head.observe import LossObserver, expected_factor
from fusedce.head.product import Expr, Memory, Product, changes_values, whole
from fusedce.head.rules import Rows, rows_of
from fusedce.loss.cross_entropy import fused_cross_entropy
from fusedce.loss.fused_ce import fused_ce
from fusedce.loss.sharded_problem import is_vocabulary_shard

T: Any = torch.Tensor
aten = torch.ops.aten

# ---- the gradient ---------------------------------------------------------------------------


def _check_not_batched(grad: Tensor) -> None:
    """Raise ``RuntimeError`` for a batch of gradients, which ``vmap`` passes to a backward."""
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "a replaced head takes one gradient at a time, not many (is_grads_batched=True, "
            "vectorize=True): call fusedce.restore_loss_head(model) for this, since the backward "
            "passes of fusedce's lazy logits cannot be vectorised"
        )


class MakeLogits(torch.autograd.Function):
    """Lazy logits ``(..., V)`` of a product, as a function of its operands."""

    @staticmethod
    def forward(
        ctx: Any, product: Product, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> LazyLogits:
        """Compute nothing."""
        ctx.set_materialize_grads(False)
        ctx.product, ctx.given = product, (hidden, weight, bias)
        product.needed = ctx.needs_input_grad[1:]
        shape = (*hidden.shape[:-1], weight.shape[0])
        expr = Expr(product, None, (), {}, shape)
        meta = torch.empty(shape, dtype=hidden.dtype, device="meta")
        return LazyLogits(expr, Memory(expr), meta, hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """The gradients of the operands: unpacked, or computed from a real gradient.

        Collectives: with real gradients of a sharded vocabulary, two all-gathers a parameter.
        """
        product, needed, given = ctx.product, ctx.needs_input_grad[1:], ctx.given
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.given = None  # a kept loss keeps none of them
        if grad is None:
            return None, None, None, None
        _check_not_batched(grad)
        if isinstance(grad, LazyGradient) and (load := grad.of(product)) is not None:
            return (None, *load, None)[:4]
        given = given if torch.is_grad_enabled() else (*product.values(by_all_ranks=True), None)
        hidden, weight = given[0], whole(given[1])
        with no_autocast(grad.device):
            grad = real(grad, "backward").to(hidden.dtype)
            rows = grad.flatten(0, -2)
            d_hidden = grad @ weight if needed[0] else None
            d_weight = rows.T @ hidden.flatten(0, -2) if needed[1] else None
            d_bias = rows.sum(0) if needed[2] else None
        if is_vocabulary_shard(given[1]):
            d_weight = None if d_weight is None else _own_rows(d_weight, given[1])
            d_bias = None if d_bias is None else _own_rows(d_bias, given[2])
        return None, d_hidden, d_weight, d_bias


def _own_rows(grad: Tensor, like: Tensor) -> Tensor:
    """The part of a whole parameter's gradient that is this rank's, as a ``DTensor``."""
    with torch.enable_grad():
        leaf = like.detach().requires_grad_()
        return torch.autograd.grad(whole(leaf), leaf, grad)[0]


# Whether code, and not a node of autograd, calls an operator of a lazy gradient.
_reading: ContextVar[bool] = ContextVar("fusedce_reading", default=False)
# Gradients of a product's operands, and how many operators the logits' gradient has to pass yet.
Load = dict[Product, tuple[int, list[Tensor | None]]]


class LazyGradient(LazyLogits):
    """The gradient of logits on its way to the head, without values until code reads them.

    It carries the gradients of the operands. Operators of autograd's nodes are noted; once code has
    read it, or a real gradient was added, it is the real gradient.
    """

    load: Load

    @classmethod
    def carrying(cls, load: Load, expr: Expr, meta: Tensor, device: torch.device) -> LazyGradient:
        """The gradient ``expr`` of logits, which carries ``load``."""
        new = cls(expr, Memory(expr), meta, device)
        new.load = load
        return new

    def of(self, product: Product) -> list[Tensor | None] | None:
        """The gradients of a product's operands, where this has come to its logits unread."""
        steps, grads = self.load.get(product, (0, None))
        # A user's function in between may have another derivative than its operators: then the
        # steps back are not those of the way there.
        return grads if self.memory.made is None and steps == 0 else None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _reading.set(True)
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            _reading.reset(before)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is aten.index_add_.default:  # of index_select's node, into new zeros
            sums = cls.__torch_dispatch__(aten.index_add.default, types, args, kwargs)
            if isinstance(sums, LazyGradient):
                args[0].expr, args[0].memory, args[0].load = sums.expr, sums.memory, sums.load
                return args[0]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        grads = [t for t in tensors if isinstance(t, LazyGradient)]
        load: Load | None = None
        if not _reading.get() and not facts_of(func).writes and all(
            isinstance(t, LazyGradient) or not t.dim() or not t.is_floating_point()
            or func is aten.tanh_backward.default  # which takes the logits, too
            for t in tensors
        ):  # fmt: skip
            load = {} if func is aten.new_zeros.default else _added(grads, changes_values(func))
        if load is None:
            return func(*real(args, "backward"), **real(kwargs, "backward"))
        meta = func(*without_data(args), **{k: v for k, v in kwargs.items() if k != "device"})
        expr = Expr(None, func, kept(args), kwargs, tuple(meta.shape))
        return cls.carrying(load, expr, meta, grads[0].device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.materialize("repr"))


def _added(grads: Sequence[LazyGradient], passed: bool) -> Load | None:
    """What the result of one more operator carries; ``None`` if it must be real."""
    total: Load = {}
    for g in grads:
        if g.memory.made is not None:
            return None
        for product, (steps, new) in g.load.items():
            steps -= passed
            if product in total:
                of, old = total[product]
                if of != steps:
                    return None
                pairs = zip(old, new, strict=True)
                new = [None if a is None or b is None else a + b for a, b in pairs]
            total[product] = steps, new
    return total


class FusedLoss(torch.autograd.Function):
    """The loss, as a function of the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: LazyLogits, inner: tuple[Tensor, Given], native: Any, dtype: torch.dtype
    ) -> Tensor:
        """Return a loss in ``dtype``; ``inner`` holds it as a function of leaves, and these.

        ``native`` computes an upstream gradient times that of torch's own loss by real logits.
        """
        ctx.set_materialize_grads(False)
        ctx.logits, ctx.inner, ctx.native = logits, inner, native
        return inner[0].detach().to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """The gradient of the logits, which carries those of their operands."""
        if grad is None:
            return None, None, None, None
        _check_not_batched(grad)
        ctx.saved_tensors  # noqa: B018  # the second time, torch raises its error
        z, native, (loss, given) = ctx.logits, ctx.native, ctx.inner
        if torch.is_grad_enabled():
            return native(z + 0, grad), None, None, None
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        leaves = [x for values in given.values() for x in values if x.requires_grad]
        found = torch.autograd.grad(loss, leaves, grad.to(loss.dtype), keep, allow_unused=True)
        left = iter(found)
        load = {
            p: (z.expr.steps[p], [next(left) if x.requires_grad else None for x in values])
            for p, values in given.items()
        }
        expr = z.expr
        if not keep:  # a kept loss keeps none of them
            ctx.logits = ctx.inner = None

        def make() -> Tensor:
            z = expr.values("the gradient of logits").detach().requires_grad_()
            return native(z, grad)

        meta = torch.empty(expr.after, dtype=z.dtype, device="meta")
        root = Expr(None, make, (), {}, expr.after)
        return LazyGradient.carrying(load, root, meta, grad.device), None, None, None


# ---- the loss -------------------------------------------------------------------------------

Given = dict[Product, list[Tensor]]  # values of each product's operands when the head ran


def _given(x: LazyLogits, wanted: bool) -> Given:
    """The operands behind ``x``; if ``wanted``, leaves that need gradients as the head's did."""
    given = {p: p.values(by_all_ranks=True) for p in x.expr.steps}
    if not wanted:
        return given
    return {
        p: [v.detach().requires_grad_(need) for v, need in zip(values, p.needed, strict=False)]
        for p, values in given.items()
    }


def _fused(
    x: LazyLogits, p: Rows, target: Tensor, weight: Tensor | None, ignore_index: int,
    reduction: Any, label_smoothing: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The fused loss, and the number ``()`` by which its sum was divided."""
    product, observer = next(iter(x.expr.steps)), LossObserver.current.get()
    w, bias, sharded = p.weight, p.bias, is_vocabulary_shard(p.weight)
    if p.classes != slice(0, w.shape[0]) and not sharded:
        w, bias = w[p.classes], None if bias is None else bias[p.classes]
    options: dict[str, Any] = {
        "bias": bias, "ignore_index": ignore_index, "softcap": p.cap, "logit_scale": p.scale,
        "label_smoothing": float(label_smoothing),
        "memory_budget": memory_budget_of(product.memory_budget),
    }  # fmt: skip
    if sharded:
        options["vocab_size"] = p.classes.stop
    if weight is not None or reduction == "none":
        options |= {"class_weight": weight, "reduction": reduction}
        loss = fused_cross_entropy(p.hidden, w, target, **options)
        return (loss / (target != ignore_index).any() if reduction == "mean" else loss), None
    denominator, monitor = (observer.denominator, observer.monitor) if observer else (None, ())
    factor = expected_factor() if reduction == "sum" else None
    if reduction == "mean":
        factor = None if denominator is None else denominator.reciprocal()
    expects = reduction == "sum" and factor is None  # then an outer expectation holds
    with nullcontext() if expects or factor is expected() else expecting(factor):
        out = fused_ce(p.hidden, w, target, **options, monitor=monitor)
    if observer is not None:
        observer.observe(out, reduction)
    if reduction == "sum":
        return out.loss_sum, None
    divisor = out.n_valid if denominator is None else denominator  # (torch's mean of none is NaN)
    return out.loss_sum / divisor, divisor


def _cross_entropy(
    func: Callable[..., Any], x: Any, target: Any, weight: Tensor | None = None,
    size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """``F.cross_entropy`` of lazy logits, or torch's own of real ones."""
    options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    native = lambda z: func(z, target, *options)  # noqa: E731
    plain = type(x) is LazyLogits and type(target) is Tensor and x.dim() > 0
    wanted = plain and torch.is_grad_enabled() and x.requires_grad
    if not (
        plain and not x.memory.written and (x.expr.once or not wanted)
        and target.dtype in (torch.int64, torch.int32) and target.device == x.device
        and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
        and 0 <= label_smoothing <= 1 and (weight is None or weight.dtype != torch.float64)
        and torch._C._functorch.maybe_current_level() is None and forward_ad._current_level < 0
    ):  # fmt: skip
        return native(x)
    given, fused = _given(x, wanted), None
    with torch.set_grad_enabled(wanted), no_autocast(x.device):
        p = rows_of(x.expr, given)
        if (
            p is not None and p.class_dim == min(1, x.dim() - 1)
            and target.shape == p.hidden.shape[:-1]
            and (p.classes.start == 0 or not is_vocabulary_shard(p.weight))
        ):  # fmt: skip
            fused = _fused(x, p, target, weight, ignore_index, reduction, label_smoothing)
    if fused is None:
        return native(x)
    loss, divisor = fused
    next(iter(x.expr.steps)).report.losses += 1
    dtype = x.dtype if autocast_dtype(x.device) is None else loss.dtype
    if not wanted:
        return loss.to(dtype)
    target, weight = target.clone(), None if weight is None else weight.detach().clone()
    reduction = reduction if divisor is None else "sum"
    options = (weight, None, ignore_index, None, reduction, label_smoothing)
    again = functools.partial(_native_gradient, func, target, options, divisor)
    return FusedLoss.apply(x, (loss, given), again, dtype)


def _native_gradient(
    func: Any, target: Tensor, options: Any, divisor: Tensor | None, z: Tensor, grad: Tensor
) -> Tensor:
    """``grad`` times the gradient of torch's own loss by ``z``, in float32 or better."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        loss = func(z if z.dtype == torch.float64 else z.float(), target, *options)
        loss = loss if divisor is None else loss / divisor  # of ignored labels, torch's mean is NaN
        return torch.autograd.grad(loss, z, grad.to(loss.dtype), create_graph=again)[0]


LazyLogits.above[F.cross_entropy] = _cross_entropy
