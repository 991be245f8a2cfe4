"""The table of steps: their operators and methods, their arguments, and how they are undone.

A row names the operators of torch below autograd, the methods of tensors in code that
``torch.compile`` traces, the function that reads their arguments, and the operators by which
autograd undoes the step in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.head.lazy.steps import (
    Bias,
    Cap,
    Cast,
    Factor,
    Index,
    LogitsStep,
    LogitsSteps,
    Permute,
    Reshape,
    Same,
    Scale,
    Shape,
    Slice,
    Subscript,
)  # fmt: skip

# ---- read arguments -------------------------------------------------------------------------
# Each function takes the shape of the logits, the result (a tensor without data) and the other
# arguments of the operator or method. It returns the steps, or None if it does not support them.


def _same(before: Shape, out: Tensor, *_: Any, **__: Any) -> LogitsSteps | None:
    return (Same(),)


def _cast(before: Shape, out: Tensor, *_: Any, **__: Any) -> LogitsSteps | None:
    return (Cast(out.dtype),) if out.dtype.is_floating_point else None


def _reshape(before: Shape, out: Tensor, *args: Any, **_: Any) -> LogitsSteps | None:
    if args and isinstance(args[0], torch.dtype):
        return None
    return (Reshape(before, out.shape),)


def _permute(before: Shape, out: Tensor, *dims: Any, **_: Any) -> LogitsSteps | None:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    order = tuple(d % len(before) for d in order)
    return (
        (Permute(order, tuple(out.shape)),) if sorted(order) == list(range(len(before))) else None
    )


def _movedim(before: Shape, out: Tensor, source: Any, destination: Any) -> LogitsSteps | None:
    if not isinstance(source, int) or not isinstance(destination, int):
        return None
    order = list(range(len(before)))
    order.insert(destination % len(before), order.pop(source % len(before)))
    return (Permute(tuple(order), tuple(out.shape)),)


def _transpose(before: Shape, out: Tensor, dim0: int, dim1: int) -> LogitsSteps | None:
    order = list(range(len(before)))
    dim0, dim1 = dim0 % len(before), dim1 % len(before)
    order[dim0], order[dim1] = dim1, dim0
    return (Permute(tuple(order), tuple(out.shape)),)


def _turn(before: Shape, out: Tensor) -> LogitsSteps | None:
    return (Same(),) if len(before) < 2 else _transpose(before, out, -2, -1)


def _slice(
    before: Shape,
    out: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> LogitsSteps | None:
    dim = dim % len(before)
    index = slice(*slice(start, end, step).indices(before[dim]))
    return (Slice(dim, index, before, tuple(out.shape)),)


def _narrow(before: Shape, out: Tensor, dim: int, start: int, length: int) -> LogitsSteps | None:
    if not isinstance(start, int):
        return None
    start = start % max(before[dim], 1) if start < 0 else start
    return _slice(before, out, dim, start, start + length)


def _select(before: Shape, out: Tensor, dim: int, index: int) -> LogitsSteps | None:
    if isinstance(index, Tensor):
        return None
    dim = dim % len(before)
    index = index + before[dim] if index < 0 else index
    narrow = (*before[:dim], 1, *before[dim + 1 :])
    step = Slice(dim, slice(index, index + 1, 1), before, narrow)
    return step, Reshape(narrow, tuple(out.shape))


def _index(before: Shape, out: Tensor, indices: Any) -> LogitsSteps | None:
    return (Index(tuple(indices), before, tuple(out.shape)),)


def _is_compiling() -> bool:
    return torch.compiler.is_compiling()


def number_of(x: Any) -> float | None:
    """The value of a number or of a ``()`` tensor; ``None`` for anything else."""
    if isinstance(x, Tensor):
        if x.dim() or x.is_complex() or _is_compiling():
            return None
        return float(x.detach())
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else None


def _is_traced_factor(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.dim() and not x.is_complex() and _is_compiling()


def _times(before: Shape, out: Tensor, other: Any) -> LogitsSteps | None:
    if _is_traced_factor(other):
        return (Factor(other), Cast(out.dtype))
    number = number_of(other)
    return None if number is None else (Scale("mul", number), Cast(out.dtype))


def _over(
    before: Shape, out: Tensor, other: Any, *, rounding_mode: str | None = None
) -> LogitsSteps | None:
    if _is_traced_factor(other) and rounding_mode is None:
        return (Factor(1 / other), Cast(out.dtype))
    number = number_of(other)
    if number is None or rounding_mode is not None:
        return None
    return (Scale("div", number), Cast(out.dtype))


def _minus(before: Shape, out: Tensor) -> LogitsSteps | None:
    return (Scale("mul", -1.0),)


def _tanh(before: Shape, out: Tensor) -> LogitsSteps | None:
    return (Cap(),)


def _plus(before: Shape, out: Tensor, other: Any, *, alpha: float = 1) -> LogitsSteps | None:
    if not isinstance(other, Tensor) or alpha != 1 or not before or tuple(out.shape) != before:
        return None
    if other.numel() != before[-1] or other.shape[-1:] != before[-1:]:
        return None
    bias = other.reshape(-1)
    if not _is_compiling():
        wanted = other.requires_grad
        bias = bias.detach().clone()  # later writes into it do not count
        bias.requires_grad_(wanted)
    return (Bias(bias), Cast(out.dtype))


def _subscript(before: Shape, out: Tensor, item: Any) -> LogitsSteps | None:
    items = list(item) if isinstance(item, tuple) else [item]
    if any(isinstance(i, bool) or (isinstance(i, Tensor) and i.dim() == 0) for i in items):
        return None
    used = sum(_dims_of(i) for i in items if i is not None and i is not Ellipsis)
    dots = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1 or used > len(before):
        return None
    at = dots[0] if dots else len(items)
    items[at : at + len(dots)] = [slice(None)] * (len(before) - used)
    return (Subscript(tuple(items)),)


def _dims_of(i: Any) -> int:
    return i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1


# ---- undo steps in backward -----------------------------------------------------------------
# Each function takes the gradient and the other arguments of the operator that autograd applies to
# it. It returns the step that this operator undoes, or None.


def _undo_permute(read: Callable[..., LogitsSteps | None]) -> Callable[..., LogitsStep | None]:
    def undo(grad: Tensor, *args: Any, **kwargs: Any) -> LogitsStep | None:
        out = torch.empty(0, dtype=grad.dtype, device="meta")
        steps = read(tuple(grad.shape), out, *args, **kwargs)
        if steps is None or not isinstance(steps[0], Permute):
            return None
        dims = steps[0].dims
        return Permute(tuple(dims.index(d) for d in range(len(dims))), tuple(grad.shape))

    return undo


def _undo_slice(
    grad: Tensor, sizes: Any, dim: int, start: Any, end: Any, step: int
) -> LogitsStep | None:
    index = slice(*slice(start, end, step).indices(sizes[dim]))
    return Slice(dim % len(sizes), index, tuple(sizes), tuple(grad.shape))


def _undo_select(grad: Tensor, sizes: Any, dim: int, index: int) -> LogitsStep | None:
    dim = dim % len(sizes)
    index = index + sizes[dim] if index < 0 else index
    narrow = (*sizes[:dim], 1, *sizes[dim + 1 :])
    return Slice(dim, slice(index, index + 1, 1), tuple(sizes), narrow)


def _undo_times(grad: Tensor, other: Any) -> LogitsStep | None:
    number = number_of(other)
    return None if number is None else Scale("mul", number)


def _undo_over(grad: Tensor, other: Any) -> LogitsStep | None:
    number = number_of(other)
    return None if number is None else Scale("div", number)


def _undo_minus(grad: Tensor) -> LogitsStep | None:
    return Scale("mul", -1.0)


def _undo_tanh(grad: Tensor, result: Any) -> LogitsStep | None:
    steps = [s for s in getattr(result, "steps", None) or () if s.undone]
    return steps[-1] if steps and isinstance(steps[-1], Cap) else None


class Row(NamedTuple):
    """A kind of step."""

    ops: tuple[str, ...]  # operators of torch.ops.aten
    methods: tuple[str, ...]  # methods of tensors, in code that torch.compile traces
    read: Callable[..., LogitsSteps | None]
    undo_ops: tuple[str, ...] = ()
    undo: Callable[..., LogitsStep | None] | None = None
    in_place: tuple[str, ...] = ()  # operators and methods that write into the logits instead


STEPS = (
    Row(("detach", "alias", "clone", "lift_fresh"), ("clone", "contiguous", "detach"), _same),
    Row(
        ("_to_copy",),
        ("to", "float", "double", "half", "bfloat16", "type_as"),
        _cast,
    ),
    Row(
        ("view", "_unsafe_view", "_reshape_alias", "squeeze", "squeeze.dim", "squeeze.dims",
         "unsqueeze"),
        ("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze",
         "unsqueeze"),
        _reshape,
    ),
    Row(("permute",), ("permute",), _permute, ("permute",), _undo_permute(_permute)),
    Row(
        ("transpose.int",), ("transpose", "swapaxes", "swapdims"), _transpose,
        ("transpose.int",), _undo_permute(_transpose),
    ),
    Row((), ("movedim", "moveaxis"), _movedim),
    Row(("t",), (), _turn, ("t",), _undo_permute(_turn)),
    Row(("slice.Tensor",), (), _slice, ("slice_backward",), _undo_slice),
    Row((), ("narrow",), _narrow),
    Row((), ("__getitem__",), _subscript),
    Row(("select.int",), ("select",), _select, ("select_backward",), _undo_select),
    Row(("index.Tensor",), (), _index),
    Row(
        ("mul.Tensor", "mul.Scalar"),
        ("mul", "multiply", "__mul__", "__rmul__"),
        _times,
        ("mul.Tensor", "mul.Scalar"),
        _undo_times,
        ("mul_.Tensor", "mul_.Scalar", "mul_", "__imul__"),
    ),
    Row(
        ("div.Tensor", "div.Scalar"),
        ("div", "divide", "true_divide", "__truediv__"),
        _over,
        ("div.Tensor", "div.Scalar"),
        _undo_over,
        ("div_.Tensor", "div_.Scalar", "div_", "__itruediv__"),
    ),
    Row(("neg",), ("neg", "negative", "__neg__"), _minus, ("neg",), _undo_minus, ("neg_",)),
    Row(("tanh",), ("tanh",), _tanh, ("tanh_backward",), _undo_tanh, ("tanh_",)),
    Row(("add.Tensor",), ("add", "__add__", "__radd__"), _plus),
)  # fmt: skip
