"""The hooks of an output head: they lend it an input on which ``F.linear`` returns lazy logits.

The head's own code runs, whatever it is: its casts, its dropout, an adapter of PEFT around it. Only
``F.linear`` with a weight of ``V`` rows, and ``x @ weight.T``, are not computed; they give lazy
logits. A head that calls neither computes its logits as without fusedce. Once the head has run, the
lent input is a plain tensor, also for code that has kept it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from ..contract.checks import autocast_dtype
from ..ranks.layout import is_vocabulary_shard
from .gradient import LazyLinear
from .lazy import LazyLogits, Uncompiled
from .linear_call import NO_TORCH_FUNCTION, LinearCall
from .observe import HeadCounts, LossObserver

_PLAIN = (Tensor, nn.Parameter)
_LINEAR = torch._C._nn.linear  # DeepSpeed's ZeRO-3 puts a function of its own in F.linear
# Before torch 2.15, F.linear with a bias gives a view of a matrix. Hooks and writes differ for it.
with torch.inference_mode(False):
    _zeros = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")
    _BIASED_IS_A_VIEW = _LINEAR(_zeros, _zeros[0], _zeros[0, 0])._is_view()
_NO_LINEAR = (
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
        cross_entropy: the loss of its lazy logits: ``F.cross_entropy``, then that one's arguments.
        memory_budget: bytes that the loss may hold, or ``None``.
        waiting: losses of this head whose gradients may wait for backward; no copy has them. A
            WeakSet would not do: another thread may add to it while it is read, where `valuerefs`
            is a list.
    """

    def __init__(
        self, report: HeadCounts, cross_entropy: Callable[..., Any], memory_budget: int | None
    ) -> None:
        self.report, self.cross_entropy = report, cross_entropy
        self.memory_budget = memory_budget
        self.waiting: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __getstate__(self) -> tuple[HeadCounts, Callable[..., Any], int | None]:
        return self.report, self.cross_entropy, self.memory_budget

    def __setstate__(self, state: tuple[HeadCounts, Callable[..., Any], int | None]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        """Lend the head its input; ``None`` leaves it alone."""
        # (Compiled by torch before 2.13, `is_exporting()` may be True without an export.)
        if torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag:
            return _uncompiled(self, module, args)
        self.report.calls += 1
        x = args[0] if len(args) == 1 else None
        reason = _why_not(x)
        if isinstance(x, Tensor) and reason is None:
            if F.linear is not _LINEAR and not hasattr(F.linear, "fusedce"):
                F.linear = _but_for_lent_inputs(F.linear)
            return (_lent(x, Loan(self, module)),)
        self.report.note(f"the original head runs: {reason}")
        return None


_uncompiled = torch.compiler.disable(Head.__call__, reason=_UNCOMPILED)


def take_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a replaced head: its lent input is plain from now on."""
    x = args[0] if args else None
    if not isinstance(x, LentInput):
        return
    loan = x.loan
    for lent in loan.tensors:
        lent.__class__ = Tensor  # type: ignore[assignment]
        del lent.loan
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    if leaves and not any(isinstance(t, LazyLogits) for t in leaves):
        z = leaves[0]
        loan.head.report.note(_NO_LINEAR.format(loan.reached or "a function of another library"))
        loan.head.report.count_logits("the head's own code", tuple(z.shape), z.nbytes)


def _but_for_lent_inputs(replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Another library's ``F.linear``, and torch's own for lent inputs."""

    @functools.wraps(replaced)
    def linear(*args: Any, **kwargs: Any) -> Any:
        lent = any(type(x) is LentInput for x in (*args, *kwargs.values()))
        return (_LINEAR if lent else replaced)(*args, **kwargs)

    linear.fusedce = True  # type: ignore[attr-defined]
    return linear


def _why_not(x: Any) -> str | None:
    """Why the head runs as it is; ``None`` if it need not."""
    if type(x) not in _PLAIN:
        return f"its input is not one plain tensor, but {type(x).__name__}"
    if not x.is_floating_point() or not x.dim():
        return "its input is not (..., H) and floating"
    if x.is_meta:
        return "it has no values (the device meta)"
    one = x.dim() > 2 and x.shape[-2] == 1 and not torch.is_grad_enabled()
    if one and LossObserver.current.get() is None:
        return "generation asks for one position of each sequence, of which there is no loss"
    if torch.jit.is_tracing() or torch.compiler._is_exporting_flag:
        return "it is traced or exported"
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func runs it"
    return "it is differentiated in forward mode" if forward_ad._current_level >= 0 else None


def head_of(module: nn.Module) -> Head | None:
    """The hook of a replaced head; ``None`` for other modules."""
    return next((h for h in module._forward_pre_hooks.values() if isinstance(h, Head)), None)


class Loan:
    """One call of a head, and the tensors that it was lent.

    Attributes:
        reached: the function that made logits of the lent input without ``F.linear``.
    """

    reached: str | None = None

    def __init__(self, head: Head, module: nn.Module) -> None:
        self.head, self.module = head, module
        self.tensors: list[LentInput] = []


class LentInput(Uncompiled):
    """The lent input of a head, or what the head computes from it before ``F.linear``."""

    loan: Loan

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lent = next((x for x in (*args, *kwargs.values()) if type(x) is LentInput), None)
        with NO_TORCH_FUNCTION():
            if func in _LINEARS and lent is (args[0] if args else kwargs.get("input")):
                logits = _LINEARS[func](*args, **kwargs)
                if logits is not None:
                    return logits
        out = cls.defer_to_other_subclass(func, types, args, kwargs)
        with NO_TORCH_FUNCTION():
            if lent is None or type(out) not in (Tensor, LentInput) or not out.is_floating_point():
                return out
            if out.dim() != lent.dim() or out.shape[-1] == classes_of(lent.loan.module):
                if out.dim() == lent.dim() and lent.shape[-1] != out.shape[-1]:
                    lent.loan.reached = getattr(func, "__name__", str(func))
                return out.as_subclass(Tensor) if type(out) is LentInput else out
            return _lent(out, lent.loan)


def _lent(x: Tensor, loan: Loan) -> LentInput:
    if type(x) is LentInput:
        return x
    lent = x.as_subclass(LentInput)
    lent.loan = loan
    loan.tensors.append(lent)
    return lent


def classes_of(module: Any) -> int | None:
    """The number of classes of a linear head, or of a module around one linear layer."""
    if hasattr(module, "out_features"):  # to read a parametrized or sharded weight is not enough
        return int(module.out_features)
    inside = [m.out_features for m in module.modules() if isinstance(m, nn.Linear)]
    shape: tuple[int, ...] = getattr(getattr(module, "weight", None), "shape", ())
    return inside[0] if len(inside) == 1 else int(shape[0]) if len(shape) == 2 else None


def _linear(input: LentInput, weight: Any, bias: Any = None) -> Any:  # torch's name
    """``F.linear`` as lazy logits; ``None`` if it is not the head's, of plain tensors."""
    operands = [weight] if bias is None else [weight, bias]
    if any(t.device != input.device or not _is_operand(t) for t in operands):
        return None
    loan, hidden = input.loan, input.as_subclass(Tensor)
    if weight.dim() != 2 or weight.shape != (classes_of(loan.module), hidden.shape[-1]):
        return None
    dtype = autocast_dtype(hidden.device)
    if dtype is not None and hidden.dtype != torch.float64:
        hidden, *operands = (t.to(dtype) for t in (hidden, *operands))
    if any(t.dtype != hidden.dtype for t in operands):
        return None
    weight, bias = operands if len(operands) == 2 else (operands[0], None)
    shape = (*hidden.shape[:-1], weight.shape[0])
    if bias is not None and hidden.dim() > 2 and _BIASED_IS_A_VIEW:
        hidden = hidden.reshape(-1, hidden.shape[-1])
    call = LinearCall(loan.head, loan.module, hidden, weight, bias)
    logits = LazyLinear.apply(call, hidden, weight, bias)
    return logits if logits.shape == shape else logits.view(shape)


def _matmul(input: LentInput, other: Any) -> Any:  # torch's name
    """``x @ other`` as lazy logits; ``None`` if it is not the head's."""
    return _linear(input, other.mT) if isinstance(other, Tensor) and other.dim() == 2 else None


_LINEARS: dict[Any, Callable[..., Any]] = {
    _LINEAR: _linear,
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
        if isinstance(x, LentInput):
            with NO_TORCH_FUNCTION():
                logits = _linear(x, self.module.weight, self.module.bias)
                x = x.as_subclass(Tensor)
            if logits is not None:
                return logits
        return self.original(x, *args, **kwargs)
