"""Tensors without storage, whose values are computed when code reads them.

:class:`Lazy` is the base class of lazy logits and lazy gradients. It computes values for readers
above autograd: printing, pickling, numpy, ``torch.compile``. :class:`LazyLayout` holds the shape of
such a tensor, and :class:`OpInfo` the facts about an operator of torch that meets one: what it
writes, whether its result is a view, and its row in the table of steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fusedce.head.lazy.table import STEPS, Row

aten = torch.ops.aten


class OpInfo(NamedTuple):
    """Facts about an operator, read from its schema and from the table once."""

    writes: tuple[int, ...]  # positions of arguments that are written into, or may be
    written_names: tuple[str, ...]
    turns: Any  # the view operator whose result an in-place operator gives its argument, or None
    moves: bool  # whether it gives its first argument another memory in place
    is_view: bool  # whether the result is a view of the first argument
    is_composite: bool  # whether it is composed of other operators
    symmetric: bool  # whether its first two arguments may be exchanged
    recorded: Row | None  # the step of logits that it is
    in_place: Row | None  # the step that it writes into logits
    undoing: Row | None  # the step that it undoes for a gradient


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    found = getattr(aten, packet, None)
    return getattr(found, overload or "default", None)


def _by_op(names: str) -> dict[Any, Row]:
    table = {_overload(n): row for row in STEPS for n in getattr(row, names)}
    table.pop(None, None)
    return table


_RECORDED, _IN_PLACE, _UNDOING = _by_op("ops"), _by_op("in_place"), _by_op("undo_ops")


def _view_of(func: Any) -> Any:
    """The view operator that corresponds to the in-place operator ``func``, if any."""
    packet = getattr(aten, func._opname.removesuffix("_"), None)
    if packet in (None, func.overloadpacket):
        return None
    wanted = [(a.name, str(a.real_type)) for a in func._schema.arguments]
    for name in packet.overloads():
        view = getattr(packet, name)
        given = [(a.name, str(a.real_type)) for a in view._schema.arguments]
        if given == wanted and op_info(view).is_view:
            return view
    return None


# Namespaces whose schemas name every argument that is written; others may omit some.
_TRUSTED = ("aten", "prim", "prims", "fusedce")


@functools.cache
def op_info(func: Any) -> OpInfo:
    """The facts about an operator."""
    arguments, returns = func._schema.arguments, func._schema.returns
    # `set_` makes its first argument share the memory of the second.
    pure = func.namespace in _TRUSTED and func.overloadpacket is not aten.set_
    written = [
        (i, a.name)
        for i, a in enumerate(arguments)
        if not pure or (a.alias_info is not None and a.alias_info.is_write)
    ]
    in_place = torch.Tag.inplace_view in func.tags
    turns = _view_of(func) if in_place else None
    is_view = not written and any(r.alias_info is not None for r in returns)
    return OpInfo(
        tuple(i for i, _ in written),
        tuple(n for _, n in written),
        turns,
        in_place and turns is None,
        is_view and bool(arguments) and arguments[0].alias_info is not None,
        torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        ),
        func in (aten.mul.Tensor, aten.add.Tensor),
        _RECORDED.get(func),
        _IN_PLACE.get(func),
        _UNDOING.get(func),
    )


_wrapper = torch.Tensor._make_wrapper_subclass


class LazyLayout:
    """Shape, dtype and strides of a lazy tensor.

    Most logits are contiguous; for these no tensor on the meta device is needed.
    """

    __slots__ = ("dtype", "shape", "strided")

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, strided: Tensor | None = None
    ) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype
        self.strided = strided  # a meta tensor; None: contiguous, without an offset

    @staticmethod
    def of(meta: Tensor) -> LazyLayout:
        """The layout of a tensor on the meta device."""
        shape = meta.shape
        usual = meta.stride() == _strides(shape) and meta.storage_offset() == 0
        return LazyLayout(shape, meta.dtype, None if usual else meta)

    def meta(self) -> Tensor:
        """A tensor of this layout on the meta device."""
        if self.strided is not None:
            return self.strided
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def stride(self) -> tuple[int, ...]:
        """The strides, in elements."""
        return _strides(self.shape) if self.strided is None else self.strided.stride()

    def wrapper(self, kind: type, device: torch.device) -> Any:
        """A tensor without storage of the subclass ``kind``."""
        like = self.strided
        if like is None:
            return _wrapper(kind, self.shape, dtype=self.dtype, device=device)
        strides, offset = like.stride(), like.storage_offset()
        return _wrapper(kind, self.shape, strides, offset, dtype=self.dtype, device=device)

    def after(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """The layout of an operator's result, or of each of them."""
        if func is aten.view.default and self.strided is None:
            shape = _viewed(self.shape, args[0])
            if shape is not None:
                return LazyLayout(shape, self.dtype)
        out = func(self.meta(), *args, **kwargs)
        return LazyLayout.of(out) if isinstance(out, Tensor) else [LazyLayout.of(x) for x in out]


def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, n = [], 1
    for size in reversed(shape):
        strides.append(n)
        n *= max(size, 1)
    return tuple(reversed(strides))


def _viewed(shape: torch.Size, sizes: Sequence[int]) -> list[int] | None:
    """The shape that ``view(sizes)`` gives; ``None`` if torch raises an error for it."""
    n, found = math.prod(shape), list(sizes)
    if -1 in found:
        at = found.index(-1)
        found[at] = 1
        others = math.prod(found)
        found[at] = n // others if others else -1
    return found if math.prod(found) == n and min(found, default=0) >= 0 else None


def layout_after(
    func: Any, x: LazyLayout, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Any:
    """The layout of an operator's result; ``None`` for another device or a broadcast."""
    if func is aten._to_copy.default:
        to = kwargs.get("device")
        if to is not None and torch.device(to) not in (device, torch.device(device.type)):
            return None
        names = {"dtype", "memory_format"}
        return x.after(func, **{k: v for k, v in kwargs.items() if k in names})
    if any(isinstance(a, Tensor) for a in args):
        dtype, shape = x.dtype, x.shape
        for a in args:
            if isinstance(a, Tensor):
                if a.device != device and a.dim():
                    return None
                dtype = torch.result_type(x.meta(), a)
                shape = torch.broadcast_shapes(shape, a.shape)
        return x.after(torch.empty_like, dtype=dtype) if shape == x.shape else None
    if func is aten.index.Tensor:
        return _indexed(x, args[0])
    return x.after(func, *args, **kwargs)


def _indexed(x: LazyLayout, indices: Any) -> LazyLayout | None:
    """Layout after indexing: the number of rows of a mask is found by indexing one class."""
    used = sum(1 if i is None or i.dtype != torch.bool else i.dim() for i in indices)
    if used >= len(x.shape) or any(i is not None and i.device.type == "meta" for i in indices):
        return None
    one = next(i for i in indices if i is not None).new_empty((1,))
    shape = aten.index.Tensor(one.expand(*x.shape[:-1], 1), indices).shape[:-1]
    return LazyLayout((*shape, x.shape[-1]), x.dtype)


T = torch.Tensor
NO_TORCH_FUNCTION = torch._C.DisableTorchFunctionSubclass


# Methods that expose the data pointer.
_STORAGE = (T.storage, T._typed_storage, T.untyped_storage)
_MEMORY = (T.numpy, T.__array__, T.data_ptr, T.__dlpack__, T.share_memory_, *_STORAGE)


def _values_of(func: Any, x: Lazy, *args: Any, **kwargs: Any) -> Any:
    """Call a function that exposes memory on the computed values."""
    values = x.expose(func.__name__)
    if x.requires_grad and func in (T.numpy, T.__array__, T.__dlpack__):
        values = values.detach().requires_grad_()  # so that torch raises its usual error
    return func(values, *args, **kwargs)


def _by_pointer(func: Any, *args: Any) -> Any:
    """Call a function that reads and writes memory element by element on the computed values."""
    func(*replaced(args, Lazy, lambda x: x.expose(func.__name__)))
    return args[0]


class Lazy(torch.Tensor):
    """A wrapper subclass whose values are computed by ``materialize`` or ``expose``.

    Attributes:
        like: shape, dtype and strides.
        above: functions that are taken over above autograd; each handler is called with the
            function and its arguments.
    """

    like: LazyLayout
    above: ClassVar[dict[Any, Any]] = {
        **dict.fromkeys(_MEMORY, _values_of),
        **dict.fromkeys((T.apply_, T.map_, T.map2_), _by_pointer),
        T.tolist: lambda func, x: x.materialize("tolist").tolist(),
    }  # fmt: skip

    def materialize(self, operation: str) -> Tensor:
        """The values, without a graph; ``operation`` needs them."""
        raise NotImplementedError

    def expose(self, operation: str) -> Tensor:
        """The values, for code that may write into their memory."""
        raise NotImplementedError

    def begin_write(self, operation: str) -> None:
        """Prepare for an operator that may write: the values count from now on."""
        raise NotImplementedError

    def end_write(self) -> None:
        """Note that the operator has written."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.materialize("repr"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.materialize("deepcopy").__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (
            self.materialize("pickle")
            .detach()
            .requires_grad_(self.requires_grad)
            .__reduce_ex__(protocol)
        )

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Make ``torch.compile`` skip the frame, since a lazy tensor has no memory.

        The frame runs uncompiled, and its loss is fused.
        """
        from torch._dynamo.exc import SkipFrame  # slow to import, and loaded by every caller

        _keep_compiler_out()
        raise SkipFrame(
            f"{type(self).__name__} has no memory to compile for: this frame runs uncompiled. To "
            "compile it, compile the model in the same graph, or pass logits + 0"
        )

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Tensor:
        raise AssertionError("nothing was flattened")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub lacks the class
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Handle any operator below autograd.

        In inference mode composite operators arrive whole; they are decomposed here, since only the
        parts of ``to`` or ``reshape`` say whether the result is a view or a copy.
        """
        op, kwargs = op_info(func), kwargs or {}
        if op.is_composite:
            return func.decompose(*args, **kwargs)  # type: ignore[attr-defined]
        return cls.dispatch(func, op, args, kwargs)

    @classmethod
    def dispatch(cls, func: Any, op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply an operator that is not composite."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = cls.above.get(func)
        with NO_TORCH_FUNCTION():
            if handler and args and (handler is _by_pointer or isinstance(args[0], cls)):
                result = handler(func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            return func(*args, **kwargs)


def _method(func: Any) -> Callable[..., Any]:
    """A method for calls that torch does not dispatch, such as those of saved-tensor hooks."""
    return functools.wraps(func)(lambda self, *a, **k: _values_of(func, self, *a, **k))


for _func in _MEMORY:
    setattr(Lazy, _func.__name__, _method(_func))


@functools.cache
def _keep_compiler_out() -> None:
    """Keep ``torch.compile`` out of the methods of :class:`Lazy` that a skipped frame calls.

    This happens at the first such frame only, since each call takes 1 us more afterwards.
    """
    for name in ("__torch_function__", "__torch_dispatch__"):
        method = torch.compiler.disable(Lazy.__dict__[name].__func__)
        setattr(Lazy, name, classmethod(method))


def real(x: Any, operation: str) -> Any:
    """``x`` with all lazy tensors in it replaced by real ones."""
    return replaced(x, Lazy, lambda lazy: lazy.materialize(operation))


def write(func: Any, op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an operator that writes into arguments, or may do so, to real values."""
    name, leaves = str(func), torch.utils._pytree.tree_leaves
    written = [args[i] for i in op.writes if i < len(args)]
    written += [kwargs[n] for n in op.written_names if n in kwargs]
    targets = [t for t in leaves(written) if isinstance(t, Lazy)]
    for t in targets:
        t.begin_write(name)
    real_args, real_kwargs = real(args, name), real(kwargs, name)
    pairs = zip(leaves((args, kwargs)), leaves((real_args, real_kwargs)), strict=True)
    lazy = {id(made): given for given, made in pairs if isinstance(given, Lazy)}
    out = func(*real_args, **real_kwargs)
    for t in targets:
        t.end_write()
    return torch.utils._pytree.tree_map(lambda t: lazy.get(id(t), t), out)


# ---- functions that TracedLogits uses as well ------------------------------------------------


def replaced(x: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """``x`` with each ``y`` of type ``kind`` in it replaced by ``by(y)``."""
    if isinstance(x, kind):
        return by(x)
    if isinstance(x, dict):
        return {k: replaced(v, kind, by) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        items = [replaced(y, kind, by) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x


def split(x: Any, parts: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Views of ``x`` with the lengths of ``parts``, the result of a split of a meta tensor.

    Each is a view of its own: for one node of all parts, autograd would fill the gradients of
    unused ones with real zeros.
    """
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    begin, views = 0, []
    for part in parts:
        views.append(x.narrow(dim, begin, part.shape[dim]))
        begin += part.shape[dim]
    return tuple(views)


def unbind(x: Any, dim: int = 0) -> tuple[Any, ...]:
    """``x.unbind(dim)``, each part a view of its own."""
    return tuple(x.select(dim, i) for i in range(x.shape[dim]))
