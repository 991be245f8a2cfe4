"""Sums that outlive a window, the metrics computed from them, and the state to save."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.contract.monitors import MONITORS, MonitoredLossSum

Sums = dict[str, Tensor]
"""Named sums over tokens, each ``()`` float64: ``loss_sum``, ``n_valid``, and for each monitor
(such as ``correct``) its sum and the number of monitored tokens (``correct of``). The sums of a
loss with a name are called ``name/loss_sum`` and so on."""

UNNAMED = ""
"""The name of a window's only loss where the user gave none."""


def key(loss: str, kind: str) -> str:
    """The name of a sum: ``kind``, with the loss's name before it if it has one."""
    return f"{loss}/{kind}" if loss else kind


_KINDS = ("loss_sum", "n_valid", *(x for name in MONITORS for x in (name, f"{name} of")))


def sums_of(loss: str, out: MonitoredLossSum) -> Sums:
    """The sums of one micro-batch. A negative count reports a bad label and counts as 0."""
    n_valid = out.n_valid.clamp(min=0).double()
    found = {"loss_sum": out.loss_sum.detach().double(), "n_valid": n_valid}
    for name, monitored in out.monitors.items():
        found |= {name: monitored.detach().double().to(n_valid.device), f"{name} of": n_valid}
    return {key(loss, kind): x for kind, x in found.items()}


def add(a: Sums, b: Mapping[str, Tensor]) -> Sums:
    """``a + b``, on the devices of ``b``."""
    return {**a, **{k: _faults.moved(a[k], x.device) + x if k in a else x for k, x in b.items()}}


def stacked(sums: Sums, names: Iterable[str]) -> Tensor:
    """``(len(names),)`` float64; missing sums are 0."""
    device = next((x.device for x in sums.values()), torch.device("cpu"))
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([_faults.moved(sums.get(name, zero), device) for name in names])


def names_of(losses: Iterable[str]) -> list[str]:
    """Names of the sums of these losses, in the order in which ranks exchange them."""
    return [key(loss, kind) for loss in losses for kind in _KINDS]


class Totals:
    """Sums over all ranks since the last reset; they stay on their device until they are read.

    Attributes:
        sums: equal on all ranks.
        weights: the losses of the last window and their factors.
        n_windows: windows since the last reset.
        previous_count: ``()`` float64, > 0: valid tokens of the last streaming window, or ``None``.
    """

    def __init__(self) -> None:
        self.sums: Sums = {}
        self.weights: dict[str, float] = {UNNAMED: 1.0}
        self.n_windows = 0
        self.previous_count: Tensor | None = None

    def reset(self) -> None:
        """Start a new interval; the streaming estimate stays."""
        self.sums, self.n_windows = {}, 0

    def add(self, names: Iterable[str], values: Tensor) -> None:
        """Add ``values (n,)`` float64 to the sums of these names."""
        self.sums = add(self.sums, dict(zip(names, values.unbind(), strict=True)))

    def numbers(self) -> dict[str, float]:
        """The sums, read from their device: one wait."""
        if not self.sums:
            return {}
        return dict(zip(self.sums, stacked(self.sums, self.sums).tolist(), strict=True))

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
        previous = self.previous_count
        return {
            "loss_sum": numbers.pop("loss_sum", 0.0),
            "n_valid": int(numbers.pop("n_valid", 0)),
            "n_windows": self.n_windows,
            "previous_count": None if previous is None else int(previous),
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
        for name in ("n_valid", "n_windows"):
            if not _is_whole(state[name]) or state[name] < 0:
                raise ValueError(f"state[{name!r}] must be a whole number >= 0, got {state[name]}")
        previous = state["previous_count"]
        if previous is not None and (not _is_whole(previous) or previous < 1):
            raise ValueError(
                f"state['previous_count'] must be None or the tokens of a window, at least 1, got "
                f"{previous!r}: gradients would be divided by it"
            )
        if not _is_number(state["loss_sum"]):
            raise ValueError(f"state['loss_sum'] must be a number, got {state['loss_sum']!r}")
        numbers, weights = (_pairs(state, name) for name in ("named", "weights"))
        if state["n_valid"] or state["loss_sum"] or not numbers:
            numbers = {"loss_sum": state["loss_sum"], "n_valid": state["n_valid"], **numbers}
        self.sums = {
            k: torch.tensor(float(x), dtype=torch.float64, device="cpu") for k, x in numbers.items()
        }
        self.weights = {name: float(x) for name, x in weights.items()}
        self.n_windows = int(state["n_windows"])
        self.previous_count = None
        if previous is not None:
            self.previous_count = torch.tensor(float(previous), dtype=torch.float64, device="cpu")


_MEANS = {"correct": "mean_token_accuracy", "entropy": "entropy", "z_loss": "z_loss"}


def _per_token(numbers: Mapping[str, float], loss: str) -> dict[str, float]:
    """The metrics of one loss, by name, from its sums."""
    n_tokens = numbers.get(key(loss, "n_valid"), 0.0)
    mean = numbers.get(key(loss, "loss_sum"), 0.0) / n_tokens if n_tokens else math.nan
    found: dict[str, float] = {
        key(loss, "loss"): mean,
        key(loss, "perplexity"): (
            math.exp(mean) if mean < 709 else math.inf if mean == mean else math.nan
        ),
        key(loss, "n_tokens"): int(n_tokens),
    }
    for name in MONITORS:
        if of := numbers.get(key(loss, f"{name} of")):
            summed = numbers.get(key(loss, name), 0.0)
            if name == "correct":
                found[key(loss, "correct_tokens")] = int(summed)
            found[key(loss, _MEANS[name])] = summed / of
    return found


def _pairs(state: Mapping[str, Any], name: str) -> dict[str, float]:
    """``state[name]``, a list of names and numbers, as a dict; ``ValueError`` for anything else."""
    pairs = state[name]
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(x, (list, tuple)) and len(x) == 2 and isinstance(x[0], str) and _is_number(x[1])
        for x in pairs
    ):
        raise ValueError(f"state[{name!r}] must be a list of [name, number], got {pairs!r}")
    return dict(pairs)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
