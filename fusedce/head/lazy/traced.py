"""Lazy logits inside ``torch.compile``, which cannot trace the making of a tensor subclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedce.head.lazy.logits import LazyLogits, take_step
from fusedce.head.lazy.state import Lazy, State
from fusedce.head.lazy.steps import METHODS


class TracedLogits(Lazy):
    """What a replaced head returns while ``torch.compile`` traces: no tensor, but like one.

    In the traced code the steps and the loss are those of :class:`LazyLogits`, and everything else
    gets real logits. Outside, where a compiled model has returned it, it passes everything on to
    a :class:`LazyLogits` of the same state, or to real logits that the traced code has looked at.
    """

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._outside: LazyLogits | None = None

    def tensor(self) -> Tensor:
        """A tensor with these values: real while tracing, lazy outside."""
        if torch.compiler.is_compiling() or self.looked_at():
            return self.materialize()
        if self._outside is None:
            self._outside = LazyLogits.make(self._state)
        return self._outside

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

    @property
    def requires_grad(self) -> bool:
        return self.wants_graph()

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
        if torch.compiler.is_compiling():
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
        if step is not None and torch.compiler.is_compiling() and not self.looked_at():
            result = step(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return getattr(self.tensor(), name)(*_tensors(args), **_tensors(kwargs))

    return method


# Operators are looked up on the type, hence not by `__getattr__`.
_OPERATORS = (
    "sub", "rsub", "rtruediv", "pow", "rpow", "neg", "abs", "matmul", "rmatmul", "mod", "rmod",
    "floordiv", "rfloordiv", "and", "or", "xor", "invert", "eq", "ne", "lt", "le", "gt", "ge",
    "len", "iter", "contains", "bool", "float", "int", "index", "setitem",
    "iadd", "isub", "ipow", "imod", "ifloordiv", "iand", "ior", "ixor",
)  # fmt: skip
for _name in (*METHODS, *(f"__{n}__" for n in _OPERATORS)):
    if hasattr(torch.Tensor, _name):
        setattr(TracedLogits, _name, _method(_name))
TracedLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
