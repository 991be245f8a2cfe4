"""``F.cross_entropy`` of lazy logits: the fused loss of the head's inputs, and its gradient.

A loss is fused if two records of how the logits were computed agree, the "two witnesses": the noted
expression (:func:`rows_of`), and the chain of autograd's nodes (:func:`_given`). Any other loss is
torch's own, of real logits.

The gradient goes one of three ways (:class:`Route`): straight to the head's inputs; along the
logits as a :class:`Passenger`, where hooks want to know when it comes; or along the logits as it
is, where code asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from fusedce.autograd.dispatch import sum_with_grads
from fusedce.autograd.sums import SumWithGrads
from fusedce.contract.checks import autocast_dtype, memory_budget_of, no_autocast
from fusedce.contract.objective import expected, expecting
from fusedce.contract.problem import Problem
from fusedce.head.lazy import LazyLogits, facts_of, kept, real, without_data
from fusedce.head.observe import LossObserver, expected_factor
from fusedce.head.product import Expr, Memory, Product, whole
from fusedce.head.rules import NODES, Rows, number_of_steps, rows_of
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
        shape = (*hidden.shape[:-1], weight.shape[0])
        expr = Expr(product, None, (), {}, shape)
        meta = torch.empty(shape, dtype=hidden.dtype, device="meta")
        return LazyLogits(expr, Memory(expr), meta, hidden.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """The gradients of the operands; a fused loss sends none this way unless code asks for it.

        Collectives: with real gradients of a sharded vocabulary, two all-gathers a parameter.
        """
        product, needed, given = ctx.product, ctx.needs_input_grad[1:], ctx.given
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.given = None  # a kept loss keeps none of them
        if grad is None:
            return None, None, None, None
        _check_not_batched(grad)
        if isinstance(grad, Passenger) and grad.memory.made is None:
            return (None, *grad.load[product], None)[:4]
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


# Whether code, and not a node of autograd, calls an operator of a passenger.
_reading: ContextVar[bool] = ContextVar("fusedce_reading", default=False)
_CARRIES = frozenset((
    aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default,
    aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.tanh_backward.default,
    aten.slice_backward.default, aten.select_backward.default, aten._unsafe_view.default,
))  # fmt: skip


class Passenger(LazyLogits):
    """The gradient of logits on its way to the head, without values until code reads them.

    Hooks of DDP and FSDP ask when a gradient comes, and hand it on. At the head, a passenger that
    nobody has read gives the gradients of the operands that it carries. Once read, or added to the
    gradient of another loss, it is the real gradient, and the head computes with that one, as it
    does for any hook's result.

    Attributes:
        load: the gradients of each product's operands.
    """

    load: dict[Product, list[Tensor | None]]

    @classmethod
    def of(cls, load: Any, expr: Expr, meta: Tensor, device: torch.device) -> Passenger:
        """The gradient of the logits ``expr``, made of ``load`` where nobody reads it."""
        new = cls(expr, Memory(expr), meta, device)
        new.load = load
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _reading.set(True)
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            _reading.reset(before)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        x, kwargs = args[0], kwargs or {}
        carries = func in _CARRIES or facts_of(func).is_view
        if func is not aten.tanh_backward.default:  # which takes the logits, too
            rest = tree_leaves((args[1:], kwargs))
            carries = carries and not any(isinstance(t, Tensor) and t.dim() for t in rest)
        unread = isinstance(x, Passenger) and x.memory.made is None and not _reading.get()
        if not carries or not unread:
            return func(*real(args, "backward"), **real(kwargs, "backward"))
        meta = func(*without_data(args), **{k: v for k, v in kwargs.items() if k != "device"})
        expr = Expr(None, func, kept(args), kwargs, tuple(meta.shape))
        return Passenger.of(x.load, expr, meta, x.device)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.materialize("repr"))


_ALWAYS = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)


class Route(torch.autograd.Function):
    """The loss, as a function of the logits and of the products' operands."""

    @staticmethod
    def forward(
        ctx: Any, logits: LazyLogits, always: Tensor, fused: Fused, native: Any, dtype: torch.dtype,
        given: Given, saved: tuple[Tensor, ...], *operands: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return the fused loss in ``dtype``.

        Args:
            logits: the lazy logits; ``operands``: those of their products, in the graph.
            always: a leaf whose node runs unless ``backward(inputs=...)`` names other tensors.
            fused: the fused loss of the leaves in ``given``, and what it has ``saved``.
            native: computes an upstream gradient times that of torch's own loss by real logits.
        """
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        ctx.logits, ctx.fused, ctx.native, ctx.given = logits, fused, native, given
        return fused.loss.detach().to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """The gradients of the operands; or of the logits, where code may ask for it."""
        nothing = (None,) * len(ctx.needs_input_grad)
        if grad is None:
            return nothing
        _check_not_batched(grad)
        saved = ctx.saved_tensors  # the second time, torch raises its error
        z, fused, native, given = ctx.logits, ctx.fused, ctx.native, ctx.given
        if torch.is_grad_enabled():
            return native(z + 0, grad), *nothing[1:]
        expr, products = z.expr, z.expr.products

        def make() -> Tensor:
            z = expr.values("the gradient of logits").detach().requires_grad_()
            return native(z, grad)

        if any(p.watched for p in products):
            return make(), *nothing[1:]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        leaves = [x for values in given.values() for x in values if x.requires_grad]
        left = iter(fused.gradients(saved, leaves, grad, keep))
        load = {
            p: [next(left) if x.requires_grad else None for x in values]
            for p, values in given.items()
        }
        if not keep:  # a kept loss keeps none of them
            ctx.logits = ctx.given = ctx.fused = None
        # With `backward(inputs=...)`, logits may be among the inputs.
        all_run = torch._C._will_engine_execute_node(ctx.next_functions[1][0])
        if all_run and not any(p.hooked for p in products):
            return *nothing[:7], *(g for grads in load.values() for g in grads)
        meta = torch.empty(expr.after, dtype=z.dtype, device="meta")
        root = Expr(None, make, (), {}, expr.after)
        return Passenger.of(load, root, meta, grad.device), *nothing[1:]


# ---- the two witnesses ----------------------------------------------------------------------


class Fused(NamedTuple):
    """A fused loss, and the way of its gradient to the leaves that it was computed from."""

    loss: Tensor  # (): with a graph, unless the sum has computed its gradients
    sums: SumWithGrads | None = None
    divisor: Tensor | None = None  # () of the sum

    def gradients(
        self, saved: tuple[Tensor, ...], leaves: list[Tensor], upstream: Tensor, keep: bool
    ) -> Sequence[Tensor | None]:
        """Gradients of the leaves; without ``keep``, for the last time."""
        upstream = upstream.to(self.loss.dtype)
        outputs: Sequence[Tensor] = (self.loss,)
        grads: Sequence[Tensor] = (upstream,)
        if self.sums is not None:
            if self.divisor is not None:
                upstream = upstream / self.divisor
            grads = [g for g in self.sums.finish.gradients(saved, upstream) if g is not None]
            outputs = self.sums.inputs
            if len(outputs) == len(leaves) and all(map(_is_reshaped, outputs, leaves)):
                # Autograd adds a tied weight's other gradient in place, unless this is a view.
                pairs = zip(grads, leaves, strict=True)
                return [g if g.shape == x.shape else g.view(x.shape) for g, x in pairs]
        return torch.autograd.grad(outputs, leaves, grads, retain_graph=keep, allow_unused=True)


def _is_reshaped(x: Tensor, leaf: Tensor) -> bool:
    """Whether ``x`` has the entries of ``leaf`` in the same order."""
    same = x is leaf or (x._base is leaf and x.is_contiguous() and leaf.is_contiguous())
    return same and x.numel() == leaf.numel()


Given = dict[Product, list[Tensor]]  # values of each product's operands when the head ran


def _nodes(node: Any) -> Iterator[Any]:
    """The nodes of autograd between logits and their products, as far as they are known."""
    yield node
    if isinstance(node, MakeLogits._backward_cls) or node is None:
        return
    if isinstance(node, BackwardCFunction) or node.name() in NODES:
        for below, _ in node.next_functions:
            if below is not None:
                yield from _nodes(below)


def _given(x: LazyLogits) -> tuple[Given, list[Tensor | None]] | None:
    """The operands behind ``x``, as leaves and in the graph.

    ``None`` if the two witnesses disagree, or an operand's ``requires_grad`` is another now.
    """
    products, nodes = x.expr.products, list(_nodes(x.grad_fn))
    made: list[Any] = [n for n in nodes if isinstance(n, MakeLogits._backward_cls)]
    functions = [n for n in nodes if isinstance(n, BackwardCFunction) and n not in made]
    kinds = [n.name() for n in nodes if n is not None and not isinstance(n, BackwardCFunction)]
    if x.memory.written or not made or None in nodes or not NODES.issuperset(kinds):
        return None
    if any(p.watched for p in products) or max(len(products), len(made)) > len(set(products)):
        return None  # a part of the same logits may be detached
    if functions:
        # A user's function may do anything. Its backward gets a passenger: if it returns that
        # unread, it changes nothing; if it reads it, the real gradient is computed.
        if number_of_steps(kinds) != number_of_steps(x.expr.names()):
            return None
        for product in products:
            product.hooked = True
    of_nodes = {n.product: n.given and (n.given, n.needs_input_grad[1:]) for n in made}
    if None in of_nodes.values() or not of_nodes.keys() <= set(products):
        return None  # backward has run already
    given: Given = {}
    live: list[Tensor | None] = []
    for product in products:
        values = product.values(by_all_ranks=True)
        operands, needed = (x[: len(values)] for x in of_nodes.get(product, ((None,) * 3,) * 2))
        wants = [t is not None and t.requires_grad for t in operands]
        if wants != list(map(bool, needed)):
            return None
        given[product] = [v.detach().requires_grad_(w) for v, w in zip(values, wants, strict=True)]
        live += operands
    return given, live


# ---- the loss -------------------------------------------------------------------------------


def _fused(
    x: LazyLogits, p: Rows, target: Tensor, weight: Tensor | None, ignore_index: int,
    reduction: Any, label_smoothing: float,
) -> Fused:  # fmt: skip
    product, observer = x.expr.products[0], LossObserver.current.get()
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
        return Fused(loss / (target != ignore_index).any() if reduction == "mean" else loss)
    denominator, monitor = (observer.denominator, observer.monitor) if observer else (None, ())
    factor = expected_factor() if reduction == "sum" else None
    if reduction == "mean":
        factor = None if denominator is None else denominator.reciprocal()
    expects = reduction == "sum" and factor is None  # then an outer expectation holds
    sums: SumWithGrads | None = None
    with nullcontext() if expects or factor is expected() else expecting(factor):
        if not sharded and not monitor:
            sums = sum_with_grads(Problem(p.hidden, w, target, **options))
        if sums is None:
            out = fused_ce(p.hidden, w, target, **options, monitor=monitor)
        else:
            out = sums.out
    if observer is not None:
        observer.observe(out, reduction)
    if reduction == "sum":
        return Fused(out.loss_sum, sums)
    divisor = out.n_valid if denominator is None else denominator  # (torch's mean of none is NaN)
    return Fused(out.loss_sum / divisor, sums, divisor)


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
        plain and not x.memory.written
        and target.dtype in (torch.int64, torch.int32) and target.device == x.device
        and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
        and 0 <= label_smoothing <= 1 and (weight is None or weight.dtype != torch.float64)
        and torch._C._functorch.maybe_current_level() is None and forward_ad._current_level < 0
    ):  # fmt: skip
        return native(x)
    if wanted:
        given, live = _given(x) or (None, [])
    else:
        given, live = {p: p.values(by_all_ranks=True) for p in x.expr.products}, []
    with torch.set_grad_enabled(wanted), no_autocast(x.device):
        p, fused = None if given is None else rows_of(x.expr, given), None
        if (
            p is not None and p.class_dim == min(1, x.dim() - 1)
            and target.shape == p.hidden.shape[:-1]
            and (p.classes.start == 0 or not is_vocabulary_shard(p.weight))
        ):  # fmt: skip
            fused = _fused(x, p, target, weight, ignore_index, reduction, label_smoothing)
    if fused is None:
        return native(x)
    x.expr.products[0].report.losses += 1
    dtype = x.dtype if autocast_dtype(x.device) is None else fused.loss.dtype
    if wanted:
        target, weight = target.clone(), None if weight is None else weight.detach().clone()
        reduction = reduction if fused.divisor is None else "sum"
        options = (weight, None, ignore_index, None, reduction, label_smoothing)
        again = functools.partial(_native_gradient, func, target, options, fused.divisor)
        saved = () if fused.sums is None else fused.sums.saved
        return Route.apply(x, _ALWAYS, fused, again, dtype, given, saved, *live)
    return fused.loss.to(dtype)


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
