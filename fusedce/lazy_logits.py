"""Logits that are not computed until somebody looks at them, and never for the loss.

:class:`LazyLogits` is what a replaced output head returns: a tensor of shape ``(..., V)`` without
storage that remembers ``(hidden, head)`` and what was done to it since. Multiplying and dividing by
a number, ``tanh``, changes of dtype, reshaping and slicing of the leading dimensions, slicing the
vocabulary: all are remembered, none is computed. ``F.cross_entropy`` on it runs
:func:`fusedce.fused_ce`, with the remembered steps as its ``logit_scale`` and ``softcap``.
Anything else sees real logits, computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Head(Protocol):
    """What a lazy tensor needs of the output head it came from."""

    def trainable(self) -> bool:
        """Whether a parameter of the head requires grad."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Real logits ``(..., V)`` of ``hidden (..., H)``, as the original head makes them."""

    def loss_sum(
        self,
        hidden: Tensor,  # (N, H)
        labels: Tensor,  # (N,)
        *,
        vocabulary: slice,
        ignore_index: int,
        softcap: float | None,
        logit_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """``(loss_sum, n_valid)`` without logits."""


class State(NamedTuple):
    """Everything a lazy tensor stands for. Steps apply in order: slice, scale, tanh, scale."""

    head: Head
    hidden: Tensor  # (..., H)
    shape: tuple[int, ...]
    dtype: torch.dtype
    vocabulary: slice  # the entries that are left
    class_dim: int  # where the vocabulary is among the dimensions
    steps: tuple[tuple[str, Any], ...] = ()  # ("mul", number), ("tanh", None), ("to", dtype)
    detached: bool = False


class LazyLogits(torch.Tensor):
    """See the module. Made by a replaced head, never directly."""

    _state: State
    _real: Tensor | None  # the real logits, once somebody has looked
    _mutated: bool  # somebody has written into them: from then on they are what counts

    @staticmethod
    def __new__(cls, state: State) -> LazyLogits:
        self = torch.Tensor._make_wrapper_subclass(
            cls, state.shape, dtype=state.dtype, device=state.hidden.device
        )
        self._state, self._real, self._mutated = state, None, False
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        s = self._state
        return f"LazyLogits(shape={s.shape}, dtype={s.dtype}, steps={[k for k, _ in s.steps]})"

    def wants_graph(self) -> bool:
        """Whether gradients may flow through these logits."""
        s = self._state
        return not s.detached and (s.hidden.requires_grad or s.head.trainable())

    def materialize(self, *, graph: bool | None = None) -> Tensor:
        """The real logits ``shape``; computed at the first call, and once more with a graph.

        ``graph``: whether they need one; by default as grad mode says.
        """
        if graph is None:
            graph = torch.is_grad_enabled()
        graph = graph and self.wants_graph()
        if self._real is None or (graph and not self._real.requires_grad and not self._mutated):
            s = self._state
            with torch.set_grad_enabled(graph), torch._C.DisableTorchFunctionSubclass():
                z = s.head.logits(s.hidden)[..., s.vocabulary]
                for kind, argument in s.steps:
                    z = _REAL_STEPS[kind](z, argument)
                self._real = z.movedim(-1, s.class_dim)
        return self._real

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not first._mutated:
            handler = _HANDLERS.get(func)
            result = NotImplemented if handler is None else handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
            if _writes(func):
                first.materialize(graph=True)
                first._mutated = True
        args, kwargs = _real(args), _real(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub lacks the class
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Code that comes in below Python's overrides (C++ callers) sees real logits as well."""
        return func(*_real(args), **_real(kwargs or {}))


_REAL_STEPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "mul": lambda z, number: z * number,
    "div": lambda z, number: z / number,
    "tanh": lambda z, _: z.tanh(),
    "to": lambda z, dtype: z.to(dtype),
}


def _writes(func: Callable[..., Any]) -> bool:
    """Whether an operation changes its first argument in place."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or name.startswith("__i")
    return name.endswith("_")


def _real(x: Any) -> Any:
    """``x`` with every lazy tensor in it replaced by real logits."""
    if isinstance(x, LazyLogits):
        return x.materialize()
    if isinstance(x, dict):
        return {k: _real(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        items = [_real(y) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x


def _with(x: LazyLogits, hidden: Tensor | None = None, **changes: Any) -> LazyLogits:
    """``x`` with another state; its shape follows from the hidden state and the vocabulary."""
    state = x._state._replace(**changes)
    if hidden is not None:
        state = state._replace(hidden=hidden)
    shape = [*state.hidden.shape[:-1], state.vocabulary.stop - state.vocabulary.start]
    shape.insert(state.class_dim, shape.pop())
    return LazyLogits(state._replace(shape=tuple(shape)))


# ---- steps on the values --------------------------------------------------------------------


def _number(x: Any) -> float | None:
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _mul(x: LazyLogits, other: Any) -> Any:
    return NotImplemented if _number(other) is None else _step(x, "mul", other)


def _div(x: LazyLogits, other: Any, *, rounding_mode: str | None = None) -> Any:
    if _number(other) is None or rounding_mode is not None:
        return NotImplemented
    return _step(x, "div", other)


def _tanh(x: LazyLogits) -> Any:
    return _step(x, "tanh", None)


def _step(x: LazyLogits, kind: str, argument: Any) -> LazyLogits:
    return _with(x, steps=(*x._state.steps, (kind, argument)))


def _in_place(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The in-place twin of a step: the same object, standing for something else from now on."""

    def run(x: LazyLogits, *args: Any) -> Any:
        result = handler(x, *args)
        if result is NotImplemented:
            return NotImplemented
        x._state, x._real = result._state, None
        return x

    return run


def _cast(x: LazyLogits, dtype: torch.dtype) -> Any:
    if not dtype.is_floating_point:
        return NotImplemented
    if dtype == x._state.dtype:
        return x
    return _with(x, dtype=dtype, steps=(*x._state.steps, ("to", dtype)))


def _to(x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
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
    kwargs.pop("copy", None)  # nothing is shared with anybody anyway
    kwargs.pop("non_blocking", None)
    if kwargs or len(args) > 2:
        return NotImplemented
    if device is not None:
        device = torch.device(device)
        here = x._state.hidden.device
        if device.type != here.type or device.index not in (None, here.index):
            return NotImplemented
    return _cast(x, dtype) if dtype is not None else x


def _detach(x: LazyLogits) -> LazyLogits:
    return _with(x, hidden=x._state.hidden.detach(), detached=True)


# ---- steps on the shape ---------------------------------------------------------------------


def _last(x: LazyLogits) -> bool:
    return x._state.class_dim == len(x._state.shape) - 1


def _view(x: LazyLogits, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or not shape or not _last(x):
        return NotImplemented
    if isinstance(shape[0], torch.dtype):
        return NotImplemented
    sizes = list(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
    V = x._state.shape[-1]
    total = math.prod(x._state.shape)
    if -1 in sizes:
        known = math.prod(s for s in sizes if s != -1)
        sizes[sizes.index(-1)] = total // known if known else 0
    if sizes[-1] != V or math.prod(sizes) != total:
        return NotImplemented
    H = x._state.hidden.shape[-1]
    return _with(x, hidden=x._state.hidden.reshape(*sizes[:-1], H), class_dim=len(sizes) - 1)


def _flatten(x: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = len(x._state.shape)
    start, end = start_dim % dims, end_dim % dims
    if not _last(x) or end == dims - 1 or start > end:
        return NotImplemented
    hidden = x._state.hidden.flatten(start, end)
    return _with(x, hidden=hidden, class_dim=hidden.dim() - 1)


def _squeeze(x: LazyLogits, dim: int | None = None) -> Any:
    dims = len(x._state.shape)
    if dim is None or not _last(x) or dim % dims == dims - 1:
        return NotImplemented
    hidden = x._state.hidden.squeeze(dim % dims)
    return _with(x, hidden=hidden, class_dim=hidden.dim() - 1)


def _unsqueeze(x: LazyLogits, dim: int) -> Any:
    dims = len(x._state.shape)
    if not _last(x) or not 0 <= (dim := dim % (dims + 1)) < dims:
        return NotImplemented
    hidden = x._state.hidden.unsqueeze(dim)
    return _with(x, hidden=hidden, class_dim=dims)


def _permute(x: LazyLogits, *order: Any) -> Any:
    dims = len(x._state.shape)
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


def _transpose(x: LazyLogits, dim0: int, dim1: int) -> Any:
    dims = len(x._state.shape)
    order = list(range(dims))
    a, b = dim0 % dims, dim1 % dims
    order[a], order[b] = order[b], order[a]
    return _permute(x, order)


def _getitem(x: LazyLogits, index: Any) -> Any:
    if not _last(x):
        return NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    # Each item takes as many dimensions as it names: None takes none, a mask all of its own.
    if any(isinstance(i, LazyLogits) for i in items):
        return NotImplemented
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


# ---- the loss -------------------------------------------------------------------------------


def _scale_and_cap(steps: tuple[tuple[str, Any], ...]) -> tuple[float, float | None] | None:
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


def _cross_entropy(
    x: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    state = x._state
    fused = _scale_and_cap(state.steps)
    dims = len(state.shape)
    at_class = state.class_dim == (1 if dims > 1 else 0)
    if (
        fused is None
        or not at_class
        or weight is not None
        or size_average is not None
        or reduce is not None
        or label_smoothing
        or reduction not in ("mean", "sum")
        or not isinstance(target, Tensor)
        or isinstance(target, LazyLogits)
        or target.is_floating_point()
        or target.shape != state.hidden.shape[:-1]
        or target.device != state.hidden.device
    ):
        return NotImplemented
    scale, softcap = fused
    with torch.set_grad_enabled(torch.is_grad_enabled() and not state.detached):
        loss_sum, n_valid = state.head.loss_sum(
            state.hidden.reshape(-1, state.hidden.shape[-1]),
            target.reshape(-1),
            vocabulary=state.vocabulary,
            ignore_index=ignore_index,
            softcap=softcap,
            logit_scale=scale,
        )
        loss = loss_sum if reduction == "sum" else loss_sum / n_valid.clamp(min=1)
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return loss  # autocast takes cross_entropy in float32
    return loss.to(state.dtype)


T = torch.Tensor
_HANDLERS: dict[Any, Callable[..., Any]] = {F.cross_entropy: _cross_entropy}
for handler, names in (
    (_mul, ("mul", "multiply", "__mul__", "__rmul__")),
    (_div, ("div", "divide", "true_divide", "__truediv__")),
    (_tanh, ("tanh",)),
    (_in_place(_mul), ("mul_", "__imul__")),
    (_in_place(_div), ("div_", "__itruediv__")),
    (_in_place(_tanh), ("tanh_",)),
    (lambda x: _cast(x, torch.float32), ("float",)),
    (lambda x: _cast(x, torch.float64), ("double",)),
    (lambda x: _cast(x, torch.float16), ("half",)),
    (lambda x: _cast(x, torch.bfloat16), ("bfloat16",)),
    (lambda x, other: _cast(x, other.dtype), ("type_as",)),
    (_to, ("to",)),
    (lambda x, **_: x, ("contiguous",)),
    (lambda x, **_: _with(x), ("clone",)),  # DDP clones what a model returns
    (_detach, ("detach",)),
    (_view, ("view", "reshape")),
    (_flatten, ("flatten",)),
    (_squeeze, ("squeeze",)),
    (_unsqueeze, ("unsqueeze",)),
    (_permute, ("permute",)),
    (_transpose, ("transpose", "swapaxes", "swapdims")),
    (_getitem, ("__getitem__",)),
):
    for name in names:
        for owner in (torch.Tensor, torch):
            if hasattr(owner, name):
                _HANDLERS[getattr(owner, name)] = handler


def _getter(name: str) -> Callable[..., Any]:
    """What ``__torch_function__`` is told when an attribute of a tensor is read."""
    return getattr(torch.Tensor, name).__get__


_METADATA = {
    T.size, T.dim, T.ndimension, T.numel, T.nelement, T.element_size, T.is_floating_point,
    T.is_complex, T.__len__, torch.is_floating_point, torch.is_complex, torch.numel,
    T.get_device, T.stride, T.__hash__,
    *(_getter(name) for name in
      ("shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "layout", "is_sparse",
       "is_quantized", "is_meta", "is_leaf", "itemsize", "is_nested", "is_mps", "is_xpu")),
}  # fmt: skip
_HANDLERS[_getter("requires_grad")] = lambda x: torch.is_grad_enabled() and x.wants_graph()
_HANDLERS[_getter("data")] = _detach
