"""The leaves of a loss's graph: whose ``.grad`` a backward adds to, and whether it trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def trains(roots: list[Any]) -> bool:
    """Whether the backward that runs now is for parameters below ``roots``.

    A pipeline's first step asks ``torch.autograd.grad`` for gradients of a stage's inputs alone, to
    learn their shapes: that is no training, though there is a loss. Such a graph has leaves beside
    its parameters; without any ``nn.Parameter`` it always trains.
    """
    parameters = others = asked_for = False
    for variable, node in _leaves(roots):
        if not isinstance(variable, torch.nn.Parameter):
            others = True
            continue
        parameters = True
        try:
            if torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # torch's answer about leaves inside of torch.autograd.grad
            asked_for = True
    return not parameters or (asked_for and not others)


def leaves_of(roots: list[Any]) -> list[Tensor]:
    """The tensors whose ``.grad`` a backward through ``roots`` adds to."""
    return [variable for variable, _ in _leaves(roots)]


def _leaves(roots: list[Any]) -> Iterator[tuple[Tensor, Any]]:
    """The leaves of a graph and their nodes, those near the loss first."""
    level, seen = [node for node in roots if node is not None], set()
    while level:
        following = []
        for node in level:
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable, node
            following += [x for x, _ in node.next_functions if x is not None]
        level = following
