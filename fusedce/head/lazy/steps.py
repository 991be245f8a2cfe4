"""What lazy logits can be put through without being computed: steps on their values, and a table.

Each function takes lazy logits (:class:`Lazy`) and what the tensor method of that name takes, and
returns new lazy logits, or ``NotImplemented`` where only real logits will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedce.head.lazy.state import Lazy, changed, class_last
from fusedce.head.lazy.views import VIEWS


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
        or not class_last(x)
        or s.vocabulary != slice(0, V)
        or (x.is_detached() and other.requires_grad and torch.is_grad_enabled())
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
    new = changed(x, **changes)
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
    )
    for name in names
} | VIEWS
