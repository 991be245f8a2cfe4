"""Lazy logits inside ``torch.compile``, which cannot trace the making of a tensor subclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedce.lazy_logits import LazyLogits, take_step
from fusedce.lazy_state import Lazy
from fusedce.lazy_steps import METHODS


class TracedLogits(Lazy):
    """What a replaced head returns while ``torch.compile`` traces: no tensor, but like one.

    In the traced code the steps and the loss are those of :class:`LazyLogits`, and everything else
    gets real logits. Outside, where a compiled model has returned it, it passes everything on to
    a :class:`LazyLogits` of the same state.
    """

    def tensor(self) -> Tensor:
        """A tensor with these values: real while tracing, lazy outside."""
        if self._real is None:
            compiling = torch.compiler.is_compiling()
            self._real = self.materialize() if compiling else LazyLogits.make(self._state)
        return self._real

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._state.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._state.dtype

    @property
    def device(self) -> torch.device:
        return self._state.hidden.device

    @property
    def ndim(self) -> int:
        return len(self._state.shape)

    def dim(self) -> int:
        return len(self._state.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self._state.shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not one of a tensor's, or this object is half made
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = take_step(func, args, kwargs)
        if result is not NotImplemented:
            return result
        args, kwargs = _tensors(args), _tensors(kwargs)
        return func(*args, **kwargs)


def _tensors(x: Any) -> Any:
    """``x`` with all traced logits in it replaced by tensors."""
    if isinstance(x, TracedLogits):
        return x.tensor()
    if isinstance(x, dict):
        return {k: _tensors(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)([_tensors(y) for y in x])
    return x


def _method(name: str) -> Callable[..., Any]:
    """A method of traced logits: the step of that name, or the tensor's method."""
    step = METHODS.get(name)

    def method(self: TracedLogits, *args: Any, **kwargs: Any) -> Any:
        if step is not None and not self._mutated:
            result = step(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            self._mutated = True
        return getattr(self.tensor(), name)(*_tensors(args), **_tensors(kwargs))

    return method


_OPERATORS = (
    "__sub__", "__rsub__", "__rtruediv__", "__pow__", "__neg__",
    "__matmul__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__len__",
    "__iter__", "__setitem__", "masked_fill_", "add_", "sub_", "fill_", "copy_", "zero_",
)  # fmt: skip
for _name in (*METHODS, *_OPERATORS):
    setattr(TracedLogits, _name, _method(_name))
TracedLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
