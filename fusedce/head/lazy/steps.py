"""Steps: the operations on logits between output head and loss that the fused loss supports.

The real effect of a step is the operator itself. Its method ``fuse`` applies the step to
:class:`Projected`, or returns ``None`` if the fused loss does not support it; the loss is then
computed from real logits. To add a step, add a class here and a row in
:mod:`fusedce.head.lazy.table`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedce.head.optimizer_clock import version_of

Shape = tuple[int, ...]
_TINY, _HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
LogitsSteps = tuple["LogitsStep", ...]


class Projected(NamedTuple):
    """Operands from which the fused loss computes the logits."""

    hidden: Tensor  # (..., H): the logits' dimensions without the class dimension, then H
    class_dim: int  # position of the class dimension among those of the logits
    classes: slice  # the part of the vocabulary that is left
    bias: Tensor | None = None  # (V,), added beside the head's own
    scale: float = 1.0  # before the cap
    cap: float | None = None  # the factor after a tanh; None: no tanh
    rounded: bool = False  # the logits were cast to a coarser dtype than the hidden state's
    factor: Tensor | None = None  # (), a further factor whose value is not known while tracing

    def insert(self, dim: int) -> int:
        """The dimension of the hidden state that is dimension ``dim`` of the logits."""
        return dim - (dim > self.class_dim)


class LogitsStep:
    """One operation on logits between output head and loss.

    Attributes:
        rearranges: the step changes, drops and repeats no value.
        undone: autograd undoes the step in backward by an operator that changes the gradient.
    """

    rearranges = False
    undone = True

    def fuse(self, p: Projected) -> Projected | None:
        """The operands after this step; ``None`` if the fused loss does not support it."""
        raise NotImplementedError


class Same(LogitsStep):
    """A copy, or a view of all values in the same shape."""

    rearranges, undone = True, False

    def fuse(self, p: Projected) -> Projected | None:
        """Return the same operands."""
        return p


class Cast(LogitsStep):
    """A cast to another floating dtype; the loss is computed in float32 or better anyway."""

    undone = False

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def fuse(self, p: Projected) -> Projected | None:
        """Note a rounding; ``None`` for float64, which asks for a loss in float64."""
        # A cast to float64 asks for a loss in float64.
        if self.dtype == torch.float64 != p.hidden.dtype:
            return None
        if torch.finfo(self.dtype).eps > torch.finfo(p.hidden.dtype).eps:
            return p._replace(rounded=True)
        return p


class Reshape(LogitsStep):
    """The same values in the same order, in another shape."""

    rearranges, undone = True, False

    def __init__(self, before: Shape, after: Shape) -> None:
        self.before, self.after = before, after

    def fuse(self, p: Projected) -> Projected | None:
        """Reshape the rows; ``None`` if the class dimension does not survive."""
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


class Permute(LogitsStep):
    """Another order of the dimensions."""

    rearranges = True

    def __init__(self, dims: Shape, after: Shape) -> None:
        self.dims, self.after = dims, after

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Permute) and self.dims == other.dims

    __hash__ = None  # type: ignore[assignment]

    def fuse(self, p: Projected) -> Projected | None:
        """Permute the rows, and note where the classes are."""
        rows = [p.insert(d) for d in self.dims if d != p.class_dim]
        hidden = p.hidden.permute([*rows, len(rows)])
        return p._replace(hidden=hidden, class_dim=self.dims.index(p.class_dim))


class Slice(LogitsStep):
    """A slice of one dimension."""

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
        """Slice the rows, or the classes by a step of 1."""
        if self.dim != p.class_dim:
            index = (*(slice(None) for _ in range(p.insert(self.dim))), self.index)
            return p._replace(hidden=p.hidden[index])
        here = p.classes
        start, stop, step = self.index.indices(here.stop - here.start)
        if step != 1 or stop <= start:
            return None
        return p._replace(classes=slice(here.start + start, here.start + stop))


class Index(LogitsStep):
    """Indexing with masks and lists of positions, which are copied."""

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
        """Index the rows; ``None`` if an index reaches the classes."""
        used = sum(1 if i is None or i.dtype != torch.bool else i.dim() for i in self.indices)
        if p.class_dim != len(self.before) - 1 or used > p.class_dim:
            return None
        hidden = p.hidden[tuple(slice(None) if i is None else i for i in self.indices)]
        return p._replace(hidden=hidden, class_dim=len(self.after) - 1)


def identity(x: Tensor) -> Any:
    """A value that two tensors share only if they are the same memory without a write between."""
    return x.dtype, x.shape, x.stride(), x.data_ptr(), version_of(x)


class Scale(LogitsStep):
    """A product with a number ("mul") or a quotient ("div"), which are rounded differently."""

    def __init__(self, kind: str, number: float) -> None:
        self.kind, self.number = kind, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale) and (self.kind, self.number) == (other.kind, other.number)

    __hash__ = None  # type: ignore[assignment]

    def fuse(self, p: Projected) -> Projected | None:
        """Multiply the scale, or the factor after a tanh."""
        if self.kind == "div" and self.number == 0:
            return None
        factor = self.number if self.kind == "mul" else 1 / self.number
        if p.cap is None:
            return p._replace(scale=p.scale * factor)
        return p._replace(cap=p.cap * factor)


class Factor(LogitsStep):
    """A product with a ``()`` tensor in traced code, where its value is not known."""

    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def fuse(self, p: Projected) -> Projected | None:
        """Multiply the further factor; ``None`` after a tanh."""
        if p.cap is not None:
            return None  # the fused loss takes a cap as a number
        return p._replace(factor=self.factor if p.factor is None else p.factor * self.factor)


class Cap(LogitsStep):
    """A tanh; two of them are never equal."""

    def fuse(self, p: Projected) -> Projected | None:
        """Set the cap to 1; ``None`` for a second tanh."""
        return None if p.cap is not None else p._replace(cap=1.0)


class Bias(LogitsStep):
    """One value per class, added before any other change of the values."""

    undone = False

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias  # (V,)

    def fuse(self, p: Projected) -> Projected | None:
        """Add to the bias; ``None`` after any change of the values, or with other classes."""
        if (
            p.scale != 1.0
            or p.factor is not None
            or p.cap is not None
            or p.class_dim != p.hidden.dim() - 1
        ):
            return None
        if p.rounded or torch.promote_types(p.hidden.dtype, self.bias.dtype) != p.hidden.dtype:
            return None  # the sum with a finer bias would be rounded here
        if p.classes != slice(0, len(self.bias)):
            return None
        bias = self.bias.to(p.hidden.dtype)
        return p._replace(bias=bias if p.bias is None else p.bias + bias)


class Subscript(LogitsStep):
    """``logits[items]`` with an item for each dimension, in traced code."""

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items

    def fuse(self, p: Projected) -> Projected | None:
        """Index the rows and slice the classes."""
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
    """Scale and cap as options of the fused loss; ``None`` if they are out of range.

    ``b * tanh(a * z)`` is a soft-cap of ``b`` after a scale of ``a * b``.
    """
    if p.cap is not None:
        p = p._replace(scale=p.scale * p.cap, cap=abs(p.cap))
    usable = (p.cap is None or _TINY <= p.cap <= _HUGE) and -_HUGE <= p.scale <= _HUGE
    return p if usable else None
