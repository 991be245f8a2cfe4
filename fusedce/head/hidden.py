"""The forward pre-hook of an output head: it lends the head an input whose product is lazy.

The head's own code runs, whatever it is: its casts, its dropout, an adapter of PEFT around it. Only
``F.linear`` with a weight of ``V`` rows, and ``x @ weight.T``, are not computed; they give lazy
logits. A head that calls neither computes its logits as without fusedce.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from fusedce.contract.checks import autocast_dtype
from fusedce.head.lazy import Uncompiled
from fusedce.head.loss import MakeLogits
from fusedce.head.observe import HeadCounts
from fusedce.head.product import NO_TORCH_FUNCTION, Product
from fusedce.loss.sharded_problem import is_vocabulary_shard

_PLAIN = (Tensor, nn.Parameter)
_LINEAR = torch._C._nn.linear  # DeepSpeed's ZeRO-3 puts a function of its own in F.linear
# Before torch 2.15, F.linear with a bias gives a view of a matrix. Hooks and writes differ for it.
with torch.inference_mode(False):
    _zeros = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")
    _BIASED_IS_A_VIEW = _LINEAR(_zeros, _zeros[0], _zeros[0, 0])._is_view()
_NO_PRODUCT = (
    "the head's input reaches {}, which is no product with a weight of the head: these logits are "
    "computed as always, and their loss is torch's own"
)
_UNCOMPILED = (
    "the head that fusedce has replaced runs uncompiled: leave out fullgraph=True, or compile the "
    "model's body alone (model.model)"
)


class Head:
    """The forward pre-hook of a replaced head, and its state: it is copied with the module.

    Attributes:
        report: counts of losses and logits.
        memory_budget: bytes that the loss may hold, or ``None``.
    """

    def __init__(self, report: HeadCounts, memory_budget: int | None) -> None:
        self.report, self.memory_budget = report, memory_budget

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Lend the head its input as a :class:`Hidden`; ``None`` leaves it alone."""
        # (Compiled by torch before 2.13, `is_exporting()` may be True without an export.)
        if torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag:
            return _uncompiled(self, module, args)
        x = args[0] if len(args) == 1 else None
        reason = _why_not(x)
        if isinstance(x, Tensor) and reason is None:
            if F.linear is not _LINEAR and not hasattr(F.linear, "fusedce"):
                F.linear = _but_for_lent_inputs(F.linear)
            return (_lent(x, self, module),)
        self.report.note(f"the original head runs: {reason}")
        return None


_uncompiled = torch.compiler.disable(Head.__call__, reason=_UNCOMPILED)


def _but_for_lent_inputs(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Another library's ``F.linear``, and torch's own for lent inputs."""

    @functools.wraps(replaced)
    def linear(x: Any, *args: Any, **kwargs: Any) -> Any:
        return (_LINEAR if type(x) is Hidden else replaced)(x, *args, **kwargs)

    linear.fusedce = True  # type: ignore[attr-defined]
    return linear


def _why_not(x: Any) -> str | None:
    """Why the head runs as it is; ``None`` if it need not."""
    if type(x) not in _PLAIN:
        return f"its input is not one plain tensor, but {type(x).__name__}"
    if not x.is_floating_point() or not x.dim():
        return "its input is not (..., H) and floating"
    if x.dim() > 2 and x.shape[-2] == 1 and not torch.is_grad_enabled():
        return "generation asks for one position of each sequence, of which there is no loss"
    if torch.jit.is_tracing() or torch.compiler._is_exporting_flag:
        return "it is traced or exported"
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func runs it"
    return "it is differentiated in forward mode" if forward_ad._current_level >= 0 else None


def head_of(module: nn.Module) -> Head | None:
    """The hook of a replaced head; ``None`` for other modules."""
    return next((h for h in module._forward_pre_hooks.values() if isinstance(h, Head)), None)


class Hidden(Uncompiled):
    """The lent input of a head, or what the head computes from it before the product."""

    head: Head
    module: nn.Module

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = next((a for a in args if type(a) is Hidden), None)
        with NO_TORCH_FUNCTION():
            if func in _PRODUCTS and given is not None and given is args[0]:
                logits = _PRODUCTS[func](*args, **(kwargs or {}))
                if logits is not None:
                    return logits
        out = cls.of_others(func, types, args, kwargs)
        with NO_TORCH_FUNCTION():
            if given is None or type(out) not in (Tensor, Hidden) or not out.is_floating_point():
                return out
            if out.dim() != given.dim() or out.shape[-1] == classes_of(given.module):
                if out.dim() == given.dim() and given.shape[-1] != out.shape[-1]:
                    given.head.report.note(_NO_PRODUCT.format(getattr(func, "__name__", func)))
                return out.as_subclass(Tensor) if type(out) is Hidden else out
            return _lent(out, given.head, given.module)


def _lent(x: Tensor, head: Head, module: nn.Module) -> Hidden:
    lent = x if type(x) is Hidden else x.as_subclass(Hidden)
    lent.head, lent.module = head, module
    return lent


def classes_of(module: Any) -> int | None:
    """The number of classes of a linear head, or of a module around one linear layer."""
    if hasattr(module, "out_features"):  # to read a parametrized or sharded weight is not enough
        return int(module.out_features)
    inside = [m.out_features for m in module.modules() if isinstance(m, nn.Linear)]
    shape: tuple[int, ...] = getattr(getattr(module, "weight", None), "shape", ())
    return inside[0] if len(inside) == 1 else int(shape[0]) if len(shape) == 2 else None


def _product(x: Hidden, weight: Any, bias: Any = None) -> Any:
    """``F.linear`` as lazy logits; ``None`` if it is not the head's product of plain tensors."""
    operands = [weight] if bias is None else [weight, bias]
    if any(t.device != x.device or not _is_operand(t) for t in operands):
        return None
    if weight.dim() != 2 or weight.shape != (classes_of(x.module), x.shape[-1]):
        return None
    hidden = x.as_subclass(Tensor)
    dtype = autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        hidden, *operands = (t.to(dtype) for t in (hidden, *operands))
    if any(t.dtype != hidden.dtype for t in operands):
        return None
    weight, bias = operands if len(operands) == 2 else (operands[0], None)
    shape = (*hidden.shape[:-1], weight.shape[0])
    if bias is not None and hidden.dim() > 2 and _BIASED_IS_A_VIEW:
        hidden = hidden.reshape(-1, hidden.shape[-1])
    product = Product(x.head.report, x.head.memory_budget, x.module, hidden, weight, bias)
    logits = MakeLogits.apply(product, hidden, weight, bias)
    return logits if logits.shape == shape else logits.view(shape)


def _matmul(x: Hidden, other: Any) -> Any:
    """``x @ other`` as lazy logits; ``None`` if it is not the head's product."""
    return _product(x, other.mT) if isinstance(other, Tensor) and other.dim() == 2 else None


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    _LINEAR: _product,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
}


def _is_operand(x: Any) -> bool:
    return type(x) in _PLAIN or is_vocabulary_shard(x)


class ShardedForward:
    """``forward`` of a head whose rows the tensor parallelism of transformers shards over ranks.

    That has put a function around ``forward`` which turns inputs into ``DTensor`` and gathers the
    logits; lazy logits need neither.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.original = module, module.forward

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Lazy logits of the rows of all ranks, or what the original gives."""
        if type(x) is Hidden:
            with NO_TORCH_FUNCTION():
                logits = _product(x, self.module.weight, self.module.bias)
                x = x.as_subclass(Tensor)
            if logits is not None:
                return logits
        return self.original(x, *args, **kwargs)
