"""Facts about operators of torch: what they write, whether they give views, their table row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

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


@cache
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
    one = torch.empty((1,), device=next(i.device for i in indices if i is not None))
    shape = aten.index.Tensor(one.expand(*x.shape[:-1], 1), indices).shape[:-1]
    return LazyLayout((*shape, x.shape[-1]), x.dtype)
