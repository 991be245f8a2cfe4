"""Rules for the operators that autograd's backward nodes apply to a lazy gradient.

Closures that are kept must not refer to the gradient itself, since it may refer to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedce.head.lazy.grad import RULES, LogitsGrad, LogitsSource, Term
from fusedce.head.lazy.ops import LazyLayout, aten, op_info
from fusedce.head.lazy.steps import Cap, Index, LogitsStep, Scale, Slice, identity
from fusedce.head.lazy.tensor import real


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


def _undo(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Undo a step of the logits, or multiply by a factor."""
    if not isinstance(x, LogitsGrad):
        if func is not aten.mul.Tensor or not isinstance(args[0], LogitsGrad):
            return NotImplemented
        x, args = args[0], (x,)
    row = op_info(func).undoing
    step = None if row is None or row.undo is None else row.undo(x, *args, **kwargs)
    if isinstance(step, Scale) or (row is not None and _is_factor(args)):
        terms = tuple(_scaled(t, step, func, args) for t in x.terms)
        return _moved(x, x.like, lambda t: func(t, *args, **kwargs), terms)
    if step is None:
        return NotImplemented
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
    """``copy_`` of one lazy gradient into another, which autograd does for writes into views."""
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


def _is_factor(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and isinstance(args[0], Tensor) and args[0].dim() == 0


def _scaled(term: Term, step: LogitsStep | None, func: Any, args: tuple[Any, ...]) -> Term:
    """Multiply a term: a factor undoes the step with the same factor, or joins its factors."""
    if term.left and term.left[0] == step:
        return term._replace(left=term.left[1:])
    if isinstance(step, Scale):
        factor = step.number if step.kind == "mul" else 1 / step.number
    else:
        factor = args[0] if func is aten.mul.Tensor else 1 / args[0]
    return term._replace(factors=(*term.factors, factor))


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
RULES |= {
    None: _undo,
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
