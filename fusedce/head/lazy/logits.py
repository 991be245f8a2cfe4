"""Logits that are computed when code reads their values, and never for the loss.

:class:`LazyLogits` is what a replaced output head returns: a tensor of shape ``(..., V)`` without
storage. Autograd is unchanged: views, casts, writes, hooks and functions of users run through it as
for any tensor. An operator that arrives *below* autograd, in ``__torch_dispatch__``, is either
recorded (:mod:`fusedce.head.lazy.steps`) or applied to real logits, which are computed once.
``F.cross_entropy`` is taken over above autograd and becomes one function of the lazy logits
(:mod:`fusedce.head.lazy.loss`), whose gradient is lazy as well (:mod:`fusedce.head.lazy.grad`).

Views share a :class:`Memory`, as they would a storage.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedce.head.call import HeadCall
from fusedce.head.lazy.steps import Index, LogitsStep, LogitsSteps, Same
from fusedce.head.lazy.tensor import (
    NO_TORCH_FUNCTION,
    Lazy,
    LazyLayout,
    OpInfo,
    T,
    aten,
    layout_after,
    real,
    split,
    unbind,
    write,
)
from fusedce.head.optimizer_clock import CLOCK


class Recorded(NamedTuple):
    """An operator that was applied to logits, and the steps that the loss takes for it."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    steps: LogitsSteps | None  # None: the loss cannot fuse it

    def __call__(self, x: Tensor) -> Any:
        return self.func(x, *self.args, **self.kwargs)


class Memory:
    """The values that views of the same logits share, or the operators that compute them.

    Attributes:
        values: the real logits, once computed.
        viewed: whether there have been views.
        history: operators applied to the logits of ``call``.
        parent, length: the memory that this is a copy of, and how long its history was then. A copy
            is computed from its parent as long as that has not changed.
    """

    values: Tensor | None = None
    viewed = False
    _written = False
    _snapshot: Tensor | None = None  # the values when code first got access to their memory
    parent: weakref.ref[Memory] | None = None
    length = 0

    def __init__(
        self,
        call: HeadCall,
        history: tuple[Recorded, ...] = (),
        parent: Memory | None = None,
    ) -> None:
        self.call, self.history = call, history
        if parent is not None:
            self.parent, self.length = weakref.ref(parent), len(parent.history)

    def was_written(self) -> bool:
        """Whether the values were written into, so that the history no longer describes them.

        If code has access to their memory, this compares all values with the snapshot.
        """
        if not self._written and self._snapshot is not None and self.values is not None:
            self._written = not torch.equal(self.values, self._snapshot)
        return self._written

    def mark_written(self) -> None:
        """Note a write into the values."""
        self._written = True

    def copy(self) -> Memory:
        """A memory with the same values, which stays lazy if this one was not written into."""
        if not self.was_written():
            clone = Recorded(torch.ops.aten.clone.default, (), {}, (Same(),))
            return Memory(self.call, (*self.history, clone), self)
        new = Memory(self.call)
        with torch.no_grad(), NO_TORCH_FUNCTION():
            new.values = self.materialize("copy").clone()
        new.mark_written()
        return new

    def take_snapshot(self) -> None:
        """Copy the values now, to find out later whether code has written into them."""
        if self._snapshot is None and not self.was_written() and self.values is not None:
            with torch.no_grad(), NO_TORCH_FUNCTION():
                self._snapshot = self.values.clone()

    def before_step(self, optimizer: Optimizer) -> None:
        """Compute the values now if a step of this optimizer changes them, or may do so."""
        call = self.call
        if self.values is None and call.may_change_in(optimizer) and not call.has_changed():
            if call.needs_all_ranks():  # another rank may not hold these logits
                return
            self.materialize("optimizer.step")

    def materialize(self, operation: str) -> Tensor:
        """The values, computed at the first call for ``operation``."""
        if self.values is None:
            inference = torch.is_inference_mode_enabled() and not self.call.hidden.is_inference()
            with torch.inference_mode(False) if inference else torch.no_grad(), torch.no_grad():
                with NO_TORCH_FUNCTION():
                    self.values = self._compute(operation)
        return self.values

    def _compute(self, operation: str) -> Tensor:
        parent = None if self.parent is None else self.parent()
        if parent is not None and not parent.was_written() and len(parent.history) == self.length:
            x = parent.materialize(operation)
            done = self.length
        else:
            x = self.call.logits()
            done = 0
            self.call.report.made(operation, tuple(x.shape), x.nbytes)
        for recorded in self.history[done:]:
            x = recorded(x)
        return x


_SET_DATA: Any = T.data.__set__  # type: ignore[attr-defined]  # a slot of C
_AUTOGRAD = torch._C._autograd
_in_backward = torch._C._current_graph_task_id  # -1: no


class LazyLogits(Lazy):
    """Lazy logits ``(..., V)``: see the module. Only a replaced head makes them."""

    memory: Memory
    views: tuple[Recorded, ...]  # view operators that lead from the memory to these logits

    @staticmethod
    def __new__(cls, memory: Memory, views: tuple[Recorded, ...], layout: LazyLayout) -> LazyLogits:
        new: LazyLogits = layout.wrapper(cls, memory.call.device)
        new.memory, new.views, new.like = memory, views, layout
        return new

    @property
    def recorded(self) -> tuple[Recorded, ...]:
        """All operators applied since the head."""
        return (*self.memory.history, *self.views)

    @property
    def steps(self) -> LogitsSteps | None:
        """All steps since the head; ``None`` if the loss cannot fuse one of them."""
        if self.memory.was_written():
            return None
        found: list[LogitsStep] = []
        for recorded in self.recorded:
            if recorded.steps is None:
                return None
            found += recorded.steps
        return tuple(found)

    def materialize(self, operation: str) -> Tensor:
        """The real logits, without a graph, in the memory that all views of these share."""
        x = self.memory.materialize(operation)
        if self.views:
            with torch.no_grad(), NO_TORCH_FUNCTION():
                for view in self.views:
                    x = view(x)
        return x

    def expose(self, operation: str) -> Tensor:
        """Real logits, for code that may write into their memory."""
        values = self.materialize(operation)
        self.memory.take_snapshot()
        return values

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        if self.memory.values is None:
            return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, not computed)"
        with NO_TORCH_FUNCTION():
            return repr(self.materialize("repr")).replace("tensor(", "LazyLogits(", 1)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.materialize("format").__format__(spec) if self.dim() == 0 else str(self)

    def __copy__(self) -> Tensor:
        return self.detach().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A lazy copy, which refers to the head's parameters and copies none of them."""
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
        """Compute the values; the history no longer describes them."""
        self.materialize(operation)
        self.memory.mark_written()

    def become(self, other: LazyLogits) -> LazyLogits:
        """Take over shape, dtype and memory of ``other``, in place."""
        _SET_DATA(self, other.detach())
        self.memory, self.views, self.like = other.memory, other.views, other.like
        return self

    @classmethod
    def dispatch(cls, func: Any, op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operator, or apply it to real logits."""
        if op.writes:
            return _write(func, op, args, kwargs)
        flipped = op.symmetric and not isinstance(args[0], LazyLogits)
        x, others = (args[1], (args[0], *args[2:])) if flipped else (args[0], args[1:])
        if isinstance(x, LazyLogits):
            result = _record(x, func, op, others, kwargs)
            if result is not NotImplemented:
                if isinstance(result, LazyLogits) and _in_backward() != -1:
                    CLOCK.sources.add(result.memory)  # a hook may keep it as a gradient
                return result
        name = str(func)
        return func(*real(args, name), **real(kwargs, name))


class LogitsSource:
    """Logits from which a real gradient is computed, kept while that gradient exists."""

    def __init__(self, x: LazyLogits | Memory) -> None:
        self.x = x
        CLOCK.sources.add(self)

    def materialize(self, operation: str) -> Tensor:
        """The real logits."""
        return self.x.materialize(operation)

    def before_step(self, optimizer: Optimizer) -> None:
        """Compute the logits before a step that changes them."""
        (self.x if isinstance(self.x, Memory) else self.x.memory).before_step(optimizer)


def _has_lazy(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(a, LazyLogits) for a in (*args, *kwargs.values()))


# ---- below autograd -------------------------------------------------------------------------


def _record(
    x: LazyLogits, func: Any, op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record ``func(x, *args, **kwargs)`` instead of computing it, or ``NotImplemented``."""
    row = op.recorded
    if row is None and not op.is_view:
        return NotImplemented
    if not op.is_view and (x.memory.was_written() or _has_lazy(args, kwargs)):
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


def _kept(argument: Any, steps: LogitsSteps) -> Any:
    """An argument of a step, copied so that later writes into it do not count."""
    if isinstance(argument, (list, tuple)):
        return list(next((s.indices for s in steps if isinstance(s, Index)), argument))
    return argument.detach().clone() if isinstance(argument, Tensor) else argument


def _write(func: Any, op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write into logits: recorded as a step for all their views, or done on real logits."""
    x = args[0] if args else None
    row = op.in_place
    if (
        row is not None
        and isinstance(x, LazyLogits)
        and x.memory.values is None
        and not x.memory.was_written()
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
        with NO_TORCH_FUNCTION():
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
    layout = LazyLayout.of(torch.empty_strided(shape, strides, dtype=values.dtype, device="meta"))
    memory = Memory(x.memory.call)
    memory.values = values
    memory.mark_written()
    x.become(LazyLogits(memory, (), layout))


def _hook(func: Any, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Read ``grad_fn`` before a hook is registered.

    After a write, torch crashes if a view's first hook makes it build its autograd node again.
    """
    if x.requires_grad:
        x.grad_fn  # noqa: B018  # builds the node
    return func(x, *args, **kwargs)


def _tensor_split(func: Any, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return split(x, func(x.like.meta(), *args, **kwargs), *args, **kwargs)


def _split(func: Any, x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return _outputs_of_one_view(_tensor_split(func, x, *args, **kwargs))


def _unbind(func: Any, x: LazyLogits, dim: int = 0) -> Any:
    return _outputs_of_one_view(unbind(x, dim)) if x.dim() else NotImplemented


def _outputs_of_one_view(parts: tuple[LazyLogits, ...]) -> tuple[LazyLogits, ...]:
    """Mark views as outputs of one node, so that torch raises for the same writes as usual."""
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
