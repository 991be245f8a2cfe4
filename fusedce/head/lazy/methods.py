"""Methods of tensors that :class:`TracedLogits` takes over in code that is compiled.

This module holds their names, their rows of the table, and the shapes and dtypes of their results.
:mod:`fusedce.head.lazy.ops` does the same for operators below autograd.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from fusedce.head.lazy.table import STEPS, Row

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
