"""The default on a GPU: Triton's kernels, and torch where they cannot be built or launched.

A machine without a C compiler, a driver older than the toolkit or a card with less shared memory
than any we know is found out by the first launch. The backend of torch then computes, for that
device and from then on, after one warning with the cause and the remedy. What else fails is an
error as everywhere: a wrong argument, memory that is short, a device whose context is dead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fusedce.backends.triton_errors import CannotLaunch, why
from fusedce.contract.problem import Problem, Task

_FUNCTIONS = (
    "divergence_and_grads", "loss", "loss_and_grads", "room_for_logits", "scale_",
    "sums_smoothing", "token_grads", "token_stats",
)  # fmt: skip
_refused: dict[torch.device, str] = {}


def refused(device: torch.device) -> str | None:
    """Why the kernels do not run on ``device``, if they were tried there and could not."""
    return _refused.get(device)


def _of_either(name: str) -> Callable[..., Any]:
    def call(given: Problem | Task | Tensor, *more: Any) -> Any:
        problem = given.problem if isinstance(given, Task) else given
        device = problem.device if isinstance(problem, Tensor) else problem.hidden.device
        if device not in _refused:
            try:
                return getattr(_triton(), name)(given, *more)
            except CannotLaunch as error:
                _refused[device] = str(error)
            warnings.warn(
                f"fusedce: the Triton kernels do not run on {device}: {_refused[device]}. The "
                "torch backend computes from now on, with the same results in more time",
                stacklevel=2,
            )
        from fusedce.backends import torch as chunked

        return getattr(chunked, name)(given, *more)

    return call


def _triton() -> Any:
    try:
        from fusedce.backends import triton
    except (ImportError, OSError) as error:
        raise CannotLaunch(why(error) or str(error)) from error
    return triton


BACKEND = SimpleNamespace(**{name: _of_either(name) for name in _FUNCTIONS})
