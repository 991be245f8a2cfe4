"""The steps that logits may take between the output head and the loss, and how each fuses.

The real effect of a step is the operator itself. How it fuses is its method ``fuse``: what it does
to :class:`Projected`, or ``None`` where the fused loss does not know it; the loss is then computed
from real logits. To add a step, add a class here and a row in :mod:`fusedce.head.lazy.table`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.head.clock import version_of

Shape = tuple[int, ...]
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
Steps = tuple["Step", ...]


class Projected(NamedTuple):
    """Logits as the fused loss computes them."""

    hidden: Tensor  # (..., H): the dimensions of the logits but that of the classes, then H
    class_dim: int  # where the classes are among the dimensions of the logits
    classes: slice  # those that are left of the vocabulary
    bias: Tensor | None = None  # (V,), added beside the head's own
    scale: float = 1.0  # before the cap
    cap: float | None = None  # what follows the tanh, where there is one
    rounded: bool = False  # to less than the dtype of the hidden state
    factor: Tensor | None = None  # (), beside the scale, where its number is not known

    def insert(self, dim: int) -> int:
        """Where dimension ``dim`` of the logits is among those of the hidden state."""
        return dim - (dim > self.class_dim)


class Step:
    """What was done. ``rearranges`` says that no value was changed, and none lost or repeated."""

    rearranges = False
    undone = True  # whether autograd's way back changes what a gradient comes to

    def fuse(self, p: Projected) -> Projected | None:
        raise NotImplementedError


class Same(Step):
    """Copies, and views of everything."""

    rearranges, undone = True, False

    def fuse(self, p: Projected) -> Projected | None:
        return p


class Cast(Step):
    """Another floating dtype: the loss is computed in float32 or better in any case."""

    undone = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def fuse(self, p: Projected) -> Projected | None:
        # Who asks for float64 means it.
        if self.dtype == torch.float64 != p.hidden.dtype:
            return None
        if torch.finfo(self.dtype).eps > torch.finfo(p.hidden.dtype).eps:
            return p._replace(rounded=True)
        return p


class Reshape(Step):
    """The same values in the same order."""

    rearranges, undone = True, False

    def __init__(self, before: Shape, after: Shape) -> None:
        self.before, self.after = before, after

    def fuse(self, p: Projected) -> Projected | None:
        c = p.class_dim
        if c == len(self.before) - 1:
            at = len(self.after) - 1
        else:
            outer = math.prod(self.before[:c])
            products = [math.prod(self.after[:k]) for k in range(len(self.after))]
            sizes = zip(products, self.after, strict=True)
            found = [k for k, (n, V) in enumerate(sizes) if n == outer and self.before[c] == V]
            at = found[-1] if found else -1
        if at < 0 or self.after[at] != self.before[c]:
            return None  # the classes are mixed with something else
        shape = [*self.after[:at], *self.after[at + 1 :], p.hidden.shape[-1]]
        return p._replace(hidden=p.hidden.reshape(shape), class_dim=at)


class Permute(Step):
    rearranges = True

    def __init__(self, dims: Shape, after: Shape) -> None:
        self.dims, self.after = dims, after

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Permute) and self.dims == other.dims

    __hash__ = None  # type: ignore[assignment]

    def fuse(self, p: Projected) -> Projected | None:
        rows = [p.insert(d) for d in self.dims if d != p.class_dim]
        hidden = p.hidden.permute([*rows, len(rows)])
        return p._replace(hidden=hidden, class_dim=self.dims.index(p.class_dim))


class Slice(Step):
    def __init__(self, dim: int, index: slice, before: Shape, after: Shape) -> None:
        self.dim, self.index, self.before, self.after = dim, index, before, after

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slice) and (self.dim, self.index, self.before) == (
            other.dim,
            other.index,
            other.before,
        )

    __hash__ = None  # type: ignore[assignment]

    def fuse(self, p: Projected) -> Projected | None:
        if self.dim != p.class_dim:
            index = (*(slice(None) for _ in range(p.insert(self.dim))), self.index)
            return p._replace(hidden=p.hidden[index])
        here = p.classes
        start, stop, step = self.index.indices(here.stop - here.start)
        if step != 1 or stop <= start:
            return None
        return p._replace(classes=slice(here.start + start, here.start + stop))


class Index(Step):
    """Masks and lists of positions, as they are now."""

    def __init__(self, indices: tuple[Tensor | None, ...], before: Shape, after: Shape) -> None:
        self.indices = tuple(None if i is None else i.clone() for i in indices)
        self.given = tuple(None if i is None else identity(i) for i in indices)
        self.before, self.after = before, after

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Index) and self.before == other.before and self.given == other.given
        )

    __hash__ = None  # type: ignore[assignment]

    def fuse(self, p: Projected) -> Projected | None:
        used = sum(1 if i is None or i.dtype != torch.bool else i.dim() for i in self.indices)
        if p.class_dim != len(self.before) - 1 or used > p.class_dim:
            return None
        hidden = p.hidden[tuple(slice(None) if i is None else i for i in self.indices)]
        return p._replace(hidden=hidden, class_dim=len(self.after) - 1)


def identity(x: Tensor) -> Any:
    return x.dtype, x.shape, x.stride(), x.data_ptr(), version_of(x)


class Scale(Step):
    """Times a number, or divided by one: a division is not rounded as a product is."""

    def __init__(self, kind: str, number: float) -> None:
        self.kind, self.number = kind, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale) and (self.kind, self.number) == (other.kind, other.number)

    __hash__ = None  # type: ignore[assignment]

    def fuse(self, p: Projected) -> Projected | None:
        if self.kind == "div" and self.number == 0:
            return None
        factor = self.number if self.kind == "mul" else 1 / self.number
        if p.cap is None:
            return p._replace(scale=p.scale * factor)
        return p._replace(cap=p.cap * factor)


class Factor(Step):
    """Times a tensor without dimensions, in code that is traced: no graph knows its number."""

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def fuse(self, p: Projected) -> Projected | None:
        if p.cap is not None:
            return None  # the fused loss takes a cap as a number
        return p._replace(factor=self.factor if p.factor is None else p.factor * self.factor)


class Cap(Step):
    """A tanh; each is equal to itself alone."""

    def fuse(self, p: Projected) -> Projected | None:
        return None if p.cap is not None else p._replace(cap=1.0)


class Bias(Step):
    """One value per class added, before anything else is done to the values."""

    undone = False

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias  # (V,)

    def fuse(self, p: Projected) -> Projected | None:
        if (
            p.scale != 1.0
            or p.factor is not None
            or p.cap is not None
            or p.class_dim != p.hidden.dim() - 1
        ):
            return None
        if p.rounded or torch.promote_types(p.hidden.dtype, self.bias.dtype) != p.hidden.dtype:
            return None  # a bias finer than the logits
        if p.classes != slice(0, len(self.bias)):
            return None
        bias = self.bias.to(p.hidden.dtype)
        return p._replace(bias=bias if p.bias is None else p.bias + bias)


class Subscript(Step):
    """``logits[items]`` with an item for each dimension, in code that is traced."""

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items

    def fuse(self, p: Projected) -> Projected | None:
        *rows, classes = self.items
        if p.class_dim != p.hidden.dim() - 1 or not isinstance(classes, slice):
            return None
        here = p.classes
        start, stop, step = classes.indices(here.stop - here.start)
        if step != 1 or stop <= start:
            return None
        hidden = p.hidden[tuple(rows)] if rows else p.hidden
        left = slice(here.start + start, here.start + stop)
        return p._replace(hidden=hidden, class_dim=hidden.dim() - 1, classes=left)


def as_options(p: Projected) -> Projected | None:
    """Scale and cap as the fused loss takes them, if it does.

    ``b * tanh(a * z)`` is a cap of b after a scale of ab.
    """
    if p.cap is not None:
        p = p._replace(scale=p.scale * p.cap, cap=abs(p.cap))
    usable = (p.cap is None or _TINY <= p.cap <= _HUGE) and -_HUGE <= p.scale <= _HUGE
    return p if usable else None
