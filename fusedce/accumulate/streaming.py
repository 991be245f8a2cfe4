"""Windows whose count becomes known at their end: gradients are corrected there, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults

UNKNOWN = 1024  # tokens a rank: the estimate in the first window
_PART = 2**24  # elements whose float32 copies are held at a time


def trained_of(parameters: Any, some: bool) -> list[Tensor]:
    """Those of ``parameters`` that have a gradient, each once.

    Raises:
        TypeError: not an iterable of tensors.
        RuntimeError: none has a gradient, though ``some`` must.
    """
    advice = "pass an iterable of tensors, such as model.parameters()"
    if isinstance(parameters, (torch.nn.Module, Tensor)) or not isinstance(parameters, Iterable):
        raise TypeError(f"parameters: {advice}, got {type(parameters).__name__}")
    found: dict[int, Tensor] = {}
    for p in parameters:
        if not isinstance(p, Tensor):
            kinds: dict[Any, str] = {
                tuple: "named_parameters() gives pairs",
                dict: "an optimizer's param_groups are dicts, whose 'params' are tensors",
                str: "names are no tensors",
            }
            why = kinds.get(type(p), f"it holds {type(p).__name__}")
            raise TypeError(f"parameters: {advice} ({why})")
        if p.grad is not None:
            found[id(p)] = p
    if some and not found:
        raise RuntimeError(
            "parameters: no parameter given has a .grad to correct (was the generator used up, or "
            "zero_grad called before finish?)"
        )
    return list(found.values())


_LISTENERS: dict[int, Callable[[float], None]] = {}


class OnCorrection:
    """Until :meth:`remove`, ``told(factor)`` is called where gradients are corrected.

    For tools that follow what a gradient has been multiplied by; reading the factor waits.
    """

    def __init__(self, told: Callable[[float], None]) -> None:
        _LISTENERS[id(self)] = told

    def remove(self) -> None:
        _LISTENERS.pop(id(self), None)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """``p.grad *= factor ()`` float64, each product rounded once: never the factor."""
    for told in _LISTENERS.values():
        told(float(factor))
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in parameters:
        grad = local_of(p.grad)
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, dtype), grads in groups.items():
        if _faults.readable(device) and _faults.readable(factor.device):
            torch._foreach_mul_(grads, float(factor))
            continue
        there = _faults.moved(factor, device).to(torch.promote_types(dtype, torch.float32))
        if there.dtype == dtype:
            torch._foreach_mul_(grads, there)
            continue
        # A 0-d tensor on a device is rounded to the dtype of what it multiplies: up to 0.4% in
        # bf16, the same on every element.
        for part in _parts(grads):
            wide = [x.to(there.dtype) for x in part]
            torch._foreach_mul_(wide, there)
            torch._foreach_copy_(part, wide)


def _parts(grads: list[Tensor]) -> Iterable[list[Tensor]]:
    """The tensors in lists of at most ``_PART`` elements, large ones in pieces."""
    part: list[Tensor] = []
    size = 0
    for grad in grads:
        pieces = grad.view(-1).split(_PART) if grad.is_contiguous() else (grad,)
        for piece in pieces:
            if part and size + piece.numel() > _PART:
                yield part
                part, size = [], 0
            part.append(piece)
            size += piece.numel()
    if part:
        yield part


def local_of(grad: Any) -> Tensor:
    """The shard of a DTensor that lies here; other gradients as they are."""
    return grad.to_local() if hasattr(grad, "to_local") else grad
