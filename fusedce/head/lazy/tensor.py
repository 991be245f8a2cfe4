"""Tensors without storage, whose values are computed when code reads them.

:class:`Lazy` is the base class of lazy logits and lazy gradients. It computes values for readers
above autograd: printing, pickling, numpy, ``torch.compile``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedce.head.lazy.ops import LazyLayout, OpInfo, op_info

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
        """Any operator, below autograd.

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
