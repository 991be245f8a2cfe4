"""Calls without arguments for the engine's processes, from a problem and an implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fusedce.tools import bench
from fusedce.tools.bench import COMPILED, FLOOR, IMPLEMENTATIONS

from .problems import Spec, make_inputs


def make_call(name: str, spec: Sequence[Any]) -> Callable[[], object]:
    """A call that does the whole job once and drops the gradients; warmed up on a few rows."""
    spec = Spec(*spec)
    _forget(name)
    return bench.make_call(name, *make_inputs(spec), spec.mode, **_options(spec))


def _forget(name: str) -> None:
    """Reset torch.compile, which would compile for dynamic shapes at the second shape."""
    if name == COMPILED:
        torch.compiler.reset()


def _options(spec: Spec) -> dict[str, Any]:
    return {"chunk_tokens": spec.chunk_tokens} if spec.chunk_tokens else {}


def errors(name: str, spec: Sequence[Any]) -> dict[str, float]:
    """Relative error of the loss, and normwise of the gradients, against fp64."""
    if name == FLOOR:
        return {}
    spec = Spec(*spec)
    _forget(name)
    hidden, weight, labels = make_inputs(spec)
    leaves = {"forward": [], "frozen": [hidden], "train": [hidden, weight]}[spec.mode]
    for x in leaves:
        x.requires_grad_()
    with torch.set_grad_enabled(spec.mode != "forward"):
        loss = IMPLEMENTATIONS[name](hidden, weight, labels, **_options(spec))
    exact_leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = F.cross_entropy(F.linear(*exact_leaves), labels)
    result = {"loss": abs(loss.item() - exact.item()) / abs(exact.item())}
    if spec.mode != "forward":
        loss.backward()
        exact.backward()
        for label, x, e in zip(("d_hidden", "d_weight"), leaves, exact_leaves, strict=False):
            assert x.grad is not None
            assert e.grad is not None
            result[label] = float((x.grad.double() - e.grad).norm() / e.grad.norm())
    return result
