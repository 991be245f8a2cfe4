"""Lazy logits inside ``torch.compile``, which cannot trace the making of a tensor subclass.

:class:`TracedLogits` takes over methods of tensors. Their names, their rows in the table of steps,
and the shapes and dtypes of their results come first; :mod:`fusedce.head.lazy.tensor` holds the
same for operators below autograd.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedce.contract.checks import autocast_dtype
from fusedce.head.call import HeadCall
from fusedce.head.lazy.grad import make_logits
from fusedce.head.lazy.loss import fused_call_of
from fusedce.head.lazy.steps import LogitsSteps
from fusedce.head.lazy.table import STEPS, Row
from fusedce.head.lazy.tensor import replaced, split, unbind
from fusedce.head.optimizer_clock import CLOCK, Tick
from fusedce.head.recipe import Recipe, no_autocast
from fusedce.head.report import GraphEvent, HeadCounts

METHODS: dict[str, Row] = {name: row for row in STEPS for name in row.methods}
IN_PLACE: dict[str, Row] = {
    name: row for row in STEPS for name in row.in_place if "." not in name and name != "neg_"
}
CAST = METHODS["to"]
SPLITS = ("chunk", "split", "tensor_split", "unbind")
NAMES: dict[Any, str] = {
    getattr(owner, name): name
    for name in (*METHODS, *IN_PLACE)
    for owner in (torch.Tensor, torch, operator)  # compiled code says `operator.mul`
    if hasattr(owner, name)
} | {operator.getitem: "__getitem__", operator.imul: "mul_", operator.itruediv: "div_",
     operator.truediv: "div", operator.neg: "neg"}  # fmt: skip
SYMMETRIC = {
    torch.Tensor.add, torch.Tensor.__add__, torch.add, operator.add,
    torch.Tensor.mul, torch.Tensor.__mul__, torch.mul, operator.mul,
}  # fmt: skip
# `x * logits`, and the reflected form in which compiled code calls `logits - x`. This is a list,
# since Dynamo does not find these keys in a dict.
REFLECTED = [
    (getattr(torch.Tensor, f"__r{name[2:]}"), getattr(torch.Tensor, name))
    for name in METHODS
    if name.startswith("__") and hasattr(torch.Tensor, f"__r{name[2:]}")
]
# Python looks these up on the type, where `__getattr__` is not used.
_OPERATORS = (
    "sub", "rsub", "rtruediv", "pow", "rpow", "neg", "abs", "matmul", "rmatmul", "mod", "rmod",
    "floordiv", "rfloordiv", "and", "or", "xor", "invert", "eq", "ne", "lt", "le", "gt", "ge",
    "len", "iter", "contains", "bool", "float", "int", "index", "setitem",
    "iadd", "isub", "ipow", "imod", "ifloordiv", "iand", "ior", "ixor",
)  # fmt: skip
TAKEN = [
    name
    for name in (*METHODS, *IN_PLACE, *SPLITS, *(f"__{n}__" for n in _OPERATORS))
    if hasattr(torch.Tensor, name)
]

_OWN_DTYPE = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}


def dtype_of(x: Any, name: str, args: Any, kwargs: Any) -> torch.dtype | None:
    """The dtype that this cast gives; ``None`` if the call does more than a cast."""
    if name in _OWN_DTYPE:
        return _OWN_DTYPE[name]
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    for argument in args[:2]:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif isinstance(argument, (Tensor, type(x))):
            dtype, device = argument.dtype, argument.device
        elif isinstance(argument, (torch.device, str)):
            device = argument
        elif argument is not None:
            return None
    if device is not None and torch.device(device) not in (x.device, torch.device(x.device.type)):
        return None
    return x.dtype if dtype is None else dtype


def meta_after(x: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a method of ``x`` on the meta device; ``None`` for other devices."""
    like = torch.empty(x.shape, dtype=x.dtype, device="meta")
    if any(isinstance(a, Tensor) for a in args):
        other = args[0]
        if not isinstance(other, Tensor) or (other.device != x.device and other.dim()):
            return None
        of_kind = other.dim() == 0 and not other.is_complex()
        dtype = x.dtype if of_kind else torch.promote_types(x.dtype, other.dtype)
        return torch.empty(x.shape, dtype=dtype, device="meta")
    if name in IN_PLACE or name in ("mul", "div") or name.startswith("__r"):
        return like
    return getattr(like, name)(*args, **kwargs)


class Origin(NamedTuple):
    """A call of a head in compiled code."""

    module: nn.Module
    recipe: Recipe
    hidden: Tensor
    report: HeadCounts
    tick: Tick
    grad: bool  # whether gradients were on


class Called(NamedTuple):
    """A method called on logits, whether gradients were on, and the steps that it is."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    steps: LogitsSteps

    def __call__(self, x: Any) -> Any:
        with torch.set_grad_enabled(self.grad):
            return getattr(x, self.name)(*self.args, **self.kwargs)


class TracedLogits:
    """The result of a replaced head while ``torch.compile`` traces: not a tensor, but like one.

    In traced code, steps and loss are those of lazy logits, and everything else gets real logits.
    Strides are symbols there, so that it is unknown which calls copy. Therefore the first operation
    that needs real logits computes all logits of a head, before anything can be written. Outside
    compiled code, a model's result passes every call on to lazy logits.
    """

    def __init__(self, origin: Origin, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._origin, self._shape, self._dtype = origin, shape, dtype
        self._parent: TracedLogits | None = None
        self._made_by: tuple[Called, ...] = ()  # the method of the parent, then those in place
        self._children: list[TracedLogits] = []
        self._grad = origin.grad
        self._real: Tensor | None = None
        self._outside: Any = None

    @classmethod
    def make(
        cls,
        module: nn.Module,
        recipe: Recipe,
        hidden: Tensor,
        dtype: torch.dtype,
        report: HeadCounts,
    ) -> TracedLogits:
        """The logits of a head that runs now, cast to ``dtype``."""
        origin = Origin(module, recipe, hidden, report, CLOCK.now, torch.is_grad_enabled())
        shape = (*hidden.shape[:-1], recipe.weight.shape[0])
        new = cls(origin, shape, hidden.dtype)
        return new if dtype == hidden.dtype else take_step(new, "to", (dtype,), {})

    def tensor(self) -> Any:
        """A tensor with these values: real while tracing, lazy outside.

        It is for consumers that check with ``isinstance`` for a tensor.
        """
        if torch.compiler.is_compiling() or self._real is not None:
            return self._materialize()
        if self._outside is None:
            if self._parent is None:
                o = self._origin
                run = HeadCall(o.module, o.recipe, o.hidden, o.report, o.tick)
                with torch.set_grad_enabled(o.grad):
                    x = make_logits(run, o.hidden, *o.recipe.tensors())
            else:
                x = self._parent.tensor()
            for call in self._made_by:
                x = call(x)
            self._outside = x
        return self._outside

    def _steps(self) -> LogitsSteps:
        """All steps since the head."""
        above = () if self._parent is None else self._parent._steps()
        return (*above, *(step for called in self._made_by for step in called.steps))

    def _materialize(self) -> Tensor:
        if self._real is None:
            root = self
            while root._parent is not None:
                root = root._parent
            o = root._origin
            o.report.made_in_graphs = GraphEvent(o.report.made_in_graphs)
            with torch.set_grad_enabled(o.grad), no_autocast(o.hidden.device):
                operands = o.recipe.operands(o.hidden)
                root._make(F.linear(*operands))
        assert self._real is not None
        return self._real

    def _make(self, x: Tensor) -> None:
        for call in self._made_by:
            x = call(x)
        if self._made_by and self._made_by[-1].name == "tanh":
            # Autograd keeps the output of tanh for backward, and of no other step. Code may write
            # into these logits, so it gets a copy, and the kept output stays as it is.
            x = x.clone()
        self._real = x
        for child in self._children:
            child._make(x)

    # ---- attributes of tensors ---------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """``(..., V)`` after the steps so far."""
        return torch.Size(self._shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype after the steps so far."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """The device of the hidden state."""
        return self._origin.hidden.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    @property
    def requires_grad(self) -> bool:
        """Whether the hidden state or a parameter of the head requires a gradient here."""
        recipe = self._origin.recipe
        tensors = (self._origin.hidden, *recipe.tensors())
        return self._grad and any(x.requires_grad for x in tensors)

    @property
    def mT(self) -> Any:
        """The last two dimensions exchanged."""
        return self.transpose(-2, -1)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self._shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self.shape if dim is None else self._shape[dim]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # no tensor's attribute, or __init__ still runs
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __repr__(self) -> str:
        return repr(self.tensor())

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
            if func in SYMMETRIC and len(args) == 2 and not isinstance(args[0], TracedLogits):
                args = (args[1], args[0])
            for reflected, own in REFLECTED:
                if func is reflected and isinstance(args[1], TracedLogits):
                    func, args = own, (args[1], args[0])
            x = args[0] if args else None
            if isinstance(x, TracedLogits) and x._real is None:
                if func is F.cross_entropy:
                    result = _cross_entropy(*args, **kwargs)
                elif func in NAMES and "out" not in kwargs:
                    result = take_step(x, NAMES[func], args[1:], kwargs)
                else:
                    result = NotImplemented
                if result is not NotImplemented:
                    return result
        return func(*_tensors(args), **_tensors(kwargs))


def take_step(x: TracedLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a method to logits that are not computed; ``NotImplemented`` if it needs values.

    An in-place method changes the object itself; it is supported without views only.
    """
    in_place = name in IN_PLACE
    row = IN_PLACE[name] if in_place else METHODS[name]
    if "out" in kwargs:
        return NotImplemented
    if row is CAST:
        dtype = dtype_of(x, name, args, kwargs)
        if dtype is None:
            return NotImplemented
        name, args, kwargs = "to", (dtype,), {k: v for k, v in kwargs.items() if k == "copy"}
    if any(isinstance(a, TracedLogits) for a in args):
        return NotImplemented
    args = tuple(_kept(a) for a in args)
    grad = torch.is_grad_enabled()
    if in_place and (x._parent is not None or x._children or grad != x._grad):
        return NotImplemented
    out = meta_after(x, name, args, kwargs)
    if out is None:
        return NotImplemented
    steps = row.read(x._shape, out, *args, **kwargs)
    if steps is None:
        return NotImplemented
    called = Called(name, args, kwargs, grad, steps)
    if in_place:
        x._made_by = (*x._made_by, called)
        return x
    new = TracedLogits(x._origin, tuple(out.shape), out.dtype)
    new._parent, new._made_by = x, (called,)
    new._grad = x._grad and grad and name != "detach"
    x._children.append(new)
    return new


def _kept(argument: Any) -> Any:
    """An argument of a step, copied so that later writes into it do not count."""
    if isinstance(argument, tuple):
        return tuple(_kept(a) for a in argument)
    return argument.clone() if isinstance(argument, Tensor) else argument


def _cross_entropy(x: TracedLogits, *args: Any, **kwargs: Any) -> Any:
    o = x._origin
    with torch.set_grad_enabled(torch.is_grad_enabled() and x._grad):
        V = o.recipe.weight.shape[0]
        found = fused_call_of(o.module, o.hidden, V, x._steps(), *args, **kwargs)
        if found is None:
            return NotImplemented
        p, fused_call = found
        loss = fused_call.fused(p, o.recipe)
    o.report.losses_in_graphs = GraphEvent(o.report.losses_in_graphs)
    return loss if autocast_dtype(x.device) is not None else loss.to(x._dtype)


def _tensors(x: Any) -> Any:
    """``x`` with all traced logits in it replaced by tensors."""
    return replaced(x, TracedLogits, TracedLogits.tensor)


def _parts(x: TracedLogits, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "unbind":
        return unbind(x, *args, **kwargs)
    like = torch.empty(x._shape, dtype=x._dtype, device="meta")
    return split(x, getattr(like, name)(*args, **kwargs), *args, **kwargs)


def _method(name: str) -> Callable[..., Any]:
    """The method ``name`` of traced logits: a step of the table, or the tensor's method."""
    is_step, splits = name in METHODS or name in IN_PLACE, name in SPLITS

    def method(self: TracedLogits, *args: Any, **kwargs: Any) -> Any:
        if (is_step or splits) and torch.compiler.is_compiling() and self._real is None:
            result = (_parts if splits else take_step)(self, name, args, kwargs)
            if result is not NotImplemented:
                return result
        return getattr(self.tensor(), name)(*_tensors(args), **_tensors(kwargs))

    return method


for _name in TAKEN:
    setattr(TracedLogits, _name, _method(_name))
TracedLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
