"""The operators between output head and loss that the fused loss can take into account.

Each rule maps the operands from which the logits are computed (:class:`LogitForm`) to those after
the operator. It returns ``None`` if the fused loss cannot do that; then the loss is computed from
real logits. To add an operator, add a rule: its values and its derivative are torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ranks.layout import is_vocabulary_shard
from .linear_call import Expr, LinearCall, Shape

aten = torch.ops.aten
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class LogitForm(NamedTuple):
    """``logits = cap * tanh(scale / cap * (hidden @ weight.T + bias))``, of some classes."""

    hidden: Tensor  # (..., H, ...): the logits' dimensions, with H in the place of the classes
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    class_dim: int  # position of the class dimension
    classes: slice  # the part of the vocabulary that is left
    scale: float = 1.0  # before the cap
    cap: float | None = None  # the factor after a tanh; None: no tanh
    rounded: bool = False  # the logits were cast to a coarser dtype than the hidden state's

    def n_classes(self) -> int:
        """The number of classes that are left."""
        return int(self.classes.stop - self.classes.start)

    def is_linear(self) -> bool:
        """Whether nothing has changed the values of all classes, which come last."""
        return (
            self.scale == 1.0 and self.cap is None and not self.rounded
            and self.class_dim == self.hidden.dim() - 1
            and self.classes == slice(0, self.weight.shape[0])
        )  # fmt: skip


# A function of the form before, the shape after the operator, and its other arguments.
Rule = Callable[..., LogitForm | None]


def _cast(p: LogitForm, after: Shape, dtype: Any = None, **_: Any) -> LogitForm | None:
    if dtype is None:
        return p
    if dtype not in _DTYPES or (dtype == torch.float64 != p.hidden.dtype):
        return None  # float8 saturates; float64 asks for a loss in float64
    coarser = torch.finfo(dtype).eps > torch.finfo(p.hidden.dtype).eps
    return p._replace(rounded=p.rounded or coarser)


def _reshape(p: LogitForm, after: Shape, *_: Any) -> LogitForm | None:
    if p.class_dim != p.hidden.dim() - 1 or after[-1] != p.n_classes():
        return None  # the classes may be mixed with something else
    hidden = p.hidden.reshape(*after[:-1], p.hidden.shape[-1])
    return p._replace(hidden=hidden, class_dim=len(after) - 1)


def _permute(p: LogitForm, after: Shape, dims: Any) -> LogitForm | None:
    dims = [d % len(after) for d in dims]
    return p._replace(hidden=p.hidden.permute(dims), class_dim=dims.index(p.class_dim))


def _transpose(p: LogitForm, after: Shape, a: int = 0, b: int = -1) -> LogitForm | None:  # or t()
    dims = list(range(len(after)))
    dims[a], dims[b] = dims[b], dims[a]
    return _permute(p, after, dims)


def _along(func: Any, p: LogitForm, after: Shape, dim: int, *args: Any) -> LogitForm | None:
    """The operator ``func`` chooses positions along one dimension."""
    dim, c = dim % p.hidden.dim(), p.class_dim
    if dim == c:
        return None
    hidden = func(p.hidden, dim, *args)
    return p._replace(hidden=hidden, class_dim=c - (dim < c and hidden.dim() < p.hidden.dim()))


def _slice(
    p: LogitForm, after: Shape, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> LogitForm | None:
    if dim % len(after) != p.class_dim:
        return _along(aten.slice.Tensor, p, after, dim, start, end, step)
    start, stop, step = slice(start, end, step).indices(p.n_classes())
    if step != 1 or stop <= start:
        return None
    return p._replace(classes=slice(p.classes.start + start, p.classes.start + stop))


def indexed_dims(indices: Sequence[Tensor | None]) -> int:
    """The number of dimensions that indices stand for: a mask stands for all of its own."""
    return sum(1 if i is None or not is_mask(i) else i.dim() for i in indices)


def is_mask(index: Tensor) -> bool:
    """Whether an index says of each position if it is chosen."""
    return index.dtype in (torch.bool, torch.uint8)


def _index(p: LogitForm, after: Shape, indices: Any) -> LogitForm | None:
    if p.class_dim != p.hidden.dim() - 1 or indexed_dims(indices) > p.class_dim:
        return None
    hidden = p.hidden[tuple(slice(None) if i is None else i for i in indices)]
    return p._replace(hidden=hidden, class_dim=len(after) - 1)


def _number(x: Any) -> float | None:
    """A number, or the value of a ``()`` tensor that is not trained."""
    if isinstance(x, Tensor):
        return None if x.dim() or x.is_complex() or x.requires_grad else float(x)
    return float(x) if isinstance(x, (int, float)) else None


def _times(p: LogitForm, after: Shape, other: Any) -> LogitForm | None:
    factor = _number(other)
    if factor is None:
        return None
    return p._replace(scale=p.scale * factor) if p.cap is None else p._replace(cap=p.cap * factor)


def _over(p: LogitForm, after: Shape, other: Any) -> LogitForm | None:
    number = _number(other)
    return _times(p, after, 1 / number) if number else None


def _plus(p: LogitForm, after: Shape, other: Any, *, alpha: float = 1) -> LogitForm | None:
    if alpha != 1 or not p.is_linear() or is_vocabulary_shard(p.weight):
        return None
    if after != (*p.hidden.shape[:-1], p.n_classes()):
        return None  # the sum has more rows
    if isinstance(other, LogitForm):  # LoRA: [h, s A h] @ [W, B].T
        rows = p.hidden.shape[:-1]
        if not other._replace(scale=1.0).is_linear() or other.hidden.shape[:-1] != rows:
            return None
        hidden = torch.cat([p.hidden, (other.hidden * other.scale).to(p.hidden.dtype)], -1)
        weight = torch.cat([p.weight, other.weight.to(p.weight.dtype)], -1)
        bias = other.bias if other.bias is None else other.bias * other.scale
        p = p._replace(hidden=hidden, weight=weight)
        return p if bias is None else p._replace(bias=bias if p.bias is None else p.bias + bias)
    if not isinstance(other, Tensor) or other.requires_grad or other.shape[-1:] != after[-1:]:
        return None
    finer = torch.promote_types(p.hidden.dtype, other.dtype) != p.hidden.dtype
    if finer or other.numel() != after[-1]:
        return None  # the sum with a finer bias would be rounded here
    added = other.reshape(-1).to(p.hidden.dtype)
    return p._replace(bias=added if p.bias is None else p.bias + added)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.detach.default, aten.alias.default, aten.clone.default,
                     aten.lift_fresh.default), lambda p, *_, **__: p),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
                     aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
                     aten.unsqueeze.default), _reshape),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _times),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _over),
    aten._to_copy.default: _cast,
    aten.permute.default: _permute,
    **dict.fromkeys((aten.transpose.int, aten.t.default), _transpose),
    aten.slice.Tensor: _slice,
    **{f: functools.partial(_along, f) for f in (aten.select.int, aten.index_select.default)},
    aten.index.Tensor: _index,
    aten.neg.default: lambda p, after: _times(p, after, -1.0),
    aten.tanh.default: lambda p, after: None if p.cap is not None else p._replace(cap=1.0),
    aten.add.Tensor: _plus,
}  # fmt: skip


def form_of(expr: Expr, given: Mapping[LinearCall, Sequence[Tensor]]) -> LogitForm | None:
    """The operands from which the fused loss computes these logits; ``None`` if it cannot.

    Its hidden state is ``(..., H)``, wherever the classes are. Its scale and cap are options of the
    loss: ``b * tanh(a * z)`` is a soft-cap of ``b`` after a scale of ``a * b``.
    """
    p = _applied(expr, given)
    if p is None:
        return None
    if p.cap is not None:
        p = p._replace(scale=p.scale * p.cap, cap=abs(p.cap))
        if not p.cap or not _TINY <= p.cap <= _HUGE:
            return None
    if p.class_dim != p.hidden.dim() - 1:
        p = p._replace(hidden=p.hidden.movedim(p.class_dim, -1))
    return p if -_HUGE <= p.scale <= _HUGE else None


def _applied(expr: Expr, given: Mapping[LinearCall, Sequence[Tensor]]) -> LogitForm | None:
    if expr.call is not None:
        hidden, weight, *bias = given[expr.call]
        classes = slice(0, weight.shape[0])
        return LogitForm(hidden, weight, bias[0] if bias else None, hidden.dim() - 1, classes)
    args = [_applied(arg, given) if isinstance(arg, Expr) else arg for arg in expr.args]
    rule = None if args[0] is None else RULES.get(expr.func)
    return rule and rule(args[0], expr.shape, *args[1:], **expr.kwargs)
