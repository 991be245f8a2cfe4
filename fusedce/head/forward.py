"""The forward of a replaced head, and the class that has it.

A head is replaced by giving the module a class derived from its own, of the same name, as FSDP2
does: parameters, state dict, hooks and ``isinstance`` stay as they are, and what is copied, pickled
or replicated computes with its own parameters.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedce.contract.checks import autocast_dtype
from fusedce.head.call import HeadCall
from fusedce.head.clock import CLOCK
from fusedce.head.lazy.make import make_logits
from fusedce.head.lazy.traced import TracedLogits
from fusedce.head.probe import Mode, can_probe, is_plain, mode_of, probe
from fusedce.head.recipe import OWN, Recipe, is_sum_of_products, own_class, recipe_of
from fusedce.head.report import Report

ATTACHED = "_fusedce_head"


class Attached:
    """What a replaced head knows of itself."""

    def __init__(self, module: nn.Module, since: str) -> None:
        self.previous = module.__dict__.pop("forward", None)  # an instance attribute
        self.report = Report(since)
        self.dtypes: dict[Mode, torch.dtype | None] = {}  # of the logits; None: not linear there


class FusedHead:
    """The part of the class of a replaced head that is not the head's own."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        attached: Attached | None = self.__dict__.get(ATTACHED)
        if attached is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        hidden: Any = args[0] if len(args) == 1 and not kwargs else None
        reason = _why_not(self, hidden)
        if reason is None:
            recipe = recipe_of(self)
            reason = _misfit(recipe.weight, hidden)
        if reason is None:
            cast = autocast_dtype(hidden.device)
            if cast is None or hidden.dtype == torch.float64:
                cast = hidden.dtype
            dtype = _dtype_of_logits(self, attached, hidden, recipe.weight, cast)
            if dtype is not None:
                hidden = hidden if hidden.dtype == cast else hidden.to(cast)
                return _lazy_logits(self, attached, hidden, recipe, dtype)
            reason = "in this mode it is not hidden @ weight.T + bias"
        if not torch.compiler.is_compiling():
            attached.report.note(f"the original head runs: {reason}")
        return original(self, attached)(*args, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return _unpickled, (own_class(type(self)),), self.__dict__


def original(module: nn.Module, attached: Attached) -> Any:
    """The forward that the head had."""
    if attached.previous is not None:
        return attached.previous
    kind = type(module)
    if issubclass(kind, FusedHead):
        return super(FusedHead, module).forward  # type: ignore[misc]
    return module.forward


def _why_not(module: nn.Module, hidden: Any) -> str | None:
    """Why the original head runs, if it does."""
    if type(hidden) not in (Tensor, nn.Parameter):
        return f"its input is not one plain tensor, but {type(hidden).__name__}"
    if not hidden.is_floating_point() or hidden.dim() == 0:
        return "its input is not (..., H) and floating"
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        return "it is traced or exported"
    if "_hf_hook" in module.__dict__:
        return "accelerate moves its weights around it"
    if not is_sum_of_products(module):
        return "its adapter is not LoRA"
    if torch._C._functorch.maybe_current_level() is not None:
        return "a transform of torch.func runs it"
    return None


def _misfit(weight: Tensor, hidden: Tensor) -> str | None:
    if weight.shape[-1] != hidden.shape[-1] or weight.device != hidden.device:
        return "its weight is of another shape or on another device than its input"
    return None


def _dtype_of_logits(
    module: nn.Module, attached: Attached, hidden: Tensor, weight: Tensor, cast: torch.dtype
) -> torch.dtype | None:
    """That of the logits the original head would make, or ``None`` if it is not linear here."""
    if is_plain(own_class(type(module))):
        return cast
    mode = mode_of(module, hidden, weight)
    if mode not in attached.dtypes and not torch.compiler.is_compiling():
        if not can_probe(weight):
            return attached.dtypes.get(mode, cast)
        try:
            attached.dtypes[mode] = probe(module, original(module, attached), mode, weight)
        except ValueError as e:
            attached.dtypes[mode] = None
            attached.report.note(str(e))
    return attached.dtypes.get(mode, None if attached.dtypes else cast)


def _lazy_logits(
    module: nn.Module, attached: Attached, hidden: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Any:
    if recipe.adapters and recipe.dropouts():
        hidden = recipe.with_dropped(hidden)
    tensors = recipe.tensors()
    if any(hasattr(x, "full_tensor") for x in tensors):
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
    """Whether ``F.linear`` with a bias gives a view of a matrix, which hooks and writes can tell.

    It does before torch 2.15.
    """
    with torch.inference_mode(False):
        zeros = torch.zeros(1, 1, 1)
        return F.linear(zeros, zeros[0], zeros[0, 0])._is_view()


# ---- the class ------------------------------------------------------------------------------

_CLASSES: dict[type, type] = {}


def class_of(kind: type) -> type:
    """The class of a replaced head of this kind."""
    if kind not in _CLASSES:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, OWN: kind}
        _CLASSES[kind] = type(kind.__name__, (FusedHead, kind), names)
    return _CLASSES[kind]


def _unpickled(kind: type) -> Any:
    new: Any = class_of(kind)
    return new.__new__(new)
