"""Logits that are not computed until somebody looks at them, and never for the loss.

:class:`LazyLogits` is what a replaced output head returns: a tensor of shape ``(..., V)`` without
storage. Autograd is torch's own and knows of nothing: views, casts, writes, hooks and functions of
users run through it as for any tensor, and what arrives *below* it, in ``__torch_dispatch__``, is
either recorded (:mod:`fusedce.head.lazy.steps`) or done with real logits, computed once.
``F.cross_entropy`` is taken above autograd and becomes one function of the lazy logits
(:mod:`fusedce.head.lazy.loss`), whose gradient is lazy as well (:mod:`fusedce.head.lazy.grad`).

Views share a :class:`~fusedce.head.lazy.memory.Memory`, as they would a storage.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedce.head.clock import CLOCK
from fusedce.head.lazy.memory import Memory, Recorded
from fusedce.head.lazy.ops import Known, Layout, aten, layout_after
from fusedce.head.lazy.steps import Index, Step, Steps
from fusedce.head.lazy.tensor import BELOW, Lazy, T, real, split, unbind, write

_SET_DATA: Any = T.data.__set__  # type: ignore[attr-defined]  # a slot of C
_AUTOGRAD = torch._C._autograd
_in_backward = torch._C._current_graph_task_id  # -1: no


class LazyLogits(Lazy):
    """See the module. Made by a replaced head, never directly."""

    memory: Memory
    views: tuple[Recorded, ...]  # that lead from the memory to these

    @staticmethod
    def __new__(cls, memory: Memory, views: tuple[Recorded, ...], layout: Layout) -> LazyLogits:
        new: LazyLogits = layout.wrapper(cls, memory.call.device)
        new.memory, new.views, new.like = memory, views, layout
        return new

    @property
    def recorded(self) -> tuple[Recorded, ...]:
        return (*self.memory.history, *self.views)

    @property
    def steps(self) -> Steps | None:
        """All that was done since the head; ``None`` where the loss does not know it."""
        if self.memory.written:
            return None
        found: list[Step] = []
        for recorded in self.recorded:
            if recorded.steps is None:
                return None
            found += recorded.steps
        return tuple(found)

    def look(self, operation: str) -> Tensor:
        """The real logits, without a graph. They share what is written with these."""
        x = self.memory.look(operation)
        if self.views:
            with torch.no_grad(), BELOW():
                for view in self.views:
                    x = view(x)
        return x

    def expose(self, operation: str) -> Tensor:
        """Real logits for somebody who may write into them unseen."""
        values = self.look(operation)
        self.memory.expose()
        return values

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.memory.values is None:
            return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"
        with BELOW():
            return repr(self.look("repr")).replace("tensor(", "LazyLogits(", 1)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.look("format").__format__(spec) if self.dim() == 0 else str(self)

    def __copy__(self) -> Tensor:
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Lazy as well: it holds the head's parameters, and copies none."""
        if not self.is_leaf:
            return T.__deepcopy__(self, memo)  # torch refuses that
        if id(self) not in memo:
            memory = memo.get(id(self.memory))
            if memory is None:
                memory = memo[id(self.memory)] = self.memory.copy()
            new = memo[id(self)] = LazyLogits(memory, self.views, self.like)
            new.requires_grad_(self.requires_grad)
            new.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def begin_write(self, operation: str) -> None:
        self.look(operation)
        self.memory.written = True

    def become(self, other: LazyLogits) -> LazyLogits:
        """Be what the other is from now on: its shape, its dtype, its memory."""
        _SET_DATA(self, other.detach())
        self.memory, self.views, self.like = other.memory, other.views, other.like
        return self

    @classmethod
    def dispatch(cls, func: Any, op: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op.writes:
            return _write(func, op, args, kwargs)
        flipped = op.symmetric and not isinstance(args[0], LazyLogits)
        x, others = (args[1], (args[0], *args[2:])) if flipped else (args[0], args[1:])
        if isinstance(x, LazyLogits):
            result = _record(x, func, op, others, kwargs)
            if result is not NotImplemented:
                if isinstance(result, LazyLogits) and _in_backward() != -1:
                    CLOCK.sources.add(result.memory)  # it may be a gradient that somebody keeps
                return result
        name = str(func)
        return func(*real(args, name), **real(kwargs, name))


def _has_lazy(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(a, LazyLogits) for a in (*args, *kwargs.values()))


# ---- below autograd -------------------------------------------------------------------------


def _record(
    x: LazyLogits, func: Any, op: Known, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``func(x, *args, **kwargs)`` without computing it, or ``NotImplemented``."""
    row = op.recorded
    if row is None and not op.is_view:
        return NotImplemented
    if not op.is_view and (x.memory.written or _has_lazy(args, kwargs)):
        return NotImplemented
    layout = layout_after(func, x.like, args, kwargs, x.memory.call.device)
    if isinstance(layout, list):
        parts = []
        for i, part in enumerate(layout):
            nth = Recorded(lambda t, *a, i=i, **k: func(t, *a, **k)[i], args, kwargs, None)
            parts.append(LazyLogits(x.memory, (*x.views, nth), part))
        return parts
    if layout is None:
        return NotImplemented
    steps = None if row is None else row.read(x.like.shape, layout, *args, **kwargs)
    if op.is_view:
        if func is not aten.detach.default:
            x.memory.viewed = True
        return LazyLogits(x.memory, (*x.views, Recorded(func, args, kwargs, steps)), layout)
    if steps is None:
        return NotImplemented
    args = tuple(_kept(a, steps) for a in args)
    history = (*x.recorded, Recorded(func, args, kwargs, steps))
    return LazyLogits(Memory(x.memory.call, history, x.memory), (), layout)


def _kept(argument: Any, steps: Steps) -> Any:
    """What a step was given, safe from writes before a look."""
    if isinstance(argument, (list, tuple)):
        return list(next((s.indices for s in steps if isinstance(s, Index)), argument))
    return argument.detach().clone() if isinstance(argument, Tensor) else argument


def _write(func: Any, op: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What writes into logits: a step that all views see, or else into real ones."""
    x = args[0] if args else None
    row = op.in_place
    if (
        row is not None
        and isinstance(x, LazyLogits)
        and x.memory.values is None
        and not x.memory.written
        and not _has_lazy(args[1:], kwargs)
        and all(r.steps is not None and all(s.rearranges for s in r.steps) for r in x.views)
    ):
        steps = row.read(x.like.shape, x.like, *args[1:], **kwargs)
        if steps is not None and not any(isinstance(a, Tensor) and a.dim() for a in args[1:]):
            values = tuple(a.item() if isinstance(a, Tensor) else a for a in args[1:])
            x.memory.history = (*x.memory.history, Recorded(func, values, kwargs, steps))
            return x
    if op.turns is not None and isinstance(x, LazyLogits):
        _check_turn(func, x)
        viewed = x.memory.viewed
        x.become(op.turns(x, *args[1:], **kwargs))
        x.memory.viewed = viewed
        return x
    if op.moves and isinstance(x, LazyLogits):
        if func is aten.detach_.default:
            return x
        raise RuntimeError(
            f"{func.overloadpacket} would give the logits of a head that fusedce has replaced "
            f"another memory, but these are lazy logits and have none: use logits + 0, which is "
            f"a tensor like any other"
        )
    return write(func, op, args, kwargs)


def _check_turn(func: Any, x: LazyLogits) -> None:
    """Raise an error where a change of shape in place would give other views wrong gradients.

    After a write torch makes the views of a subclass again to find their nodes of autograd, and
    would make them of another shape.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        with BELOW():
            is_view = x._is_view()
        if is_view or x.memory.viewed:
            name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
            raise RuntimeError(
                f"{name} would change the shape of logits that have views, which fusedce's lazy "
                f"logits cannot do while gradients are recorded: use {name.removesuffix('_')}, "
                f"which makes another tensor"
            )


# ---- above autograd -------------------------------------------------------------------------


def _set_data(func: Any, x: LazyLogits, data: Tensor) -> Any:
    values = data.expose("data") if isinstance(data, Lazy) else data.detach()
    shape, strides = values.shape, values.stride()
    layout = Layout.of(torch.empty_strided(shape, strides, dtype=values.dtype, device="meta"))
    memory = Memory(x.memory.call)
    memory.values, memory.written = values, True
    x.become(LazyLogits(memory, (), layout))


def _hook(func: Any, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Torch crashes where a view's first hook makes it find its node anew, after a write."""
    if x.requires_grad:
        x.grad_fn  # noqa: B018  # finds it
    return func(x, *args, **kwargs)


def _tensor_split(func: Any, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return split(x, func(x.like.meta(), *args, **kwargs), *args, **kwargs)


def _split(func: Any, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return _outputs_of_one_view(_tensor_split(func, x, *args, **kwargs))


def _unbind(func: Any, x: LazyLogits, dim: int = 0) -> Any:
    return _outputs_of_one_view(unbind(x, dim)) if x.dim() else NotImplemented


def _outputs_of_one_view(parts: tuple[LazyLogits, ...]) -> tuple[LazyLogits, ...]:
    """Let torch refuse writes into these where it refuses those into outputs of one node."""
    if torch.is_grad_enabled():
        for part in parts:
            _AUTOGRAD._set_creation_meta(part, _AUTOGRAD.CreationMeta.MULTI_OUTPUT_NODE)
    return parts


def _iterate(func: Any, x: LazyLogits) -> Any:
    parts = _unbind(func, x)
    return parts if parts is NotImplemented else iter(parts)


_SPLITS: tuple[Any, ...] = (
    T.split, torch.split, T.chunk, torch.chunk, T.split_with_sizes, torch.split_with_sizes,
)  # fmt: skip
LazyLogits.above = Lazy.above | {
    **dict.fromkeys(_SPLITS, _split),
    **dict.fromkeys((T.tensor_split, torch.tensor_split), _tensor_split),
    _SET_DATA: _set_data,
    T.register_hook: _hook,
    T.retain_grad: _hook,
    T.unbind: _unbind,
    torch.unbind: _unbind,
    T.__iter__: _iterate,
}  # fmt: skip
