"""Gradients of a window: corrected once by ``finish``, dropped, or held inside FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _composable_state

from fusedce.accumulate import exchange as _exchange
from fusedce.contract.groups import local_of

STREAMED = 1024  # the denominator of streaming losses, a power of two: it rounds nothing


def given_to_finish(parameters: Any) -> list[Tensor]:
    """The tensors of ``parameters``, each once; raises if none has a gradient."""
    advice = (
        "parameters: pass an iterable of tensors, such as model.parameters() (not "
        "named_parameters(), a state_dict or an optimizer's param_groups)"
    )
    if isinstance(parameters, (torch.nn.Module, Tensor)) or not isinstance(parameters, Iterable):
        raise TypeError(f"{advice}, got {type(parameters).__name__}")
    found: dict[int, Tensor] = {}
    for p in parameters:
        if not isinstance(p, Tensor):
            raise TypeError(f"{advice}, it holds {type(p).__name__}")
        found[id(p)] = p
    if all(p.grad is None for p in found.values()):
        raise RuntimeError(
            "parameters: no parameter given has a .grad to correct (was the generator used up, or "
            "zero_grad called before finish?)"
        )
    return list(found.values())


LISTENERS: list[Callable[[float], object]] = []
"""Called with the factor of each correction of gradients, by tools. Reading it waits for a device.
"""


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """``p.grad *= factor``, ``()`` float64; each product is rounded once, the factor never."""
    for listener in LISTENERS:
        listener(float(factor))
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in parameters:
        grad = local_of(p.grad)
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), grads in groups.items():
        if _exchange.readable(device) and _exchange.readable(factor.device):
            torch._foreach_mul_(grads, float(factor))
            continue
        there = _exchange.moved(factor, device).to(torch.promote_types(dtype, torch.float32))
        if there.dtype == dtype:
            torch._foreach_mul_(grads, there)
            continue
        # A 0-d tensor is rounded to the dtype of what it multiplies: up to 0.4% in bf16, the same
        # on every element. One with a dimension makes the product float32 instead.
        for grad in grads:
            grad.unsqueeze(0).mul_(there.unsqueeze(0))


def norms_of(parameters: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """``()`` for each gradient, the sum of absolute values; by default in its own dtype."""
    grads = [local_of(p.grad) for p in parameters]
    grads = [grad._values() if grad.is_sparse else grad for grad in grads]
    return list(torch._foreach_norm(grads, 1, dtype)) if grads else []


# ---- gradients inside FSDP2 -------------------------------------------------------------------

# With set_requires_gradient_sync(False) FSDP2 keeps the unsharded gradients of a micro-batch
# inside, where zero_grad does not reach them, until the last micro-batch of the window. If that one
# never comes, they would be added to the next window.


def held_by_fsdp2(module: torch.nn.Module | None = None) -> list[Any]:
    """FSDP2 parameters of ``module`` (default: of this process) whose gradients wait inside."""
    states = _composable_state._module_state_mapping
    found: list[Any] = []
    for one in list(states) if module is None else module.modules():
        reference = states.get(one)
        state: Any = None if reference is None else reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 there was one
            groups = [getattr(state, "_fsdp_param_group", None)]
        found += [p for group in groups for p in getattr(group, "fsdp_params", ())]
    return [
        p
        for p in found
        if p.unsharded_accumulated_grad is not None
        or getattr(getattr(p, "_unsharded_param", None), "grad", None) is not None
    ]


def drop_gradients(module: torch.nn.Module) -> None:
    """Forget all gradients of ``module``, including those that wait inside FSDP2."""
    module.zero_grad()
    for p in held_by_fsdp2(module):
        if p._unsharded_param is not None:
            p._unsharded_param.grad = None
        if p.unsharded_accumulated_grad is not None:  # before torch 2.15 a buffer of its own
            p.unsharded_accumulated_grad = None
