"""Statistics beside the loss: detached sums over its tokens, computed in the same pass."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fusedce.contract.problem import Problem, Wanted

MONITORS = ("correct", "entropy", "z_loss")


def check_monitor(monitor: Collection[str]) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless it holds names of :data:`MONITORS` alone."""
    if isinstance(monitor, (str, Tensor)) or not isinstance(monitor, Collection):
        raise TypeError(f"monitor must be a tuple of names out of {MONITORS}, got {monitor!r}")
    for name in monitor:
        if name not in MONITORS:
            raise ValueError(f"monitor must hold names out of {MONITORS}, got {name!r}")


def wanted_for(monitor: Collection[str], *, argmax: bool) -> Wanted:
    """The statistics of tokens that these sums, and ``argmax`` on request, are computed from."""
    return Wanted(
        argmax=argmax or "correct" in monitor,
        entropy="entropy" in monitor,
        lse="z_loss" in monitor,
    )


def sums(
    problem: Problem,
    monitor: Collection[str],
    argmax: Tensor | None,  # (N,); None where it is not wanted, like the two below
    lse: Tensor | None,
    entropy: Tensor | None,
) -> dict[str, Tensor]:
    """Sums over all tokens, by name: ``()`` float64.

    Tokens without loss have -1 in ``argmax``, and 0 in ``lse`` and ``entropy``.
    """
    found = {}
    if "correct" in monitor and argmax is not None:
        found["correct"] = ((argmax == problem.labels) & problem.valid()).sum().double()
    if "entropy" in monitor and entropy is not None:
        found["entropy"] = entropy.sum(dtype=torch.float64)
    if "z_loss" in monitor and lse is not None:
        z = problem.z_loss * lse.double().square()
        if problem.token_weight is not None:
            z = z * problem.token_weight
        found["z_loss"] = z.masked_fill(~problem.valid(), 0).sum()
    return found
