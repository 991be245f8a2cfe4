"""Sums over tokens that outlive a window, the metrics computed from them, and the state to save.

The sums are equal on all ranks after each window, and stay on their device until they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate import exchange as _exchange
from fusedce.accumulate.arguments import unpack
from fusedce.accumulate.exchange import KINDS, METRICS, Exchange
from fusedce.contract.checks import check_flag
from fusedce.contract.results import MONITORS, LossSum, MonitoredLossSum

_MEANS = {"correct": "mean_token_accuracy", "entropy": "entropy", "z_loss": "z_loss"}
Loss = tuple[Tensor, Tensor]  # loss_sum () in nats, n_valid () in tokens


def copied(out: MonitoredLossSum) -> MonitoredLossSum:
    """The numbers of a micro-batch, without its graph; graphs and models reuse their outputs."""
    with torch.no_grad():
        kept = LossSum(out.loss_sum.clone(), out.n_valid.clone())
        return MonitoredLossSum.of(kept, {name: x.clone() for name, x in out.monitors.items()})


def sums_of(outs: Sequence[MonitoredLossSum]) -> Tensor:
    """The sums ``(KINDS,)`` of micro-batches. A negative count is a bad label and counts as 0."""
    at = outs[0].n_valid.device if outs else torch.device("cpu")

    def total(values: list[Tensor], least: float = -math.inf) -> Tensor:
        if not values:
            return torch.zeros((), dtype=torch.float64, device=at)
        every = _exchange.together(values).detach().double()
        return _exchange.moved(every.clamp(min=least).sum(), at)

    found = [total([x.loss_sum for x in outs]), total([x.n_valid for x in outs], 0)]
    for name in MONITORS:
        of = [x for x in outs if name in x.monitors]
        found += [total([x.monitors[name] for x in of]), total([x.n_valid for x in of], 0)]
    return torch.stack(found)


class Metrics:
    """Totals, metrics and state: the part of an accumulator that outlives its windows."""

    _exchange: Exchange
    _equal: Callable[[], dict[str, object]]
    _refuse_open_window: Callable[[str], None]

    def __init__(self) -> None:
        self._waiting: Tensor | None = None  # sums of what was evaluated here, and not exchanged
        self._bad: Tensor | None = None  # the first bad label among those, as a fault
        self._reset()

    def _reset(self) -> None:
        """Start a new interval of the metrics."""
        self._sums = torch.zeros(len(KINDS), dtype=torch.float64, device="cpu")  # of all ranks
        self._n_windows, self._evaluates = 0, False

    def _numbers(self) -> dict[str, float]:
        """The sums over tokens of all ranks, by kind; raises errors that wait on a device."""
        self._exchange.raise_unread()
        return dict(zip(KINDS, self._sums.tolist(), strict=True))

    def _count_window(self, sums: Tensor) -> None:
        """Add a window that has ended, and its sums ``(KINDS,)`` over all ranks."""
        self._sums = _exchange.moved(self._sums, sums.device) + sums
        self._n_windows += 1

    def add(self, out: Loss) -> None:
        """Count a batch in the metrics without training on it (evaluation). No collective.

        ``out`` is one loss, as for :meth:`scale`. Training windows and evaluated batches are not
        mixed: reset the metrics in between.
        """
        one = unpack(out)
        self._refuse_open_window("add evaluation to the metrics")
        if n_windows := self._n_windows:
            raise RuntimeError(
                f"add: the metrics hold {n_windows} training windows since the last reset, and "
                f"would mix training with evaluation. Call metrics(reset=True) first, or evaluate "
                f"with a LossAccumulator of its own"
            )
        self._evaluates = True
        n = one.n_valid.reshape(1)
        self._bad = _exchange.first_of([self._bad, _exchange.first(_exchange.BAD_LABEL, n < 0, n)])
        sums, before = sums_of([one]), self._waiting
        self._waiting = sums if before is None else _exchange.moved(before, sums.device) + sums

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        """Metrics of the interval over all ranks: a plain dict of numbers, ready for a tracker.

        After training windows, whose sums are exchanged at their ends, without any collective: one
        rank may call it alone (``if rank == 0: wandb.log(acc.metrics(reset=True))``). Without a
        window since the last reset (evaluation, or nothing), one all-gather: every rank calls it.

        Returns (``reset`` starts a new interval):
            ``loss``: nats per token, sum of losses / number of tokens (NaN without tokens);
            ``perplexity``: ``exp(loss)``; ``n_tokens``: valid tokens; ``n_windows``: windows
            (optimizer steps, and those that ``on_empty="skip"`` left out). Of losses made with
            ``fused_ce(..., monitor=...)``, over the tokens of those that were: ``correct_tokens``
            and ``mean_token_accuracy`` ("correct"), ``entropy`` and ``z_loss``, nats per token.

        Examples:
            >>> acc = fusedce.LossAccumulator()
            >>> acc.add((torch.tensor(6.0), torch.tensor(4)))
            >>> acc.metrics()["loss"]
            1.5
        """
        check_flag("reset", reset)
        if self._waiting is not None or not self._n_windows:
            self._sum_over_ranks()
        self._refuse_open_window("read metrics")
        sums = self._numbers()
        n = int(sums["n_valid"])
        mean = sums["loss_sum"] / n if n else math.nan
        perplexity = math.nan if mean != mean else math.exp(mean) if mean < 709 else math.inf
        found = {"loss": mean, "perplexity": perplexity, "n_tokens": n}
        for name in MONITORS:
            if monitored := sums[f"{name} of"]:
                if name == "correct":
                    found["correct_tokens"] = int(sums[name])
                found[_MEANS[name]] = sums[name] / monitored
        found["n_windows"] = self._n_windows
        if reset:
            self._reset()
        return found

    def _sum_over_ranks(self) -> None:
        """Add the batches that each rank has evaluated to the totals: one all-gather."""
        bad, sums, self._bad, self._waiting = self._bad, self._waiting, None, None
        with self._exchange.tell_peers_on_error(METRICS):
            self._refuse_open_window("read metrics")
        sums = torch.zeros(len(KINDS), dtype=torch.float64, device="cpu") if sums is None else sums
        sums = self._exchange.send(METRICS, sums, self._equal(), fault=bad).wait()
        self._sums = _exchange.moved(self._sums, sums.device) + sums

    def state_dict(self) -> dict[str, Any]:
        """Totals of all ranks, as plain numbers. No collective.

        Equal on all ranks: one may save alone and all of them load it, in any number. Save between
        optimizer steps: the gradients of an open window live in ``.grad``, which no checkpoint has.
        """
        self._refuse_open_window("save the state (its gradients are in .grad, in no checkpoint)")
        if self._waiting is not None:
            if self._exchange.ranks.size() > 1:
                raise RuntimeError(
                    "cannot save the state: batches were added on this rank that are not summed "
                    "over ranks yet. Call metrics() on all ranks first"
                )
            self._sum_over_ranks()
        numbers = self._numbers()
        return {**numbers, "n_valid": int(numbers["n_valid"]), "n_windows": self._n_windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the same bits as without the interruption.

        All ranks load the same state, whichever rank saved it, of however many.
        """
        self._refuse_open_window("load a state")
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict from state_dict(), got {type(state).__name__}")
        if missing := {*KINDS, "n_windows"} - set(state):
            raise ValueError(f"state must come from state_dict(), it lacks {sorted(missing)}")
        for name in (*KINDS, "n_windows"):
            x, whole = state[name], name in ("n_valid", "n_windows")
            is_number = isinstance(x, int if whole else (int, float)) and not isinstance(x, bool)
            if not is_number or (whole and x < 0):
                raise ValueError(f"state[{name!r}] must be a number (counts: int >= 0), got {x!r}")
        self._reset()
        self._waiting, self._bad = None, None
        numbers = [float(state[name]) for name in KINDS]
        self._sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._n_windows = state["n_windows"]
        self._evaluates = not self._n_windows and state["n_valid"] > 0
