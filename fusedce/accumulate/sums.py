"""Sums over tokens that outlive a window, the metrics computed from them, and the state to save.

The sums are equal on all ranks after each window, and stay on their device until they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate.exchange import KINDS
from fusedce.accumulate.faults import moved, together
from fusedce.contract.monitors import MONITORS, MonitoredLossSum
from fusedce.contract.results import LossSum

_MEANS = {"correct": "mean_token_accuracy", "entropy": "entropy", "z_loss": "z_loss"}
Sums = dict[str, Tensor]
"""Sums over tokens by loss, ``(KINDS,)`` float64: of losses, of valid tokens, and for each monitor
its sum and the number of monitored tokens (``correct of``)."""


def key(loss: str, kind: str) -> str:
    """The name of a number: ``kind``, with the loss's name before it if it has one."""
    return f"{loss}/{kind}" if loss else kind


def copied(out: MonitoredLossSum) -> MonitoredLossSum:
    """The numbers of a micro-batch, without its graph; graphs and models reuse their outputs."""
    with torch.no_grad():
        kept = LossSum(out.loss_sum.clone(), out.n_valid.clone())
        return MonitoredLossSum.of(kept, {name: x.clone() for name, x in out.monitors.items()})


def sums_of(outs: Sequence[MonitoredLossSum]) -> Tensor:
    """The sums ``(KINDS,)`` of micro-batches. A negative count is a bad label and counts as 0."""
    at = outs[0].n_valid.device

    def total(values: list[Tensor], least: float = -math.inf) -> Tensor:
        if not values:
            return torch.zeros((), dtype=torch.float64, device=at)
        return moved(together(values).detach(), at).double().clamp(min=least).sum()

    found = [total([x.loss_sum for x in outs]), total([x.n_valid for x in outs], 0)]
    for name in MONITORS:
        of = [x for x in outs if name in x.monitors]
        found += [total([x.monitors[name] for x in of]), total([x.n_valid for x in of], 0)]
    return torch.stack(found)


def added(a: Sums, b: Mapping[str, Tensor]) -> Sums:
    """``a + b``, on the devices of ``b``."""
    return {**a, **{k: moved(a[k], x.device) + x if k in a else x for k, x in b.items()}}


def numbers_of(sums: Sums) -> dict[str, float]:
    """The sums by :func:`key`, read from their device: one wait."""
    names = [key(loss, kind) for loss in sums for kind in KINDS]
    values = together(sums.values()).flatten().tolist() if names else []
    return dict(zip(names, values, strict=True))


def per_token(numbers: Mapping[str, float], loss: str) -> dict[str, float]:
    """The metrics of one loss, by name, from its sums."""
    of = {kind: numbers.get(key(loss, kind), 0.0) for kind in KINDS}
    n = of["n_valid"]
    mean = of["loss_sum"] / n if n else math.nan
    perplexity = math.nan if mean != mean else math.exp(mean) if mean < 709 else math.inf
    found: dict[str, float] = {"loss": mean, "perplexity": perplexity, "n_tokens": int(n)}
    for name in MONITORS:
        if monitored := of[f"{name} of"]:
            if name == "correct":
                found["correct_tokens"] = int(of[name])
            found[_MEANS[name]] = of[name] / monitored
    return {key(loss, name): x for name, x in found.items()}


def loaded(state: Any) -> tuple[Sums, dict[str, float], int]:
    """The sums, the weights of losses and the number of windows that a state holds.

    Raises:
        TypeError, ValueError: it is none that ``state_dict`` has returned.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict from state_dict(), got {type(state).__name__}")
    if missing := {"loss_sum", "n_valid", "n_windows", "named", "weights"} - set(state):
        raise ValueError(f"state must come from state_dict(), it lacks {sorted(missing)}")
    for name, kinds in (("n_valid", int), ("n_windows", int), ("loss_sum", (int, float))):
        x = state[name]
        if not isinstance(x, kinds) or isinstance(x, bool) or (kinds is int and x < 0):
            raise ValueError(f"state[{name!r}] must be a (whole) number >= 0, got {x!r}")
    try:
        numbers, weights = (
            {str(loss): float(x) for loss, x in state[name]} for name in ("named", "weights")
        )
    except (TypeError, ValueError):
        raise ValueError("state['named'] and ['weights'] must hold [name, number]") from None
    if state["n_valid"] or state["loss_sum"] or not numbers:
        numbers |= {name: state[name] for name in ("loss_sum", "n_valid")}
    sums: Sums = {}
    for loss in {name.rpartition("/")[0]: None for name in numbers}:
        row = [float(numbers.get(key(loss, kind), 0.0)) for kind in KINDS]
        sums[loss] = torch.tensor(row, dtype=torch.float64, device="cpu")
    return sums, weights, state["n_windows"]
