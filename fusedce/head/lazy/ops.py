"""What operators of torch do: whether they write, or give views; and the rows of the table."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.head.lazy.table import STEPS, Row

aten = torch.ops.aten


class Effects(NamedTuple):
    writes: tuple[int, ...]  # positions of the arguments that are written into
    written_names: tuple[str, ...]
    is_view: bool  # of the first argument
    symmetric: bool


@cache
def effects_of(func: Any) -> Effects:
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [
        (i, a.name)
        for i, a in enumerate(arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    is_view = not written and any(r.alias_info is not None for r in returns)
    return Effects(
        tuple(i for i, _ in written),
        tuple(n for _, n in written),
        is_view and bool(arguments) and arguments[0].alias_info is not None,
        func in (aten.mul.Tensor, aten.add.Tensor),
    )


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    found = getattr(aten, packet, None)
    return getattr(found, overload or "default", None)


def _by_op(names: str) -> dict[Any, Row]:
    table = {_overload(n): row for row in STEPS for n in getattr(row, names)}
    table.pop(None, None)
    return table


RECORDED = _by_op("ops")
IN_PLACE = _by_op("in_place")
UNDOING = _by_op("undo_ops")


def result_like(
    func: Any, like: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Any:
    """The result of an operator without its data; ``None`` where it has none on this device."""
    if func is aten._to_copy.default:
        to = kwargs.get("device")
        if to is not None and torch.device(to) not in (device, torch.device(device.type)):
            return None
        known = {"dtype", "memory_format"}
        return func(like, **{k: v for k, v in kwargs.items() if k in known})
    if any(isinstance(a, Tensor) for a in args):
        dtype = like.dtype
        shape = torch.Size(like.shape)
        for a in args:
            if isinstance(a, Tensor):
                if a.device != device and a.dim():
                    return None
                dtype = torch.result_type(like, a)
                shape = torch.broadcast_shapes(shape, a.shape)
        return torch.empty_like(like, dtype=dtype) if shape == like.shape else None
    if func is aten.index.Tensor:
        return _indexed(like, args[0])
    return func(like, *args, **kwargs)


def _indexed(like: Tensor, indices: Any) -> Tensor | None:
    """Masks give as many rows as they hold, which only they know: ask with one class."""
    used = sum(1 if i is None or i.dtype != torch.bool else i.dim() for i in indices)
    if used >= like.dim() or any(i is not None and i.device.type == "meta" for i in indices):
        return None
    one = torch.empty((1,), device=next(i.device for i in indices if i is not None))
    shape = aten.index.Tensor(one.expand(*like.shape[:-1], 1), indices).shape[:-1]
    return torch.empty((*shape, like.shape[-1]), dtype=like.dtype, device="meta")
