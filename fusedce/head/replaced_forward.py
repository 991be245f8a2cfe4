"""The forward of a replaced head: an attribute of the module, whose class is unchanged.

Parameters, state dict, hooks and ``type`` stay as they are. A copy, a pickle or a replica of the
module computes with its own parameters.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from fusedce.contract.checks import autocast_dtype
from fusedce.head.call import HeadCall
from fusedce.head.lazy.grad import make_logits
from fusedce.head.lazy.traced import TracedLogits
from fusedce.head.optimizer_clock import CLOCK
from fusedce.head.probe import Mode, Products, can_probe, cast_of, is_plain, mode_of, probe
from fusedce.head.recipe import ATTACHED, Recipe, is_sum_of_products, recipe_of
from fusedce.head.report import HeadCounts


class Attached:
    """State of a replaced head, kept on its module.

    Attributes:
        module: weak reference to the head.
        memory_budget: bytes that the loss may hold, or ``None``.
        previous: the ``forward`` that the instance had before, or ``None``.
        report: counts of losses and logits.
        products: the result of the probe in each mode; ``None`` if the head is not linear in it.
    """

    def __init__(self, module: nn.Module, since: str) -> None:
        self.module = weakref.ref(module)
        self.memory_budget: int | None = None
        self.previous = module.__dict__.get("forward")
        self.report = HeadCounts(since)
        self.products: dict[Mode, Products | None] = {}

    def install(self) -> None:
        """Replace the forward of the module."""
        module = self.module()
        assert module is not None, "replaced while it is being freed"
        module.__dict__ |= {
            ATTACHED: self,
            "forward": HeadForward(module),
            # `copy` and `pickle` call the first of these, `nn.DataParallel` the second.
            "__getstate__": functools.partial(_state_of, self.module),
            "_replicate_for_data_parallel": functools.partial(_replica_of, self.module),
        }

    def remove(self) -> None:
        """Restore the forward that the module had."""
        module = self.module()
        assert module is not None, "restored while it is being freed"
        for name in _STATE:
            module.__dict__.pop(name, None)
        for name in ("forward", "_old_forward"):  # where accelerate has put it
            if isinstance(module.__dict__.get(name), HeadForward):
                del module.__dict__[name]
                if self.previous is not None:
                    module.__dict__[name] = self.previous
                elif name == "_old_forward":
                    module.__dict__[name] = original(module, self)

    def of(self, module: nn.Module) -> Attached:
        """The state for ``module``, a copy of this head."""
        new = Attached.__new__(Attached)
        new.__dict__ |= self.__dict__
        new.module = weakref.ref(module)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        module = memo.get(id(self.module()))
        if module is None:  # in a shallow copy, which has the original head
            return self
        new = self.of(module)
        new.report, new.products = copy.deepcopy(self.report), dict(self.products)
        new.previous = copy.deepcopy(self.previous, memo)
        new.install()
        return new

    def __reduce__(self) -> Any:
        return _unpickled, (
            self.module(), self.previous, self.report, self.products, self.memory_budget
        )  # fmt: skip

    def probe(self, module: nn.Module, mode: Mode, weight: Tensor) -> None:
        """Probe the original head in this mode (:func:`fusedce.head.probe.probe`).

        Raises:
            ValueError: the head is not linear.
        """
        self.products[mode] = found = probe(module, original(module, self), mode, weight)
        if found.dtype != (mode.autocast or mode.hidden):
            self.report.note(
                f"the head multiplies {mode.hidden} hidden states in {found.dtype}"
                + (f" under autocast to {mode.autocast}" if mode.autocast else "")
                + ": the loss is computed in that"
            )


def attached_to(module: nn.Module) -> Attached | None:
    """State of a module that is a replaced head; ``None`` for others."""
    attached: Attached | None = module.__dict__.get(ATTACHED)
    return attached if attached is not None and attached.module() is module else None


_STATE = (ATTACHED, "__getstate__", "_replicate_for_data_parallel")


class HeadForward:
    """Maps ``(..., H)`` to lazy logits ``(..., V)``, or calls the original head."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)  # the module holds this object

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module()
        attached: Attached | None = module.__dict__.get(ATTACHED)
        if attached is None:
            return type(module).forward(module, *args, **kwargs)
        hidden: Any = args[0] if len(args) == 1 and not kwargs else None
        reason = _why_not(module, hidden)
        if reason is None:
            recipe = recipe_of(module)
            reason = _misfit(recipe.weight, hidden)
        if reason is None:
            products = _products_of(module, attached, hidden, recipe.weight)
            if products is not None:
                dtype = products.dtype
                hidden = hidden if hidden.dtype == dtype else hidden.to(dtype)
                return _lazy_logits(module, attached, hidden, recipe, products.logits)
            reason = "in this mode it is not hidden @ weight.T + bias"
        if not torch.compiler.is_compiling():
            attached.report.note(f"the original head runs: {reason}")
        return original(module, attached)(*args, **kwargs)


def _state_of(module: Any) -> dict[str, Any]:
    """State to copy and pickle; a shallow copy is an original head with the same parameters."""
    own = getattr(type(module()), "__getstate__", None)
    usual = own in (None, getattr(object, "__getstate__", None))
    state = module().__dict__ if usual or own is None else own(module())
    return {k: v for k, v in state.items() if k not in ("forward", *_STATE[1:])}


def _replica_of(module: Any) -> nn.Module:
    replica: nn.Module = type(module())._replicate_for_data_parallel(module())
    replica.__dict__[ATTACHED].of(replica).install()
    return replica


def _unpickled(
    module: nn.Module, previous: Any, report: HeadCounts, products: Any, memory_budget: int | None
) -> Attached:
    new = Attached.__new__(Attached)
    new.module, new.previous = weakref.ref(module), previous
    new.report, new.products, new.memory_budget = report, products, memory_budget
    new.install()
    return new


def original(module: nn.Module, attached: Attached) -> Any:
    """The forward that the head had before it was replaced."""
    if attached.previous is not None:
        return attached.previous
    return functools.partial(type(module).forward, module)


def _why_not(module: nn.Module, hidden: Any) -> str | None:
    """Why the original head runs for this input; ``None`` if it need not."""
    if type(hidden) not in (Tensor, nn.Parameter):
        return f"its input is not one plain tensor, but {type(hidden).__name__}"
    if not hidden.is_floating_point() or hidden.dim() == 0:
        return "its input is not (..., H) and floating"
    if hidden.dim() > 2 and hidden.shape[-2] == 1 and not torch.is_grad_enabled():
        return "generation asks for one position of each sequence, of which there is no loss"
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        return "it is traced or exported"
    if "_hf_hook" in module.__dict__:
        return "accelerate moves its weights around it"
    if not is_sum_of_products(module):
        return "its adapter is not LoRA"
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func runs it"
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        return "it is differentiated in forward mode"
    return None


def _misfit(weight: Tensor, hidden: Tensor) -> str | None:
    if weight.shape[-1] != hidden.shape[-1] or weight.device != hidden.device:
        return "its weight is of another shape or on another device than its input"
    return None


def _products_of(
    module: nn.Module, attached: Attached, hidden: Tensor, weight: Tensor
) -> Products | None:
    """Dtypes in which the original head multiplies; ``None`` if the original head must run.

    Torch's own linear layer multiplies in the dtype of its input or of autocast; other heads are
    probed once in each mode. A head whose weight has no values on this rank cannot be probed and is
    taken for a layer like torch's. Compiled code cannot probe either: in a mode that is not known,
    it runs the original head if results of other modes are known, and else does the same.
    """
    cast = cast_of(hidden, autocast_dtype(hidden.device))
    like_torch = Products(cast, cast)
    if is_plain(type(module)):
        return like_torch
    mode = mode_of(module, hidden, weight)
    if mode in attached.products:
        return attached.products[mode]  # None: the probe found that the head is not linear
    if torch.compiler.is_compiling():
        return None if attached.products else like_torch
    if not can_probe(weight):
        return like_torch
    try:
        attached.probe(module, mode, weight)
    except ValueError as e:
        attached.products[mode] = None
        attached.report.note(str(e))
    return attached.products[mode]


def _lazy_logits(
    module: nn.Module, attached: Attached, hidden: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Any:
    if recipe.adapters and recipe.dropouts():
        hidden = recipe.with_dropped(hidden)
    tensors = recipe.tensors()
    sharded = not torch.compiler.is_compiling() and recipe.has_sharded_vocabulary()
    if not sharded and any(hasattr(x, "full_tensor") for x in tensors):
        tensors = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]
        recipe = recipe.of(tensors)
    if torch.compiler.is_compiling():
        return TracedLogits.make(module, recipe, hidden, dtype, attached.report)
    leading = hidden.shape[:-1]
    is_view = recipe.bias is not None and not recipe.adapters and len(leading) > 1
    is_view = is_view and _biased_products_are_views()
    if is_view:
        hidden = hidden.reshape(-1, hidden.shape[-1])
    call = HeadCall(module, recipe, hidden, attached.report, CLOCK.now)
    logits = make_logits(call, hidden, *tensors)
    if is_view:
        logits = logits.view(*leading, call.V)
    return logits if hidden.dtype == dtype else logits.to(dtype)


@functools.cache
def _biased_products_are_views() -> bool:
    """Whether ``F.linear`` with a bias gives a view of a matrix, as it does before torch 2.15.

    Hooks and writes behave differently for views.
    """
    with torch.inference_mode(False):
        zeros = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")
        return F.linear(zeros, zeros[0], zeros[0, 0])._is_view()
