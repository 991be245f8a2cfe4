"""Sums over tokens: of a micro-batch, of a window, of an interval; metrics and state from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract.labels import bad_label_message
from ..contract.results import MONITORS, LossSum, MonitoredLossSum
from .exchange import SUMS, read

_MEANS = {"correct": "mean_token_accuracy", "entropy": "entropy", "z_loss": "z_loss"}
Loss = tuple[Tensor, Tensor]  # loss_sum () in nats, n_valid () in tokens


def copied(out: MonitoredLossSum) -> MonitoredLossSum:
    """The numbers of a loss, without its graph; graphs and models reuse their outputs."""
    with torch.no_grad():
        kept = LossSum(out.loss_sum.clone(), out.n_valid.clone())
        return MonitoredLossSum.of(kept, {name: x.clone() for name, x in out.monitors.items()})


def counts_of(outs: Sequence[MonitoredLossSum]) -> list[int]:
    """The valid tokens of losses; ``ValueError`` for a bad label."""
    counts = read(x.n_valid for x in outs)
    if bad := [n for n in counts if n < 0]:
        raise ValueError(bad_label_message(bad[0]))
    return counts


def sums_of(outs: Sequence[MonitoredLossSum], counts: Sequence[int]) -> list[float]:
    """:data:`SUMS` of losses with these numbers of tokens."""
    found: list[float] = [sum(read(x.loss_sum.double() for x in outs)), sum(counts)]
    for name in MONITORS:
        monitored = [
            (x.monitors[name], n) for x, n in zip(outs, counts, strict=True) if name in x.monitors
        ]
        found += [sum(read(x.double() for x, _ in monitored)), sum(n for _, n in monitored)]
    return found


def means_of(sums: Sequence[float]) -> dict[str, float]:
    """The metrics that :data:`SUMS` give."""
    by_name = dict(zip(SUMS, sums, strict=True))
    n = int(by_name["n_valid"])
    mean = by_name["loss_sum"] / n if n else math.nan
    perplexity = math.nan if mean != mean else math.exp(mean) if mean < 709 else math.inf
    found = {"loss": mean, "perplexity": perplexity, "n_tokens": n}
    for name in MONITORS:
        if monitored := by_name[f"{name} of"]:
            if name == "correct":
                found["correct_tokens"] = int(by_name[name])
            found[_MEANS[name]] = by_name[name] / monitored
    return found


class Totals:
    """:data:`SUMS` of each loss over an interval, and its number of windows.

    Args:
        weights: of the losses of a step, by name; one without a name is ``""``.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.reset()

    def reset(self) -> None:
        """Start a new interval."""
        self.sums = [0.0] * (len(SUMS) * len(self._weights))
        self.n_windows = 0

    def add(self, sums: Sequence[float]) -> None:
        """Add sums, those of each loss after the other."""
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=False)]

    def means(self) -> dict[str, float]:
        """Metrics; of several losses each under ``name/``, and ``loss``, their weighted sum."""
        if "" in self._weights:
            return means_of(self.sums)
        found: dict[str, float] = {"loss": math.nan}
        total = []
        for i, (name, weight) in enumerate(self._weights.items()):
            means = means_of(self.sums[i * len(SUMS) : (i + 1) * len(SUMS)])
            found |= {f"{name}/{key}": x for key, x in means.items()}
            if means["n_tokens"]:
                total.append(weight * means["loss"])
        return found | ({"loss": sum(total)} if total else {})

    def _keys(self) -> list[str]:
        return [f"{name}/{x}" if name else x for name in self._weights for x in SUMS]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        found: dict[str, Any] = dict(zip(self._keys(), self.sums, strict=True))
        counts = {x: int(n) for x, n in found.items() if x.endswith("n_valid")}
        return found | counts | {"n_windows": self.n_windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all numbers by those of :meth:`state_dict`."""
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict from state_dict(), got {type(state).__name__}")
        keys = self._keys()
        if missing := {*keys, "n_windows"} - set(state):
            raise ValueError(f"state must come from state_dict(), it lacks {sorted(missing)}")
        for name in (*keys, "n_windows"):
            x, is_count = state[name], name.endswith(("n_valid", "n_windows"))
            kinds = int if is_count else (int, float)
            if not isinstance(x, kinds) or isinstance(x, bool) or (is_count and x < 0):
                raise ValueError(f"state[{name!r}] must be a number (counts: int >= 0), got {x!r}")
        self.sums = [float(state[name]) for name in keys]
        self.n_windows = state["n_windows"]
