"""Tensors without storage, whose numbers are made when somebody looks.

:class:`Lazy` is what lazy logits and lazy gradients have in common: who looks at them above
autograd (printing, pickling, numpy, ``torch.compile``), and what they get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusedce.head.lazy.ops import Known, Layout, known

T = torch.Tensor
BELOW = torch._C.DisableTorchFunctionSubclass


# Methods that give the memory itself away.
_STORAGE = (T.storage, T._typed_storage, T.untyped_storage)
_MEMORY = (T.numpy, T.__array__, T.data_ptr, T.__dlpack__, T.share_memory_, *_STORAGE)


def _values_of(func: Any, x: Lazy, *args: Any, **kwargs: Any) -> Any:
    """Call a function that exposes memory on the computed values."""
    values = x.expose(func.__name__)
    if x.requires_grad and func in (T.numpy, T.__array__, T.__dlpack__):
        values = values.detach().requires_grad_()  # for torch to refuse it
    return func(values, *args, **kwargs)


def _by_pointer(func: Any, *args: Any) -> Any:
    """Call a function that reads and writes memory element by element on the computed values."""
    func(*replaced(args, Lazy, lambda x: x.expose(func.__name__)))
    return args[0]


class Lazy(torch.Tensor):
    """A wrapper subclass whose numbers are made by ``look`` or ``expose``."""

    like: Layout  # that of these
    # What is taken above autograd: each is given the function, then its arguments.
    above: ClassVar[dict[Any, Any]] = {
        **dict.fromkeys(_MEMORY, _values_of),
        **dict.fromkeys((T.apply_, T.map_, T.map2_), _by_pointer),
        T.tolist: lambda func, x: x.look("tolist").tolist(),
    }  # fmt: skip

    def look(self, operation: str) -> Tensor:
        """The numbers, without a graph."""
        raise NotImplementedError

    def expose(self, operation: str) -> Tensor:
        """The numbers for somebody who may write into them unseen."""
        raise NotImplementedError

    def begin_write(self, operation: str) -> None:
        """Before an operator that may write into the numbers; they are what counts from now on."""
        raise NotImplementedError

    def end_write(self) -> None:
        """After it."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.look("repr"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.look("deepcopy").__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (
            self.look("pickle").detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)
        )

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """``torch.compile`` calls this to learn what memory it compiles for, and there is none.

        The frame that was handed these runs uncompiled, and its loss is fused.
        """
        from torch._dynamo.exc import SkipFrame  # loaded by whoever asks; slow to load otherwise

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

        In inference mode autograd has not taken composite operators apart on their way down: what
        ``to`` or ``reshape`` does, view or copy, is known of their parts alone.
        """
        op, kwargs = known(func), kwargs or {}
        if op.is_composite:
            return func.decompose(*args, **kwargs)  # type: ignore[attr-defined]
        return cls.dispatch(func, op, args, kwargs)

    @classmethod
    def dispatch(cls, func: Any, op: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that is not composite."""
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
        with BELOW():
            if handler and args and (handler is _by_pointer or isinstance(args[0], cls)):
                result = handler(func, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            return func(*args, **kwargs)


def _method(func: Any) -> Callable[..., Any]:
    """Method for callers that torch does not dispatch, such as hooks on saved tensors."""
    return functools.wraps(func)(lambda self, *a, **k: _values_of(func, self, *a, **k))


for _func in _MEMORY:
    setattr(Lazy, _func.__name__, _method(_func))


@functools.cache
def _keep_compiler_out() -> None:
    """``torch.compile`` would go on with the frames of :class:`Lazy` that a skipped frame calls.

    Only from the first such frame on, since each call takes 1 us more then.
    """
    for name in ("__torch_function__", "__torch_dispatch__"):
        method = torch.compiler.disable(Lazy.__dict__[name].__func__)
        setattr(Lazy, name, classmethod(method))


def real(x: Any, operation: str) -> Any:
    """``x`` with all lazy tensors in it replaced by real ones."""
    return replaced(x, Lazy, lambda lazy: lazy.look(operation))


def write(func: Any, op: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that writes into some of its arguments, or may do so, on real numbers."""
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
