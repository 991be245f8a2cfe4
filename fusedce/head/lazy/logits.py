"""Logits that are not computed until somebody looks at them, and never for the loss.

:class:`LazyLogits` is what a replaced output head returns: a tensor of shape ``(..., V)`` without
storage that remembers ``(hidden, head)`` and what was done to it since. Multiplying and dividing by
a number, ``tanh``, changes of dtype, reshaping and slicing of the leading dimensions, slicing the
vocabulary: all are remembered, none is computed. ``F.cross_entropy`` on it runs
:func:`fusedce.fused_ce` or :func:`fusedce.fused_cross_entropy`, with the remembered steps as its
``logit_scale`` and ``softcap``. Anything else sees real logits, computed once.

``torch.compile`` cannot trace the making of such a tensor: see :mod:`fusedce.head.lazy.traced`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedce.contract.checks import autocast_dtype
from fusedce.head.lazy.grad import Anchor, Gate, Reveal
from fusedce.head.lazy.state import Lazy, State
from fusedce.head.lazy.steps import METHODS, scale_and_cap
from fusedce.loss.cross_entropy import fused_cross_entropy
from fusedce.loss.fused_ce import fused_ce

_ANCHOR_NODE, _DDP_NODE = "AnchorBackward", "_DDPSinkBackward"


class LazyLogits(Lazy, torch.Tensor):
    """See the module. Made by a replaced head, never directly."""

    @staticmethod
    def __new__(cls, state: State) -> LazyLogits:
        return torch.Tensor._make_wrapper_subclass(
            cls, state.shape, dtype=state.dtype, device=state.hidden.device
        )

    @classmethod
    def make(cls, state: State) -> LazyLogits:
        """Lazy logits, with an edge to all that their gradient would flow to.

        DDP looks for unused parameters from a model's outputs down such edges.
        """
        new = cls(state)
        if not (torch.is_grad_enabled() and new.wants_graph()):
            return new
        bias = () if state.bias is None else (state.bias,)
        return Anchor.apply(new, state.hidden, *bias, *state.head.trainable())

    def _node(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    def _is_output(self) -> bool:
        """Whether somebody's ``autograd.Function`` has returned these: its backward must run."""
        node = self._node()
        return node is not None and node.name() not in (_ANCHOR_NODE, _DDP_NODE)

    def gate(self) -> Tensor | None:
        """See :class:`Lazy`: these logits, where DDP has sent them through a node of its own.

        It counts on that node in every backward; no gradient needs to pass it.
        """
        node = self._node()
        return self if node is not None and node.name() == _DDP_NODE else self._state.gate

    def looked_at(self) -> bool:
        """See :class:`Lazy`; a function may have a gradient of its own, which lazy logits lack."""
        return self._is_output() or super().looked_at()

    def replace(self, state: State) -> None:
        """See :class:`Lazy`."""
        super().replace(state)
        if (node := self._node()) is not None and node.name() == _ANCHOR_NODE:
            node.state = state

    def materialize(self) -> Tensor:
        """See :class:`Lazy`."""
        if self._real is not None:
            return self._real
        real, node, gate = super().materialize(), self._node(), self.gate()
        if self._is_output():
            real = Reveal.apply(self, real.detach())
        elif gate is not None and self._parent is None:
            with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
                real = Gate.apply(real, gate)
        if node is not None and node.name() == _ANCHOR_NODE:
            node.real = real
        self._real = real
        return real

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        s = self._state
        return f"LazyLogits(shape={s.shape}, dtype={s.dtype}, steps={[k for k, _ in s.steps]})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA and args and not args[0].looked_at():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = take_step(func, args, kwargs)
        if result is not NotImplemented:
            return result
        args, kwargs = _real(args), _real(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub lacks the class
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Code that comes in below Python's overrides (C++ callers) sees real logits as well."""
        return func(*_real(args), **_real(kwargs or {}))


def take_step(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function does to lazy logits, if it leaves them lazy; else ``NotImplemented``."""
    if func in _SYMMETRIC and len(args) == 2 and not isinstance(args[0], Lazy):
        args = (args[1], args[0])
    handler = HANDLERS.get(func)
    if handler is None or "out" in kwargs or not args or not isinstance(args[0], Lazy):
        return NotImplemented
    if args[0].looked_at():
        return NotImplemented
    return handler(*args, **kwargs)


def _register_hook(x: Lazy, hook: Callable[..., Any]) -> Any:
    """FSDP2's hook before a backward serves as well on the hidden state; others want real logits.

    They see the gradient of the logits.
    """
    if not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
        return NotImplemented
    return x._state.hidden.register_hook(hook) if x._state.hidden.requires_grad else None


def _real(x: Any) -> Any:
    """``x`` with all lazy logits in it replaced by real ones."""
    if isinstance(x, Lazy):
        return x.materialize()
    if isinstance(x, dict):
        return {k: _real(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        items = [_real(y) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x


# ---- the loss -------------------------------------------------------------------------------


class LossTap:
    """What the fused losses of a forward come to, and what their means are divided by.

    While it is entered, ``losses`` collects ``(loss_sum, n_valid, reduction)`` of every fused
    ``F.cross_entropy`` but those per token, and those with ``reduction="mean"`` divide by
    ``denominator`` (in tokens) instead of their own count, where one is given.
    """

    def __init__(self, denominator: Tensor | None = None) -> None:
        self.denominator = denominator
        self.losses: list[tuple[Tensor, Tensor, str]] = []

    def __enter__(self) -> LossTap:
        global _TAP
        if _TAP is not None:
            raise RuntimeError("a LossTap is entered already: they do not nest")
        _TAP = self
        return self

    def __exit__(self, *_: object) -> None:
        global _TAP
        _TAP = None


_TAP: LossTap | None = None


def _denominator(n_valid: Tensor) -> Tensor:
    if _TAP is not None and _TAP.denominator is not None:
        return _TAP.denominator
    return n_valid.clamp(min=1)


def _cross_entropy(
    x: Lazy,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    state = x._state
    fused = scale_and_cap(state.steps)
    dims = len(state.shape)
    at_class = state.class_dim == (1 if dims > 1 else 0)
    if (
        fused is None
        or not at_class
        or size_average is not None
        or reduce is not None
        or reduction not in ("mean", "sum", "none")
        or not isinstance(target, Tensor)
        or isinstance(target, Lazy)
        or target.is_floating_point()
        or target.shape != state.hidden.shape[:-1]
        or target.device != state.hidden.device
    ):
        return NotImplemented
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "logit_scale": fused[0],
        "softcap": fused[1],
        "label_smoothing": label_smoothing,
    }
    counted = weight is None and reduction != "none"
    if not counted:
        options |= {"class_weight": weight, "reduction": reduction}
    gate = x.gate()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not x.is_detached()):
        loss = state.head.loss(
            fused_ce if counted else fused_cross_entropy,
            state.hidden.reshape(-1, state.hidden.shape[-1]),
            target.reshape(-1),
            vocabulary=state.vocabulary,
            bias=state.bias,
            options=options,
        )
        if counted:
            loss_sum, n_valid = loss
            if _TAP is not None:
                _TAP.losses.append((loss_sum.detach(), n_valid, reduction))
            loss = loss_sum if reduction == "sum" else loss_sum / _denominator(n_valid)
        elif reduction == "none":
            loss = loss.view(target.shape)
        if gate is not None and loss.requires_grad:
            loss = Gate.apply(loss, gate)
    if autocast_dtype(state.hidden.device) is not None:
        return loss  # autocast takes cross_entropy in float32
    return loss.to(state.dtype)


# ---- which functions are which steps --------------------------------------------------------


def _getter(name: str) -> Callable[..., Any]:
    """What ``__torch_function__`` is told when an attribute of a tensor is read."""
    return getattr(torch.Tensor, name).__get__


T = torch.Tensor
HANDLERS: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    _getter("requires_grad"): lambda x: x.wants_graph(),
    torch.Tensor.stride: lambda x, *args: x.strided().stride(*args),
    torch.Tensor.is_contiguous: lambda x, **kwargs: x.strided().is_contiguous(**kwargs),
    _getter("data"): METHODS["detach"],
    torch.Tensor.register_hook: _register_hook,
    **{
        getattr(owner, name): step
        for name, step in METHODS.items()
        for owner in (torch.Tensor, torch, operator)  # compiled code says `operator.mul`
        if hasattr(owner, name)
    },
}
_SYMMETRIC = {T.add, T.__add__, torch.add, operator.add, T.mul, T.__mul__, torch.mul, operator.mul}
_METADATA = {
    T.size, T.dim, T.ndimension, T.numel, T.nelement, T.element_size, T.is_floating_point,
    T.is_complex, T.__len__, torch.is_floating_point, torch.is_complex, torch.numel,
    T.get_device, T.__hash__, torch.is_tensor,
    *(_getter(name) for name in
      ("shape", "dtype", "device", "ndim", "layout", "itemsize", "is_leaf", "grad_fn", "_base",
       "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta", "is_sparse", "is_quantized",
       "is_nested")),
}  # fmt: skip
