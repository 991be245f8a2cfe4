"""Lazy logits: a tensor ``(..., V)`` without storage, computed when code reads its values.

Torch's autograd runs above it, unchanged: views, casts, writes, hooks and functions of users are
differentiated by torch's own nodes. An operator that arrives *below* autograd is noted as an
:class:`Expr` if it is a view or a row of :data:`fusedce.head.rules.RULES`; any other operator gets
real logits, computed once. After a write the logits stay real.

The gradient of a fused loss travels back along this chain as a
:class:`fusedce.head.gradient.LazyGradient`: without values, unless code reads it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from ..autograd import NAMESPACE
from .linear_call import NO_TORCH_FUNCTION, Expr, Memory
from .rules import RULES, indexed_dims, is_mask

T: Any = torch.Tensor
# A variable of the context, since backward runs in threads of its own, beside a user's.
# This says who calls operators of lazy tensors: autograd, code, or another subclass of tensors,
# which converts results and so needs real ones.
AUTOGRAD, CODE, SUBCLASS = range(3)
caller = ContextVar("fusedce_caller", default=AUTOGRAD)
aten = torch.ops.aten
_NO_MEMORY = (
    "{} would change in place the shape or the memory of the logits of a head that fusedce has "
    "replaced, but these are lazy logits and have none: use logits + 0, a tensor like any other"
)

# ---- operators ------------------------------------------------------------------------------


class OpSchema(NamedTuple):
    """The arguments an operator writes, and its results, read from its schema once."""

    writes: tuple[int | str, ...]  # positions and names of arguments that it writes, or may
    is_view: bool
    is_composite: bool
    reshapes: bool  # it changes the shape or the memory of its argument in place


_TRUSTED = ("aten", "prim", "prims", NAMESPACE)  # their schemas name all that is written


@functools.cache
def op_schema(func: Any) -> OpSchema:
    """Read what an operator writes: one of an unknown library may write all of its arguments."""
    arguments, returns = func._schema.arguments, func._schema.returns
    # `set_` makes its first argument share the memory of the second, which its schema does not say.
    pure = func.namespace in _TRUSTED and func.overloadpacket is not aten.set_
    written = [
        (i, a.name) for i, a in enumerate(arguments)
        if not pure or (a.alias_info is not None and a.alias_info.is_write)
    ]  # fmt: skip
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return OpSchema(
        tuple(x for pair in written for x in pair),
        not written and any(r.alias_info is not None for r in returns),
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite),
        torch.Tag.inplace_view in func.tags or func.overloadpacket is aten.set_,
    )


class Uncompiled(torch.Tensor):
    """A tensor subclass that ``torch.compile`` cannot trace: it runs the frame uncompiled."""

    def __tensor_flatten__(self) -> Any:
        """Called by the compiler alone."""
        from torch._dynamo.exc import SkipFrame  # slow to import, and loaded by every caller

        _keep_compiler_out()
        raise SkipFrame("lazy logits run uncompiled: pass logits + 0 to have the frame compiled")

    __tensor_unflatten__: Any = None  # nothing is flattened

    @staticmethod
    def defer_to_other_subclass(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Let another tensor subclass handle ``func`` first; otherwise call torch."""
        others = tuple(t for t in types if not issubclass(t, Uncompiled))
        if not others:
            with NO_TORCH_FUNCTION():
                return func(*args, **(kwargs or {}))
        before = caller.set(SUBCLASS)
        try:  # (after NotImplemented torch would ask it with our types, too, which it may refuse)
            return others[0].__torch_function__(func, others, args, kwargs or {})
        finally:
            caller.reset(before)


class LazyLogits(Uncompiled):
    """Lazy logits: see the module.

    Attributes:
        expr: how they are computed.
        memory: values shared with their views.
        meta: a tensor without data of their shape, strides and dtype.
    """

    expr: Expr
    memory: Memory
    meta: Tensor

    @staticmethod
    def __new__(cls, expr: Expr, memory: Memory, meta: Tensor, device: torch.device) -> LazyLogits:
        new: LazyLogits = T._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, device=device
        )
        new.expr, new.memory, new.meta = expr, memory, meta
        return new

    def materialize(self, operation: str, *, to_write: bool = False) -> Tensor:
        """The real logits, without a graph, in the memory that all their views share.

        Args:
            operation: what needs them, for the report.
            to_write: code may write into them, so they are real from now on.
        """
        with torch.no_grad(), NO_TORCH_FUNCTION():
            values = self.expr.materialize(operation, self.memory)
        self.memory.written |= to_write
        return values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        schema, kwargs = op_schema(func), kwargs or {}
        if schema.is_composite:  # in inference mode they arrive whole
            return func.decompose(*args, **kwargs)
        if caller.get() == SUBCLASS:
            args, kwargs = map_lazy(
                (args, kwargs), lambda x: x.materialize(str(func), to_write=True)
            )
        if schema.writes:
            return _write(func, schema, args, kwargs)
        x = args[0]
        commutes = func is aten.mul.Tensor or (func is aten.add.Tensor and not kwargs)
        if not isinstance(x, LazyLogits) and commutes:
            x, args = args[1], (args[1], args[0], *args[2:])
        if isinstance(x, LazyLogits) and (func in RULES or schema.is_view):
            result = _note(x, func, schema, args, kwargs)
            if result is not None:
                return result
        return func(*materialized(args, str(func)), **materialized(kwargs, str(func)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _ABOVE_AUTOGRAD.get(func)
        with NO_TORCH_FUNCTION():
            if handler is not None:
                return handler(func, *args, **(kwargs or {}))
            normal = torch.is_inference_mode_enabled() and not all(
                t.is_inference() for t in tree_leaves((args, kwargs)) if isinstance(t, LazyLogits)
            )
        if normal:
            with torch.inference_mode(False), torch.no_grad():  # torch refuses views there
                return cls.defer_to_other_subclass(func, types, args, kwargs)
        return cls.defer_to_other_subclass(func, types, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        try:
            return repr(self._copied("repr"))
        except RuntimeError as e:  # a debugger shows it
            return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {e})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not self.is_leaf:
            return T.__deepcopy__(self, memo)  # torch refuses that
        values = self._copied("deepcopy")
        values.grad = self.grad
        return copy.deepcopy(values, memo)

    def __copy__(self) -> Tensor:
        self.materialize("copy", to_write=True)  # it shares their memory
        return copy.copy(self._copied("copy"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied("pickle").__reduce_ex__(protocol)

    def _copied(self, operation: str) -> Tensor:
        return self.materialize(operation).detach().requires_grad_(self.requires_grad)


@functools.cache
def _keep_compiler_out() -> None:
    """Disable the compiler inside these methods, which it would trace after a frame it has skipped.

    Not before a frame was skipped: it costs each call 1 us.
    """
    for cls in Uncompiled.__subclasses__():
        for name in {"__torch_function__", "__torch_dispatch__"} & cls.__dict__.keys():
            method = torch.compiler.disable(cls.__dict__[name].__func__)
            setattr(cls, name, classmethod(method))


def map_lazy(x: Any, by: Callable[[Any], Any], kind: type[Tensor] | None = None) -> Any:
    """``x`` with all lazy logits in it replaced, or all tensors of another ``kind``."""
    if isinstance(x, kind or LazyLogits):
        return by(x)
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(map_lazy(y, by, kind) for y in x)
    return {k: map_lazy(v, by, kind) for k, v in x.items()} if isinstance(x, dict) else x


def materialized(x: Any, operation: str) -> Any:
    """``x`` with all lazy logits in it replaced by real ones."""
    return map_lazy(x, lambda lazy: lazy.materialize(operation))


def snapshot(arguments: Any) -> Any:
    """Arguments to keep: expressions of lazy logits, and copies of tensors, which writes spare."""

    def copied(x: Any) -> Any:
        if isinstance(x, LazyLogits):
            return x.expr
        return x.detach().clone().requires_grad_(x.requires_grad)

    return map_lazy(arguments, copied, Tensor)


def without_data(arguments: Any) -> Any:
    """Arguments with tensors of the device "meta"."""
    meta = lambda x: x.meta if isinstance(x, LazyLogits) else x.to("meta")  # noqa: E731
    return map_lazy(arguments, meta, Tensor)


def _note(x: LazyLogits, func: Any, schema: OpSchema, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The result as lazy logits; ``None`` if it needs values."""
    if x.memory.written and not schema.is_view:
        return None
    others = [a for a in args[1:] if isinstance(a, Tensor)]
    if func is aten.add.Tensor and not others:  # logits + 0 are real ones
        return None
    if any(not _is_operand(t, x, func) for t in others):
        return None
    device = kwargs.get("device")
    if device is not None and torch.device(device) not in (x.device, torch.device(x.device.type)):
        return None
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory")}
    meta = _meta_after(func, x, args[1:], kwargs)
    if isinstance(meta, (list, tuple)):
        return _parts(x, func, args[1:], kwargs, meta)
    if meta is None or not meta.dim() or not meta.is_floating_point():
        return None
    nodes = () if x.memory.written else (node_number(t) for t in args if isinstance(t, LazyLogits))
    new = Expr(None, func, (x.expr, *snapshot(args[1:])), kwargs, tuple(meta.shape), nodes)
    memory = x.memory if schema.is_view else Memory(new)
    return LazyLogits(new, memory, meta, x.device)


def node_number(x: Tensor) -> int:
    """The number of the autograd node that made ``x``; -1 without one.

    A number, since the node itself would keep the whole graph alive.
    """
    with NO_TORCH_FUNCTION():
        node: Any = x.grad_fn
    return -1 if node is None else int(node._sequence_nr())


def _is_operand(t: Tensor, x: LazyLogits, func: Any) -> bool:
    """Whether a rule may take this tensor: an index, a number, a bias, or LoRA's part."""
    if isinstance(t, LazyLogits):
        return func is aten.add.Tensor and not t.memory.written
    if func is not aten.add.Tensor:
        return not t.dim() or torch.Tag.pointwise not in func.tags
    return t.dim() > 0 and t.numel() == x.shape[-1] and t.device == x.device


def _meta_after(func: Any, x: LazyLogits, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The result without data: shape and strides of the real operator."""
    if func is aten.index.Tensor:
        if indexed_dims(args[0]) >= x.dim():
            return None
        given: list[Tensor | None] = []
        for index in args[0]:  # how many rows a mask chooses is in its data
            masked = index is not None and is_mask(index)
            given += index.nonzero().unbind(1) if masked else [index]
        args = (given,)
    return func(x.meta, *without_data(args), **kwargs)


def _parts(x: LazyLogits, func: Any, args: Any, kwargs: Any, metas: Sequence[Tensor]) -> list[Any]:
    """The parts of a split, each a slice or a row."""
    rows = func is aten.unbind.int
    dim = kwargs.get("dim", args[-1] if len(args) > (not rows) else 0)
    if rows:
        return [aten.select.int(x, dim, i) for i in range(len(metas))]
    ends = accumulate((meta.shape[dim] for meta in metas), initial=0)
    return [aten.slice.Tensor(x, dim, begin, end) for begin, end in pairwise(ends)]


def _write(func: Any, schema: OpSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an operator that writes into arguments, or may, to real values."""
    name = str(func)
    if schema.reshapes and isinstance(args[0], LazyLogits):
        if func is aten.detach_.default:
            return args[0]
        raise RuntimeError(_NO_MEMORY.format(func.overloadpacket))
    written = [args[i] for i in schema.writes if isinstance(i, int) and i < len(args)]
    written += [kwargs[n] for n in schema.writes if n in kwargs]
    map_lazy(written, lambda x: x.materialize(name, to_write=True))
    lazy_of: dict[int, LazyLogits] = {}

    def materialize(x: LazyLogits) -> Tensor:
        values = x.materialize(name)
        lazy_of[id(values)] = x
        return values

    args, kwargs = map_lazy(args, materialize), map_lazy(kwargs, materialize)
    out = func(*args, **kwargs)
    return tree_map(lambda t: lazy_of.get(id(t), t), out)


# ---- above autograd -----------------------------------------------------------------------------


def _cross_entropy(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:  # torch's name
    """``F.cross_entropy``, by the head of the logits."""
    for call in input.expr.steps if isinstance(input, LazyLogits) else ():
        return call.head.cross_entropy(func, input, *args, **kwargs)
    return func(input, *args, **kwargs)


def _differentiated(func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad``: a gradient of logits is returned as real numbers.

    Logits among ``inputs`` are named by their edges of the graph. Code that runs in backward, such
    as a checkpoint's second run, must see that logits are lazy, so torch functions are on there;
    and a call with the logits themselves would come back here.
    """
    others = tree_leaves((outputs, args, kwargs))
    by_edges = not kwargs.get("materialize_grads") and not any(
        type(x) is LazyLogits for x in others
    )
    if by_edges:
        inputs = map_lazy(inputs, lambda x: get_gradient_edge(x) if x.requires_grad else x)
    with torch._C._EnableTorchFunction() if by_edges else nullcontext():
        return materialized(func(outputs, inputs, *args, **kwargs), "the gradient of logits")


def _retained(func: Any, x: LazyLogits) -> Any:
    """``retain_grad``: the gradient is real from here on, as it is read after the next step."""
    x.register_hook(lambda g: materialized(g, "retain_grad"))
    return func(x)


def _hooked(func: Any, x: LazyLogits, *args: Any) -> Any:
    x.grad_fn  # noqa: B018  # after a write, torch crashes if the hook makes a view build its node
    return func(x, *args)


def _with_memory(func: Any, *args: Any, **kwargs: Any) -> Any:
    """``func`` of real logits, whose memory it hands out."""

    def materialize(x: LazyLogits) -> Tensor:
        values = x.materialize(func.__name__, to_write=True)
        wants = x.requires_grad and func in (T.numpy, T.__array__, T.__dlpack__)
        return values.detach().requires_grad_() if wants else values  # torch raises its usual error

    return func(*map_lazy(args, materialize), **map_lazy(kwargs, materialize))


def _set_data(func: Any, x: LazyLogits, data: Any) -> Any:
    raise RuntimeError(_NO_MEMORY.format("logits.data = ..."))


_MEMORY = (T.numpy, T.__array__, T.data_ptr, T.__dlpack__, T.share_memory_, T.storage,
           T._typed_storage, T.untyped_storage, T.tolist, T.apply_, T.map_, T.map2_)  # fmt: skip
_ABOVE_AUTOGRAD: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    torch.autograd.grad: _differentiated,
    T.retain_grad: _retained,
    T.register_hook: _hooked,
    T.data.__set__: _set_data,
    **dict.fromkeys(_MEMORY, _with_memory),
}


def _method(func: Any) -> Any:
    return lambda self, *args, **kwargs: _with_memory(func, self, *args, **kwargs)


for _func in _MEMORY:  # calls that torch does not dispatch, such as those of saved-tensor hooks
    setattr(LazyLogits, _func.__name__, _method(_func))
