"""Gradients that FSDP2 holds inside, where ``zero_grad`` does not reach them.

With ``set_requires_gradient_sync(False)`` a micro-batch's gradients wait unsharded in FSDP2 for
the last one of the window. Where that one never comes, they would be added to the next window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed import _composable_state


def leftovers(module: torch.nn.Module | None = None) -> list[Any]:
    """FSDP2's parameters with gradients that wait inside: of ``module``, or of this process."""
    return [p for p in _parameters(module) if _held(p)]


def drop(module: torch.nn.Module) -> None:
    """Forget all gradients of ``module``, those that wait inside FSDP2 as well."""
    module.zero_grad()
    for p in leftovers(module):
        if p._unsharded_param is not None:
            p._unsharded_param.grad = None
        if p.unsharded_accumulated_grad is not None:  # before torch 2.15 a buffer of its own
            p.unsharded_accumulated_grad = None


def _held(p: Any) -> bool:
    inside = getattr(p, "_unsharded_param", None)
    return p.unsharded_accumulated_grad is not None or getattr(inside, "grad", None) is not None


def _parameters(module: torch.nn.Module | None) -> Iterator[Any]:
    states = _composable_state._module_state_mapping
    modules: Iterable[Any] = list(states) if module is None else module.modules()
    for one in modules:
        reference = states.get(one)
        state: Any = None if reference is None else reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.12 there was one
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            yield from getattr(group, "fsdp_params", ())
