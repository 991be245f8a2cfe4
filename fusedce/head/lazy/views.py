"""Views of lazy logits: steps on their shape, and what they share with what they are made of.

As in :mod:`fusedce.head.lazy.steps`, each takes what the tensor method of that name takes.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedce.head.lazy.state import Lazy, changed, class_last


def _view_of(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that gives a view of its input, wherever the tensor method ``name`` gives one.

    That is asked of the method itself, which also refuses wrong arguments.
    """

    def run(x: Lazy, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        strided = None if compiling else getattr(x.strided(), name)(*args, **kwargs)
        result = step(x, *args, **kwargs)
        if result is NotImplemented or result is x:
            return result
        if strided is not None and strided.shape != result.shape:
            return NotImplemented
        if strided is None or _share(strided, x.strided()):
            result.become_view(x, name, args, kwargs)
        result._strided = strided
        return result

    return run


def _share(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _contiguous(x: Lazy, **_: Any) -> Any:
    return changed(x) if torch.compiler.is_compiling() or not x.strided().is_contiguous() else x


def _view(x: Lazy, *shape: Any, **kwargs: Any) -> Any:
    if kwargs or not shape or not class_last(x):
        return NotImplemented
    if isinstance(shape[0], torch.dtype):
        return NotImplemented
    sizes = list(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
    V = x._state.shape[-1]
    total = math.prod(x._state.shape)
    if -1 in sizes:
        known = math.prod([s for s in sizes if s != -1])
        sizes[sizes.index(-1)] = total // known if known else 0
    if sizes[-1] != V or math.prod(sizes) != total:
        return NotImplemented
    H = x._state.hidden.shape[-1]
    return changed(x, hidden=x._state.hidden.reshape(*sizes[:-1], H), class_dim=len(sizes) - 1)


def _flatten(x: Lazy, start_dim: int = 0, end_dim: int = -1) -> Any:
    dims = len(x._state.shape)
    start, end = start_dim % dims, end_dim % dims
    if not class_last(x) or end == dims - 1 or start > end:
        return NotImplemented
    hidden = x._state.hidden.flatten(start, end)
    return changed(x, hidden=hidden, class_dim=hidden.dim() - 1)


def _squeeze(x: Lazy, dim: Any = None) -> Any:
    dims = len(x._state.shape)
    if not isinstance(dim, int) or not class_last(x) or dim % dims == dims - 1:
        return NotImplemented
    hidden = x._state.hidden.squeeze(dim % dims)
    return changed(x, hidden=hidden, class_dim=hidden.dim() - 1)


def _unsqueeze(x: Lazy, dim: int) -> Any:
    dims = len(x._state.shape)
    if not class_last(x) or not 0 <= (dim := dim % (dims + 1)) < dims:
        return NotImplemented
    hidden = x._state.hidden.unsqueeze(dim)
    return changed(x, hidden=hidden, class_dim=dims)


def _permute(x: Lazy, *order: Any, **kwargs: Any) -> Any:
    dims = len(x._state.shape)
    if kwargs or not order:
        return NotImplemented
    wanted = list(order[0] if isinstance(order[0], (tuple, list)) else order)
    wanted = [d % dims for d in wanted]
    if sorted(wanted) != list(range(dims)):
        return NotImplemented
    # Dimensions of the hidden state: those of the logits without the vocabulary, then H.
    leading = [d for d in range(dims) if d != x._state.class_dim]
    hidden = x._state.hidden.permute(
        [leading.index(d) for d in wanted if d != x._state.class_dim] + [dims - 1]
    )
    return changed(x, hidden=hidden, class_dim=wanted.index(x._state.class_dim))


def _transpose(x: Lazy, dim0: int, dim1: int) -> Any:
    dims = len(x._state.shape)
    order = list(range(dims))
    a, b = dim0 % dims, dim1 % dims
    order[a], order[b] = order[b], order[a]
    return _permute(x, order)


def _getitem(x: Lazy, index: Any) -> Any:
    if not class_last(x):
        return NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, (Lazy, bool)) or (isinstance(i, Tensor) and i.dim() == 0) for i in items):
        return NotImplemented
    # Each item takes as many dimensions as it names: None takes none, a mask all of its own.
    used = sum(
        i.dim() if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) else 1
        for i in items
        if i is not None and i is not Ellipsis
    )
    dims = len(x._state.shape)
    ellipses = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(ellipses) > 1 or used > dims:
        return NotImplemented
    at = ellipses[0] if ellipses else len(items)
    items[at : at + len(ellipses)] = [slice(None)] * (dims - used)
    vocabulary = items.pop()
    if not isinstance(vocabulary, slice):
        return NotImplemented
    here = x._state.vocabulary
    start, stop, step = vocabulary.indices(here.stop - here.start)
    if step != 1 or stop <= start:
        return NotImplemented
    hidden = x._state.hidden[tuple(items)] if items else x._state.hidden
    vocabulary = slice(here.start + start, here.start + stop)
    return changed(x, hidden=hidden, class_dim=hidden.dim() - 1, vocabulary=vocabulary)


def _index(x: Lazy, index: Any) -> Any:
    """Basic indices give a view, masks and lists of indices a copy."""
    items = index if isinstance(index, tuple) else (index,)
    return _basic_index(x, index) if all(_is_basic(i) for i in items) else _getitem(x, index)


def _is_basic(i: Any) -> bool:
    if i is None or i is Ellipsis or isinstance(i, (int, slice)):
        return True
    return not torch.compiler.is_compiling() and isinstance(i, numbers.Integral)  # of numpy


_basic_index = _view_of("__getitem__", _getitem)


def _detach(x: Lazy) -> Lazy:
    bias = x._state.bias
    bias = None if bias is None else bias.detach()
    return changed(x, hidden=x._state.hidden.detach(), bias=bias, detached=True, gate=None)


VIEWS: dict[str, Callable[..., Any]] = {
    name: _view_of(name, step)
    for step, names in (
        (_contiguous, ("contiguous",)),
        (_detach, ("detach",)),
        (_view, ("view", "reshape")),
        (_flatten, ("flatten",)),
        (_squeeze, ("squeeze",)),
        (_unsqueeze, ("unsqueeze",)),
        (_permute, ("permute",)),
        (_transpose, ("transpose", "swapaxes", "swapdims")),
    )
    for name in names
} | {"getitem": _index, "__getitem__": _index}
