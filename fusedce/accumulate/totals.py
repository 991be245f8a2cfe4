"""Sums that outlive a window, the metrics computed from them, and the state to save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate.faults import moved, together
from fusedce.contract.monitors import MONITORS, MonitoredLossSum
from fusedce.contract.results import LossSum

UNNAMED = ""  # the name of a window's only loss where the user gave none
KINDS = ("loss_sum", "n_valid", *(x for name in MONITORS for x in (name, f"{name} of")))
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


def add(a: Sums, b: Mapping[str, Tensor]) -> Sums:
    """``a + b``, on the devices of ``b``."""
    return {**a, **{k: moved(a[k], x.device) + x if k in a else x for k, x in b.items()}}


def stacked(sums: Sums, losses: Iterable[str]) -> Tensor:
    """The sums of these losses, one after the other, ``(losses * KINDS,)``; missing ones are 0."""
    at = next((x.device for x in sums.values()), torch.device("cpu"))
    zeros = torch.zeros(len(KINDS), dtype=torch.float64, device=at)
    return torch.cat([moved(sums.get(loss, zeros), at) for loss in losses])


class Totals:
    """Sums over all ranks since the last reset; they stay on their device until they are read.

    Attributes:
        sums: equal on all ranks.
        weights: the losses of the last window and their factors.
        n_windows: windows since the last reset.
    """

    def __init__(self) -> None:
        self.weights: dict[str, float] = {UNNAMED: 1.0}
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        self.sums: Sums = {}
        self.n_windows = 0

    def add(self, losses: Iterable[str], values: Tensor) -> None:
        """Add ``values``, whose beginning is the :func:`stacked` sums of these losses."""
        self.sums = add(self.sums, dict(zip(losses, values.split(len(KINDS)), strict=False)))

    def numbers(self) -> dict[str, float]:
        """The sums by :func:`key`, read from their device: one wait."""
        names = [key(loss, kind) for loss in self.sums for kind in KINDS]
        values = stacked(self.sums, self.sums).tolist() if names else []
        return dict(zip(names, values, strict=True))

    def metrics(self) -> dict[str, float]:
        """See :meth:`LossAccumulator.metrics`. Waits for the device."""
        numbers: dict[str, float] = self.numbers()
        found: dict[str, float] = {}
        if UNNAMED in self.weights:
            found = _per_token(numbers, UNNAMED)
        else:
            means = {loss: _per_token(numbers, loss) for loss in self.weights}
            found["loss"] = sum(w * means[x][f"{x}/loss"] for x, w in self.weights.items())
            found |= {name: number for mean in means.values() for name, number in mean.items()}
        return {**found, "n_windows": self.n_windows}

    def state(self) -> dict[str, Any]:
        """See :meth:`LossAccumulator.state_dict`. Waits for the device."""
        numbers = self.numbers()
        return {
            "loss_sum": numbers.pop("loss_sum", 0.0),
            "n_valid": int(numbers.pop("n_valid", 0)),
            "n_windows": self.n_windows,
            # Pairs in lists: a checkpoint may only load the keys that a new object has.
            "named": [[name, x] for name, x in numbers.items() if x],
            "weights": [[name, x] for name, x in self.weights.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that :meth:`state` returned.

        Raises:
            TypeError: it is not a mapping.
            ValueError: keys are missing, or hold values that no accumulator saves.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict from state_dict(), got {type(state).__name__}")
        if missing := set(self.state()) - set(state):
            raise ValueError(f"state must come from state_dict(), it lacks {sorted(missing)}")
        for name, kinds in (("n_valid", int), ("n_windows", int), ("loss_sum", (int, float))):
            x = state[name]
            if not isinstance(x, kinds) or isinstance(x, bool) or (kinds is int and x < 0):
                raise ValueError(f"state[{name!r}] must be a (whole) number >= 0, got {x!r}")
        numbers, weights = (_pairs(state, name) for name in ("named", "weights"))
        if state["n_valid"] or state["loss_sum"] or not numbers:
            numbers |= {name: state[name] for name in ("loss_sum", "n_valid")}
        self.sums = {}
        for loss in {name.rpartition("/")[0]: None for name in numbers}:
            row = [float(numbers.get(key(loss, kind), 0.0)) for kind in KINDS]
            self.sums[loss] = torch.tensor(row, dtype=torch.float64, device="cpu")
        self.weights = {name: float(x) for name, x in weights.items()}
        self.n_windows = state["n_windows"]


def _per_token(numbers: Mapping[str, float], loss: str) -> dict[str, float]:
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


def _pairs(state: Mapping[str, Any], name: str) -> dict[str, float]:
    """``state[name]``, a list of names and numbers, as a dict; ``ValueError`` for anything else."""
    pairs = state[name]
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(x, (list, tuple))
        and len(x) == 2
        and isinstance(x[0], str)
        and isinstance(x[1], (int, float))
        for x in pairs
    ):
        raise ValueError(f"state[{name!r}] must be a list of [name, number], got {pairs!r}")
    return dict(pairs)
