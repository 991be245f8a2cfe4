"""Tensors without storage, whose numbers are made when somebody looks.

:class:`Lazy` is what lazy logits and lazy gradients have in common: who looks at them above
autograd (printing, pickling, numpy, ``torch.compile``), and what they get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedce.head.lazy.ops import Layout

T = torch.Tensor
BELOW = torch._C.DisableTorchFunctionSubclass


def _values_of(func: Any, x: Lazy, *args: Any, **kwargs: Any) -> Any:
    """What gives away the memory itself."""
    values = x.expose(func.__name__)
    if x.requires_grad and func in (T.numpy, T.__array__, T.__dlpack__):
        values = values.detach().requires_grad_()  # for torch to refuse it
    return func(values, *args, **kwargs)


class Lazy(torch.Tensor):
    """A wrapper subclass whose numbers are made by ``look`` or ``expose``."""

    like: Layout  # that of these
    # What is taken above autograd: each is given the function, then its arguments.
    above: ClassVar[dict[Any, Callable[..., Any]]] = {
        **dict.fromkeys(
            (T.numpy, T.__array__, T.data_ptr, T.__dlpack__, T.share_memory_), _values_of
        ),
        T._is_view: lambda func, x: False,  # see `unviewed`
        T.tolist: lambda func, x: x.look("tolist").tolist(),
    }  # fmt: skip

    def look(self, operation: str) -> Tensor:
        """The numbers, without a graph."""
        raise NotImplementedError

    def expose(self, operation: str) -> Tensor:
        """The numbers for somebody who may write into them unseen."""
        raise NotImplementedError

    def unviewed(self) -> Tensor:
        """Their memory for compiled code: torch.compile has no views of subclasses."""
        return unviewed(self.expose("torch.compile"))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.look("repr"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (
            self.look("pickle").detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)
        )

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Compiled code that is handed these gets real ones."""
        if "looked" not in self.__dict__:
            self.looked = self.unviewed()
        return ["looked"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Tensor:
        return inner["looked"]

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
        with BELOW():
            if handler is not None and args and isinstance(args[0], cls):
                result = handler(func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            return func(*args, **kwargs)


def unviewed(x: Tensor) -> Tensor:
    """The same memory, but no view of anything."""
    with torch.no_grad():
        new = torch.empty(0, dtype=x.dtype, device=x.device)
        return new.set_(x.untyped_storage(), x.storage_offset(), x.size(), x.stride())


def real(x: Any, operation: str) -> Any:
    """``x`` with all lazy tensors in it replaced by real ones."""
    return replaced(x, Lazy, lambda lazy: lazy.look(operation))


# ---- for logits in traced code, which are no tensors, as well --------------------------------


def replaced(x: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """``x`` with ``by(y)`` for each ``y`` of this kind in it."""
    if isinstance(x, kind):
        return by(x)
    if isinstance(x, dict):
        return {k: replaced(v, kind, by) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        items = [replaced(y, kind, by) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x


def split(x: Any, parts: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Views of ``x`` as long as ``parts``, which a split of something like it gave for ``args``.

    Each is a view of its own: autograd would fill up what is not used with real zeros.
    """
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    begin, views = 0, []
    for part in parts:
        views.append(x.narrow(dim, begin, part.shape[dim]))
        begin += part.shape[dim]
    return tuple(views)


def unbind(x: Any, dim: int = 0) -> tuple[Any, ...]:
    return tuple(x.select(dim, i) for i in range(x.shape[dim]))
