"""What the engine's processes run: a problem and an implementation as a call without arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedce.tools.peers import COMPILED, FLOOR, IMPLEMENTATIONS

from .problems import Spec, make_inputs


def make_call(name: str, spec: Sequence[Any]) -> Callable[[], object]:
    """A call that does the whole job once and drops the gradients; warmed up on a small input."""
    spec = Spec(*spec)
    _forget(name)
    hidden, weight, labels = make_inputs(spec)
    if name == FLOOR:
        return _bare_gemms(hidden, weight, labels, spec.mode)
    loss = IMPLEMENTATIONS[name]
    options = _options(spec)
    if spec.mode == "forward":

        @torch.no_grad()
        def forward() -> Tensor:
            return loss(hidden, weight, labels, **options)

        call: Callable[[], object] = forward
    else:
        leaves = [hidden.requires_grad_()]
        if spec.mode == "train":
            leaves.append(weight.requires_grad_())

        def step() -> None:
            loss(hidden, weight, labels, **options).backward()
            for x in leaves:
                x.grad = None

        call = step
    # What the first call of a process loads (libraries, thread pools) is nobody's extra memory.
    if name != COMPILED:  # which would compile twice
        small = [x.detach()[:16].clone().requires_grad_(x.requires_grad) for x in (hidden, weight)]
        loss(*small, labels[:16].clamp(max=15))
    return call


def _forget(name: str) -> None:
    """As in a new process: with a second shape torch.compile would take to dynamic ones."""
    if name == COMPILED:
        torch.compiler.reset()


def _options(spec: Spec) -> dict[str, Any]:
    return {"chunk_tokens": spec.chunk_tokens} if spec.chunk_tokens else {}


def _bare_gemms(hidden: Tensor, weight: Tensor, labels: Tensor, mode: str) -> Callable[[], object]:
    """The products nobody can do without, full size, on the valid rows: 2 N V H FLOPs each."""
    h = hidden[labels != -100].clone()

    def gemms() -> None:
        logits = torch.mm(h, weight.t())
        if mode != "forward":
            torch.mm(logits, weight)
        if mode == "train":
            torch.mm(logits.t(), h)

    return gemms


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
