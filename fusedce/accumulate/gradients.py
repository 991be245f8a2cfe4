"""Gradients of a window: their sizes, the one correction by ``finish``, and clipping after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..contract.groups import Ranks, local_of
from .engines import fsdp1_around, is_of_fsdp1

STREAMED = 1024  # the denominator of streaming losses, a power of two: it rounds nothing
LISTENERS: list[Callable[[list[Tensor], float], object]] = []
"""Called with the parameters and the factor of each correction of gradients, by tools."""


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """``p.grad *= factor`` in place; each product is rounded once, the factor never."""
    parameters = list(parameters)
    for listener in LISTENERS:
        listener(parameters, factor)
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in parameters:
        grad = local_of(p.grad)
        grad = grad._values() if grad.is_sparse else grad
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), grads in groups.items():
        if device.type == "cuda":
            torch._foreach_mul_(grads, factor)
        else:  # on a CPU that rounds the factor to the gradients' dtype
            for grad in grads:
                grad.mul_(factor)


def norms_of(parameters: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """``()`` for each gradient, the sum of absolute values; by default in its own dtype."""
    grads = [local_of(p.grad) for p in parameters]
    grads = [grad._values() if grad.is_sparse else grad for grad in grads]
    return list(torch._foreach_norm(grads, 1, dtype)) if grads else []


@torch.no_grad()
def clip_gradients(
    module: torch.nn.Module | None,  # None: its parameters were given
    parameters: Sequence[Tensor],
    max_norm: float,
    window: Ranks,  # that share the windows
    stages: Ranks | None,  # of a pipeline
) -> Tensor:
    """Clip as :meth:`LossAccumulator.clip_grad_norm_` says; the norm before it, ``()``."""
    trained = [p for p in parameters if p.grad is not None]
    if any(map(is_of_fsdp1, trained)):
        wrapper = None if module is None else fsdp1_around(module)
        if wrapper is None or stages is not None:
            raise RuntimeError(
                "clip_grad_norm_ needs FSDP1 around the whole model that LossAccumulator was given "
                "(the module, no list of its parameters), and no pipeline around it: torch's norm "
                "of FSDP1's parameters is that of this rank's part"
            )
        return wrapper.clip_grad_norm_(max_norm)
    by_mesh: dict[Any, list[Tensor]] = {}  # torch's norm is of plain tensors, or of one mesh
    for p in trained:
        by_mesh.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
    n, world = window.size(), Ranks(None).size()
    if None in by_mesh and n < world:
        raise RuntimeError(
            f"clip_grad_norm_: {n} of {world} ranks share this window, and the others may hold "
            f"other parts of the model's plain tensors (a shard of the vocabulary), which torch's "
            f"norm leaves out. Make shards DTensors, DTensor.from_local(weight, mesh, [Shard(0)]); "
            f"where plain tensors are replicas, torch.nn.utils.clip_grad_norm_ is right"
        )
    norms = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if len(norms) != 1 or stages is not None:
        device = parameters[0].device if parameters else torch.device("cpu")
        square = torch.zeros((), dtype=torch.float64, device=device)
        for norm in norms:
            square += norm.to(square).square()
        if stages is not None and (pipeline := stages.group()) is not None:
            dist.all_reduce(square, group=pipeline)
        norms = [square.sqrt().float()]
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norms[0])
    return norms[0]
