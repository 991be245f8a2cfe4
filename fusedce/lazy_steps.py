"""What lazy logits can be put through without being computed: steps on values and on shapes.

Each function takes lazy logits (:class:`Lazy`) and what the tensor method of that name takes, and
returns new lazy logits, or ``NotImplemented`` where only real logits will do.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedce.lazy_state import Lazy


def _with(x: Lazy, hidden: Tensor | None = None, **changes: Any) -> Any:
    """``x`` with another state; its shape follows from the hidden state and the vocabulary."""
    state = x._state._replace(gate=x.gate(), **changes)
    if not torch.is_grad_enabled():
        state = state._replace(detached=True)
    if hidden is not None:
        state = state._replace(hidden=hidden)
    shape = [*state.hidden.shape[:-1], state.vocabulary.stop - state.vocabulary.start]
    shape.insert(state.class_dim, shape.pop())
    return x.make(state._replace(shape=tuple(shape)))


# ---- steps on the values --------------------------------------------------------------------


def _number(x: Any) -> float | None:
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _mul(x: Lazy, other: Any) -> Any:
    return NotImplemented if _number(other) is None else _step(x, "mul", other)


def _div(x: Lazy, other: Any, *, rounding_mode: str | None = None) -> Any:
    if _number(other) is None or rounding_mode is not None:
        return NotImplemented
    return _step(x, "div", other)


def _add(x: Lazy, other: Any, *, alpha: float = 1) -> Any:
    """A bias: one value per entry of the vocabulary, before anything else is done to the values."""
    s = x._state
    V = s.head.V
    if (
        not isinstance(other, Tensor)
        or isinstance(other, Lazy)
        or torch.promote_types(s.hidden.dtype, other.dtype) != s.hidden.dtype  # would be rounded
        or other.numel() != V
        or other.shape[-1:] != (V,)
        or other.dim() > len(s.shape)
        or other.device != s.hidden.device
        or not _last(x)
        or s.vocabulary != slice(0, V)
        or (s.detached and other.requires_grad and torch.is_grad_enabled())
        or alpha != 1
        or s.steps
    ):
        return NotImplemented
    bias = other.reshape(V).to(s.hidden.dtype)
    bias = bias if s.bias is None else s.bias + bias
    return _copy(x, bias=bias)


def _tanh(x: Lazy) -> Any:
    return _step(x, "tanh", None)


def _step(x: Lazy, kind: str, argument: Any) -> Any:
    return _copy(x, steps=(*x._state.steps, (kind, argument)))


def _copy(x: Lazy, **changes: Any) -> Any:
    """``x`` with another state that changes values alone; it shares nothing with ``x``."""
    new = _with(x, **changes)
    if not torch.compiler.is_compiling():
        new._strided = torch.empty_like(x.strided(), dtype=new._state.dtype)
    return new


def _in_place(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The in-place twin of a step: the same object, standing for something else from now on.

    Where somebody else would have to see that, real logits are written into.
    """

    def run(x: Lazy, *args: Any) -> Any:
        shared = x._parent is not None or x._has_views or x._real is not None
        if shared or (x.wants_graph() and not torch.is_grad_enabled()):
            return NotImplemented
        result = handler(x, *args)
        if result is NotImplemented:
            return NotImplemented
        x.replace(result._state)
        return x

    return run


def _cast(x: Lazy, dtype: torch.dtype) -> Any:
    if not dtype.is_floating_point:
        return NotImplemented
    if dtype == x._state.dtype:
        return x
    return _copy(x, dtype=dtype, steps=(*x._state.steps, ("to", dtype)))


def _to(x: Lazy, *args: Any, **kwargs: Any) -> Any:
    dtype, device = kwargs.pop("dtype", None), kwargs.pop("device", None)
    for argument in args[:2]:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, Tensor):
            dtype, device = argument.dtype, argument.device
        elif isinstance(argument, (torch.device, str, int)) and not isinstance(argument, bool):
            device = argument
        elif argument is not None:
            return NotImplemented
    copy = kwargs.pop("copy", False)
    kwargs.pop("non_blocking", None)
    if kwargs or len(args) > 2:
        return NotImplemented
    if device is not None:
        device = torch.device(device)
        here = x._state.hidden.device
        if device.type != here.type or device.index not in (None, here.index):
            return NotImplemented
    new = x if dtype is None else _cast(x, dtype)
    return _copy(x) if copy and new is x else new


def _detach(x: Lazy) -> Lazy:
    bias = x._state.bias
    bias = None if bias is None else bias.detach()
    return _with(x, hidden=x._state.hidden.detach(), bias=bias, detached=True)


# ---- views: steps on the shape --------------------------------------------------------------


def _view_of(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that gives a view of its input, wherever the tensor method ``name`` gives one.

    That is asked of the method itself, which also refuses wrong arguments.
    """

    def run(x: Lazy, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        strided = None if compiling else getattr(x.strided(), name)(*args, **kwargs)
        result = step(x, *args, **kwargs)
        if result is NotImplemented or result is x:
            return result
        if strided is not None and strided.shape != result.shape:
            return NotImplemented
        if strided is None or _share(strided, x.strided()):
            result.become_view(x, name, args, kwargs)
        result._strided = strided
        return result

    return run


def _share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _contiguous(x: Lazy, **_: Any) -> Any:
    return _with(x) if torch.compiler.is_compiling() or not x.strided().is_contiguous() else x


def _last(x: Lazy) -> bool:
    return x._state.class_dim == len(x._state.shape) - 1


def _view(x: Lazy, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or not shape or not _last(x):
        return NotImplemented
    if isinstance(shape[0], torch.dtype):
        return NotImplemented
    sizes = list(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
    V = x._state.shape[-1]
    total = math.prod(x._state.shape)
    if -1 in sizes:
        known = math.prod([s for s in sizes if s != -1])
        sizes[sizes.index(-1)] = total // known if known else 0
    if sizes[-1] != V or math.prod(sizes) != total:
        return NotImplemented
    H = x._state.hidden.shape[-1]
    return _with(x, hidden=x._state.hidden.reshape(*sizes[:-1], H), class_dim=len(sizes) - 1)


def _flatten(x: Lazy, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = len(x._state.shape)
    start, end = start_dim % dims, end_dim % dims
    if not _last(x) or end == dims - 1 or start > end:
        return NotImplemented
    hidden = x._state.hidden.flatten(start, end)
    return _with(x, hidden=hidden, class_dim=hidden.dim() - 1)


def _squeeze(x: Lazy, dim: Any = None) -> Any:
    dims = len(x._state.shape)
    if not isinstance(dim, int) or not _last(x) or dim % dims == dims - 1:
        return NotImplemented
    hidden = x._state.hidden.squeeze(dim % dims)
    return _with(x, hidden=hidden, class_dim=hidden.dim() - 1)


def _unsqueeze(x: Lazy, dim: int) -> Any:
    dims = len(x._state.shape)
    if not _last(x) or not 0 <= (dim := dim % (dims + 1)) < dims:
        return NotImplemented
    hidden = x._state.hidden.unsqueeze(dim)
    return _with(x, hidden=hidden, class_dim=dims)


def _permute(x: Lazy, *order: Any, **kwargs: Any) -> Any:
    dims = len(x._state.shape)
    if kwargs or not order:
        return NotImplemented
    wanted = list(order[0] if isinstance(order[0], (tuple, list)) else order)
    wanted = [d % dims for d in wanted]
    if sorted(wanted) != list(range(dims)):
        return NotImplemented
    # Dimensions of the hidden state: those of the logits without the vocabulary, then H.
    leading = [d for d in range(dims) if d != x._state.class_dim]
    hidden = x._state.hidden.permute(
        [leading.index(d) for d in wanted if d != x._state.class_dim] + [dims - 1]
    )
    return _with(x, hidden=hidden, class_dim=wanted.index(x._state.class_dim))


def _transpose(x: Lazy, dim0: int, dim1: int) -> Any:
    dims = len(x._state.shape)
    order = list(range(dims))
    a, b = dim0 % dims, dim1 % dims
    order[a], order[b] = order[b], order[a]
    return _permute(x, order)


def _getitem(x: Lazy, index: Any) -> Any:
    if not _last(x):
        return NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, (Lazy, bool)) or (isinstance(i, Tensor) and i.dim() == 0) for i in items):
        return NotImplemented
    # Each item takes as many dimensions as it names: None takes none, a mask all of its own.
    used = sum(
        i.dim() if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) else 1
        for i in items
        if i is not None and i is not Ellipsis
    )
    dims = len(x._state.shape)
    ellipses = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(ellipses) > 1 or used > dims:
        return NotImplemented
    at = ellipses[0] if ellipses else len(items)
    items[at : at + len(ellipses)] = [slice(None)] * (dims - used)
    vocabulary = items.pop()
    if not isinstance(vocabulary, slice):
        return NotImplemented
    here = x._state.vocabulary
    start, stop, step = vocabulary.indices(here.stop - here.start)
    if step != 1 or stop <= start:
        return NotImplemented
    hidden = x._state.hidden[tuple(items)] if items else x._state.hidden
    vocabulary = slice(here.start + start, here.start + stop)
    return _with(x, hidden=hidden, class_dim=hidden.dim() - 1, vocabulary=vocabulary)


def _index(x: Lazy, index: Any) -> Any:
    """Basic indices give a view, masks and lists of indices a copy."""
    items = index if isinstance(index, tuple) else (index,)
    return _basic_index(x, index) if all(_is_basic(i) for i in items) else _getitem(x, index)


def _is_basic(i: Any) -> bool:
    if i is None or i is Ellipsis or isinstance(i, (int, slice)):
        return True
    return not torch.compiler.is_compiling() and isinstance(i, numbers.Integral)  # of numpy


_basic_index = _view_of("__getitem__", _getitem)


# ---- what the steps come to ------------------------------------------------------------------


def scale_and_cap(steps: tuple[tuple[str, Any], ...]) -> tuple[float, float | None] | None:
    """Steps as ``(logit_scale, softcap)``: ``b * tanh(a * x)`` is a cap of b after a scale of ab.

    ``None`` where they are something else, such as a second tanh.
    """
    scale, outer, capped = 1.0, 1.0, False
    for kind, argument in steps:
        if kind == "tanh":
            if capped:
                return None
            capped = True
        elif kind in ("mul", "div"):
            number = float(argument)
            factor = number if kind == "mul" else (1 / number if number else math.inf)
            if capped:
                outer *= factor
            else:
                scale *= factor
    if not math.isfinite(scale * outer) or (capped and outer == 0):
        return None
    return (scale * outer, abs(outer)) if capped else (scale, None)


METHODS: dict[str, Callable[..., Any]] = {
    name: step
    for step, names in (
        (_mul, ("mul", "multiply", "__mul__", "__rmul__")),
        (_div, ("div", "divide", "true_divide", "truediv", "__truediv__")),
        (_tanh, ("tanh",)),
        (_add, ("add", "__add__", "__radd__")),
        (_in_place(_mul), ("mul_", "imul", "__imul__")),
        (_in_place(_div), ("div_", "itruediv", "__itruediv__")),
        (_in_place(_tanh), ("tanh_",)),
        (lambda x: _cast(x, torch.float32), ("float",)),
        (lambda x: _cast(x, torch.float64), ("double",)),
        (lambda x: _cast(x, torch.float16), ("half",)),
        (lambda x: _cast(x, torch.bfloat16), ("bfloat16",)),
        (lambda x, other: _cast(x, other.dtype), ("type_as",)),
        (_to, ("to",)),
        (lambda x, **_: _copy(x), ("clone",)),  # DDP clones what a model returns
        (_index, ("getitem", "__getitem__")),
    )
    for name in names
}
METHODS |= {
    name: _view_of(name, step)
    for step, names in (
        (_contiguous, ("contiguous",)),
        (_detach, ("detach",)),
        (_view, ("view", "reshape")),
        (_flatten, ("flatten",)),
        (_squeeze, ("squeeze",)),
        (_unsqueeze, ("unsqueeze",)),
        (_permute, ("permute",)),
        (_transpose, ("transpose", "swapaxes", "swapdims")),
    )
    for name in names
}
