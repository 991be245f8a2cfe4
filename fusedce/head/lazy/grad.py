"""Lazy gradients of logits, which carry the gradients of the head's inputs instead of values.

The fused loss computes the gradients of the hidden state and of the head's parameters without that
of the logits. Torch's backward nodes between loss and head need a gradient of the logits; they get
a :class:`LogitsGrad` and do this to it:

* undoing a step that the loss took into account (:data:`fusedce.head.lazy.table.STEPS`) removes
  that step from the list of steps left to undo, and so does rearranging values;
* a factor multiplies the gradients of the head's inputs; gradients of other uses of the logits are
  added, lazy ones as terms and real ones as a dense part;
* for any other operator, and for code that reads values, the real gradient is computed.

At the head no step is left. If one is, because a user's function has a backward that is not its
derivative, the real gradient is computed as well. Unexpected nodes of autograd therefore cost
memory, and never a wrong result.

Closures that are kept must not refer to the gradient itself, since it may refer to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.head.call import HeadCall
from fusedce.head.lazy.logits import LazyLogits, LogitsSource, Memory
from fusedce.head.lazy.steps import Cap, Index, LogitsStep, Scale, Slice, identity
from fusedce.head.lazy.tensor import (
    NO_TORCH_FUNCTION,
    Lazy,
    LazyLayout,
    OpInfo,
    aten,
    op_info,
    real,
    write,
)


def check_not_batched(grad: Tensor) -> None:
    """Raise ``RuntimeError`` for a batch of gradients, which ``vmap`` passes to a backward."""
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "a replaced head takes one gradient at a time, not many (is_grads_batched=True, "
            "vectorize=True): call fusedce.restore_loss_head(model) for this, since the backward "
            "passes of fusedce's lazy logits cannot be vectorised"
        )


class Term(NamedTuple):
    """The part of a gradient that comes from one loss."""

    call: HeadCall
    input_grads: tuple[Tensor | None, ...]  # of the hidden state and the head's parameters
    bias: Tensor | None  # (V,), gradient of the bias that was added to the logits
    left: tuple[LogitsStep, ...]  # steps that autograd has yet to undo, the last one first
    factors: tuple[Any, ...] = ()  # numbers or () tensors

    def scaled(self, x: Tensor | None) -> Tensor | None:
        """``x`` times the factors; ``None`` stays ``None``."""
        for factor in self.factors:
            x = None if x is None else x * factor
        return x


class LogitsGrad(Lazy):
    """A lazy gradient of logits: see the module.

    Attributes:
        terms: the parts that come from losses.
        dense: a real gradient to be added, or ``None``.
        make: computes the real gradient of the ``terms``; ``None`` without terms.
        base: the gradient that this one is a view of, or ``None``.
        move: computes this view's numbers from those of its base, in the same memory.
        numbers: the real gradient, once computed.
        exposed: whether code may write into ``numbers``, which then replace the terms.
        writes: number of writes into this gradient.
        base_writes: number of the base's writes that ``numbers`` include.
        reshaped: whether this is a view of the base's values in the same order.
    """

    terms: tuple[Term, ...]
    dense: Tensor | None
    make: Callable[[str], Tensor] | None
    base: LogitsGrad | None = None
    move: Callable[[Tensor], Tensor]
    numbers: Tensor | None = None
    exposed = False
    writes = 0
    base_writes = 0
    reshaped = False

    @staticmethod
    def __new__(
        cls,
        layout: LazyLayout,
        device: torch.device,
        terms: tuple[Term, ...],
        dense: Tensor | None,
        make: Callable[[str], Tensor] | None = None,
    ) -> LogitsGrad:
        new: LogitsGrad = layout.wrapper(cls, device)
        new.like, new.terms, new.dense, new.make = layout, terms, dense, make
        return new

    def sync(self) -> None:
        """Take over writes into the base."""
        if self.base is not None:
            self.base.sync()
            if self.base.writes != self.base_writes:
                self._become(self.move(self.base.materialize("view")))
                self.base_writes = self.base.writes

    def materialize(self, operation: str) -> Tensor:
        """The real gradient, without a graph."""
        self.sync()
        if self.numbers is None:
            with torch.no_grad():
                if self.terms and self.make is not None:
                    self.numbers = self.make(operation).to(self.dtype)
                    if self.dense is not None:
                        self.numbers = self.numbers + self.dense
                elif self.dense is not None:
                    self.numbers = self.dense.to(self.dtype, copy=True)
                else:
                    self.numbers = torch.zeros_like(self.like.meta(), device=self.device)
                if self.numbers.stride() != self.like.stride():
                    new = torch.empty_like(self.like.meta(), device=self.device)
                    self.numbers = new.copy_(self.numbers)
        return self.numbers

    def expose(self, operation: str) -> Tensor:
        """The real gradient, for code that may write into it."""
        self.sync()
        if not self.exposed:
            if self.base is None:
                self._become(self.materialize(operation))
            else:
                self._become(self.move(self.base.expose(operation)))
                self.base_writes = self.base.writes
            self.exposed = True
        assert self.numbers is not None
        return self.numbers

    def _become(self, numbers: Tensor) -> None:
        self.terms, self.dense, self.numbers = (), numbers, numbers
        self.writes += 1

    def begin_write(self, operation: str) -> None:
        """Make the numbers real; they replace the terms."""
        self.expose(operation)

    def end_write(self) -> None:
        """Count a write into this gradient and into its base."""
        self.writes += 1
        if self.base is not None:
            self.base.end_write()
            self.base_writes = self.base.writes

    @classmethod
    def dispatch(cls, func: Any, op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply the operator's rule, or the operator itself to the real gradient."""
        with NO_TORCH_FUNCTION():
            for x in args[:2]:
                if isinstance(x, LogitsGrad) and x.base is not None:
                    x.sync()
            result = (RULES.get(func) or RULES[None])(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
            name, x = str(func), args[0] if args else None
            if op.writes:
                return write(func, op, args, kwargs)
            if isinstance(x, LogitsGrad) and op.is_view:
                return func(x.expose(name), *real(args[1:], name), **real(kwargs, name))
            return func(*real(args, name), **real(kwargs, name))


def _zeros(func: Any, x: LogitsGrad, *args: Any, dtype: Any = None, **_: Any) -> Any:
    sizes = args[0] if func is aten.new_zeros.default else x.shape
    return LogitsGrad(LazyLayout(sizes, dtype or x.dtype), x.device, (), None)


def _empty(
    func: Any, x: LogitsGrad, sizes: Any, strides: Any, *, dtype: Any = None, **_: Any
) -> Any:
    like = torch.empty_strided(sizes, strides, dtype=dtype or x.dtype, device="meta")
    return LogitsGrad(LazyLayout.of(like), x.device, (), None)


def _cast(func: Any, x: LogitsGrad, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    dtype = dtype or x.dtype
    if device not in (None, x.device) or not dtype.is_floating_point:
        return NotImplemented
    return _moved(x, x.like.after(torch.Tensor.to, dtype), lambda t: t.to(dtype), x.terms)


def _same(func: Any, x: LogitsGrad, *args: Any, **kwargs: Any) -> Any:
    move = lambda t: func(t, *args, **kwargs)  # noqa: E731
    view = move if op_info(func).is_view else None
    return _moved(x, x.like.after(func, *args, **kwargs), move, x.terms, view)


def _reshape(func: Any, x: LogitsGrad, *args: Any) -> Any:
    layout = x.like.after(func, *args)
    # A dense part may be laid out in another way.
    new = _moved(x, layout, lambda t: t.reshape(layout.shape), x.terms, lambda t: func(t, *args))
    new.reshaped = True
    return new


def _multiply_or_undo(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiply the gradient by a factor, or undo a step: the rule of all other operators."""
    if not isinstance(x, LogitsGrad):  # a factor times the gradient: exchange them
        if func is not aten.mul.Tensor or not isinstance(args[0], LogitsGrad):
            return NotImplemented
        x, args = args[0], (x,)
    row = op_info(func).undoing
    if row is None or row.undo is None:
        return NotImplemented
    step = row.undo(x, *args, **kwargs)
    other = args[0] if func in (aten.mul.Tensor, aten.div.Tensor) else None
    if isinstance(step, Scale) or (isinstance(other, Tensor) and not other.dim()):
        return _multiply(func, x, step, args)
    return NotImplemented if step is None else _undo(func, x, step, args, kwargs)


def _multiply(func: Any, x: LogitsGrad, step: LogitsStep | None, args: tuple[Any, ...]) -> Any:
    """Multiply the terms by the number of ``step``, or by ``args[0]``, a ``()`` tensor."""
    if isinstance(step, Scale) and (not math.isfinite(step.number) or not step.number):
        return NotImplemented  # torch gives NaN for some of the entries, infinities for others
    terms = tuple(_times(t, step, func, args) for t in x.terms)
    return _moved(x, x.like, lambda t: func(t, *args), terms)


def _times(term: Term, step: LogitsStep | None, func: Any, args: tuple[Any, ...]) -> Term:
    """Undo the term's next step if it has this factor; otherwise the factor joins the others.

    A user's hook may multiply by the number of the next step. Its factor then undoes that step, and
    autograd's own joins the others. The result is the same, since factors commute with all steps.
    """
    if term.left and term.left[0] == step:
        return term._replace(left=term.left[1:])
    if isinstance(step, Scale):
        factor = step.number if step.kind == "mul" else 1 / step.number
    else:
        factor = args[0] if func is aten.mul.Tensor else 1 / args[0]
    return term._replace(factors=(*term.factors, factor))


def _undo(func: Any, x: LogitsGrad, step: LogitsStep, args: Any, kwargs: dict[str, Any]) -> Any:
    """Undo ``step``, which must be the next one of all terms and fit the gradient's shape."""
    if any(not t.left or t.left[0] != step for t in x.terms):
        return NotImplemented
    after = getattr(step, "after", tuple(x.shape))
    of_select = isinstance(step, Slice) and len(after) > x.dim()
    if tuple(x.shape) != after and not of_select:
        return NotImplemented
    terms = tuple(t._replace(left=t.left[1:]) for t in x.terms)
    if isinstance(step, Cap):
        logits = LogitsSource(args[0])
        return _moved(x, x.like, lambda t: func(t, logits.materialize("tanh_backward")), terms)
    layout = x.like.after(func, *args, **kwargs)
    move = lambda t: func(t, *args, **kwargs)  # noqa: E731
    return _moved(x, layout, move, terms, move if op_info(func).is_view else None)


def _moved(
    x: LogitsGrad,
    layout: LazyLayout,
    move: Callable[[Tensor], Tensor],
    terms: tuple[Term, ...],
    view: Callable[[Tensor], Tensor] | None = None,
) -> LogitsGrad:
    """The gradient after a linear operation ``move``; ``view`` is the same as a view of numbers."""
    make = x.make and _after(x.make, move)
    dense = None if x.dense is None else move(x.dense)
    new = LogitsGrad(layout, x.device, terms, dense, make)
    if view is not None:
        new.base, new.move, new.base_writes = x, view, x.writes
    return new


def _after(make: Callable[[str], Tensor], move: Callable[[Tensor], Tensor]) -> Any:
    return lambda operation: move(make(operation))


def _copy(func: Any, x: Any, source: Any, *_: Any) -> Any:
    """``copy_`` of one lazy gradient into another, which autograd does for writes into views.

    Afterwards ``x`` and its base stand for ``source``. Real values are copied instead if code holds
    the memory of one of them (exposed), if the base is a view itself, or if ``x`` is not all of the
    base in the same order (reshaped), so that ``source`` would replace a part of it only.
    """
    if not isinstance(x, LogitsGrad) or not isinstance(source, LogitsGrad):
        return NotImplemented
    base = x.base
    if source.shape != x.shape or x.exposed:
        return NotImplemented
    if base is not None:
        if base.base is not None or base.exposed or not x.reshaped:
            return NotImplemented
        shape = base.shape
        base.terms, base.numbers = source.terms, None
        base.dense = None if source.dense is None else source.dense.reshape(shape)
        base.make = source.make and _after(source.make, lambda t: t.reshape(shape))
    x.terms, x.dense, x.make, x.numbers = source.terms, source.dense, source.make, None
    x.end_write()
    return x


def _add(func: Any, a: Any, b: Any, *, alpha: float = 1) -> Any:
    if alpha != 1:
        return NotImplemented
    if not isinstance(a, LogitsGrad):
        if func is aten.add_.Tensor:
            return NotImplemented
        a, b = b, a
    if func is aten.add_.Tensor and (a.exposed or a.base is not None):
        return NotImplemented
    if not isinstance(b, Tensor) or b.shape != a.shape:
        return NotImplemented
    if isinstance(b, LogitsGrad):
        terms, other = (*a.terms, *b.terms), b.dense
    else:
        terms, other = a.terms, real(b, str(func))
    dense = a.dense
    if other is not None:
        dense = other if dense is None else dense + other
    makes = [g.make for g in (a, b) if isinstance(g, LogitsGrad) and g.terms and g.make]
    make: Any = makes[0] if len(makes) == 1 else lambda name: sum(m(name) for m in makes)
    if func is aten.add_.Tensor:
        a.terms, a.dense, a.make, a.numbers = terms, dense, make, None
        a.end_write()
        return a
    return LogitsGrad(a.like, a.device, terms, dense, make)


def _put_back(func: Any, into: Any, indices: Any, grad: Any, *_: Any) -> Any:
    """Undo an index of rows: autograd adds the rows' gradient into zeros."""
    if not isinstance(into, LogitsGrad) or not isinstance(grad, LogitsGrad):
        return NotImplemented
    if into.terms or into.dense is not None:
        return NotImplemented
    given = tuple(None if i is None else identity(i) for i in indices)
    for t in grad.terms:
        step = t.left[0] if t.left else None
        if not isinstance(step, Index) or step.given != given:
            return NotImplemented
        if step.before != tuple(into.shape) or step.after != tuple(grad.shape):
            return NotImplemented
    terms, layout = tuple(t._replace(left=t.left[1:]) for t in grad.terms), into.like

    def move(t: Tensor) -> Tensor:
        zeros = torch.zeros_like(layout.meta(), device=t.device, dtype=t.dtype)
        return aten.index_put.default(zeros, indices, t, True)

    return _moved(grad, layout, move, terms)


def _sum(func: Any, x: LogitsGrad, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum over all rows: the gradient of a bias that was added to the logits."""
    V = x.shape[-1]
    rows = sorted(d % x.dim() for d in dims or ())
    if rows != list(range(x.dim() - 1)) or dtype not in (None, x.dtype):
        return NotImplemented
    total = None if x.dense is None else x.dense.sum(rows)
    for t in x.terms:
        if t.bias is None or len(t.bias) != V or any(isinstance(s, (Scale, Cap)) for s in t.left):
            return NotImplemented
        if any(isinstance(s, Slice) and s.dim == len(s.before) - 1 for s in t.left):
            return NotImplemented
        bias: Any = t.scaled(t.bias)
        total = bias if total is None else total + bias
    if total is None:
        return NotImplemented
    shape = (*(1 for _ in rows), V) if keepdim else (V,)
    return total.to(x.dtype).view(shape)


_INDEX_PUTS = ("_index_put_impl", "_index_put_impl_", "index_put", "index_put_",
               "_unsafe_index_put")  # fmt: skip
# Rules by operator; the key `None` stands for all others. A rule is called with the operator and
# its arguments, and may return `NotImplemented`.
RULES: dict[Any, Callable[..., Any]] = {
    None: _multiply_or_undo,
    **dict.fromkeys((aten.add.Tensor, aten.add_.Tensor), _add),
    **dict.fromkeys((getattr(aten, n).default for n in _INDEX_PUTS if hasattr(aten, n)), _put_back),
    **dict.fromkeys((aten.new_zeros.default, aten.zeros_like.default), _zeros),
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
         aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default),
        _reshape,
    ),
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.clone.default), _same),
    aten.new_empty_strided.default: _empty,
    aten.copy_.default: _copy,
    aten.sum.dim_IntList: _sum,
    aten._to_copy.default: _cast,
}  # fmt: skip


class MakeLogits(torch.autograd.Function):
    """Lazy logits ``(..., V)`` of a call, as a function of hidden state and parameters."""

    @staticmethod
    def forward(ctx: Any, call: HeadCall, hidden: Tensor, *tensors: Tensor) -> LazyLogits:
        """Map ``hidden (..., H)`` and the head's parameters to lazy logits ``(..., V)``."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(hidden, *tensors)
        shape = (*hidden.shape[:-1], call.V)
        return LazyLogits(Memory(call), (), LazyLayout(shape, hidden.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """The gradients that a lazy gradient carries, plus those of its dense part."""
        needed = ctx.needs_input_grad[1:]
        if grad is None:
            return (None, *(None for _ in needed))
        call: HeadCall = ctx.call
        parts: list[Sequence[Any]] = []
        if isinstance(grad, LogitsGrad):
            grad.sync()
            terms, dense = grad.terms, grad.dense
            if any(t.left or t.call is not call for t in terms):
                terms, dense = (), grad.materialize("backward of the head")
            parts = [[t.scaled(x) for x in t.input_grads] for t in terms]
        else:
            check_not_batched(grad)
            dense = real(grad, "backward of the head")
        if dense is not None:
            live = ctx.saved_tensors if torch.is_grad_enabled() else None
            parts.append(call.gradients(dense, needed, live))
        found: list[Any] = [None] * len(needed)
        for part in parts:
            for i, x in enumerate(part):
                if needed[i] and x is not None:
                    found[i] = x if found[i] is None else found[i] + x
        return None, *found


# This `apply` skips the checks for torch.func, whose transforms run the original head.
make_logits = super(torch.autograd.Function, MakeLogits).apply
