"""Sums over tokens that outlive a window, the metrics computed from them, and the state to save.

The sums are equal on all ranks after each window, and stay on their device until they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.arguments import unpack
from fusedce.accumulate.exchange import KINDS, METRICS, UNNAMED, Exchange
from fusedce.contract.checks import check_flag
from fusedce.contract.results import MONITORS, LossSum, MonitoredLossSum

_MEANS = {"correct": "mean_token_accuracy", "entropy": "entropy", "z_loss": "z_loss"}
Loss = tuple[Tensor, Tensor]  # loss_sum () in nats, n_valid () in tokens
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
        return _faults.moved(_faults.together(values).detach(), at).double().clamp(min=least).sum()

    found = [total([x.loss_sum for x in outs]), total([x.n_valid for x in outs], 0)]
    for name in MONITORS:
        of = [x for x in outs if name in x.monitors]
        found += [total([x.monitors[name] for x in of]), total([x.n_valid for x in of], 0)]
    return torch.stack(found)


def added(a: Sums, b: Mapping[str, Tensor]) -> Sums:
    """``a + b``, on the devices of ``b``."""
    return {**a, **{k: _faults.moved(a[k], x.device) + x if k in a else x for k, x in b.items()}}


def numbers_of(sums: Sums) -> dict[str, float]:
    """The sums by :func:`key`, read from their device: one wait."""
    names = [key(loss, kind) for loss in sums for kind in KINDS]
    values = _faults.together(sums.values()).flatten().tolist() if names else []
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


class Metrics:
    """Totals, metrics and state: the part of an accumulator that outlives its windows."""

    _exchange: Exchange
    _equal: Callable[[], dict[str, object]]
    _refuse_open_window: Callable[[str], None]

    def __init__(self) -> None:
        self._weights: dict[str, float] = {UNNAMED: 1.0}  # losses of the last window, factors
        self._waiting: Sums = {}  # evaluated here, and not summed over ranks yet
        self._bad: Tensor | None = None  # the first bad label among those, as a fault
        self._trains = False  # whether a window has ever ended
        self._reset()

    def _reset(self) -> None:
        """Start a new interval of the metrics."""
        self._sums: Sums = {}  # over all ranks, equal on all of them
        self._n_windows, self._evaluates = 0, False

    def _count(self, losses: Iterable[str], values: Tensor) -> None:
        """Add ``values``, whose beginning is the sums ``(KINDS,)`` of these losses in turn."""
        self._sums = added(self._sums, dict(zip(losses, values.split(len(KINDS)), strict=False)))

    def _count_window(self, weights: dict[str, float], sums: Tensor) -> None:
        """Add a window of these losses that has ended, and its sums over all ranks."""
        self._weights = weights
        self._count(weights, sums)
        self._n_windows += 1
        self._trains = True

    def add(self, out: Loss) -> None:
        """Count a batch in the metrics without training on it (evaluation). No collective.

        ``out`` is one loss, as for :meth:`scale`. Training windows and evaluated batches are not
        mixed: reset the metrics in between.
        """
        one = unpack(out, [UNNAMED])[UNNAMED]
        if n_windows := self._n_windows:
            raise RuntimeError(
                f"add: the metrics hold {n_windows} training windows since the last reset, and "
                f"would mix training with evaluation. Call metrics(reset=True) first, or evaluate "
                f"with a LossAccumulator of its own"
            )
        self._evaluates = True
        n = one.n_valid.reshape(1)
        self._bad = _faults.first_of([self._bad, _faults.first(_faults.BAD_LABEL, n < 0, n)])
        self._waiting = added(self._waiting, {UNNAMED: sums_of([one])})

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        """Metrics of the interval over all ranks: a plain dict of numbers, ready for a tracker.

        After training windows, whose sums are exchanged at their ends, without any collective: one
        rank may call it alone (``if rank == 0: wandb.log(acc.metrics(reset=True))``). Where
        something was ``add``-ed, or nothing ever trained, one all-gather: every rank must call it.

        Returns (``reset`` starts a new interval):
            ``loss``: nats per token, sum of losses / number of tokens (NaN without tokens);
            ``perplexity``: ``exp(loss)``; ``n_tokens``: valid tokens; ``n_windows``: windows
            (optimizer steps, and those that ``on_empty="skip"`` left out). With several losses,
            ``loss`` is their weighted sum, and each has ``name/loss`` and so on. Of losses made
            with ``fused_ce(..., monitor=...)``, over the tokens of those that were:
            ``correct_tokens`` and ``mean_token_accuracy`` ("correct"), ``entropy`` and ``z_loss``,
            nats per token.

        Examples:
            >>> acc = fusedce.LossAccumulator()
            >>> acc.add((torch.tensor(6.0), torch.tensor(4)))
            >>> acc.metrics()["loss"]
            1.5
        """
        check_flag("reset", reset)
        if self._waiting or not self._trains:
            self._sum_over_ranks()
        self._refuse_open_window("read metrics")
        self._exchange.raise_unread()
        numbers, found = numbers_of(self._sums), dict[str, float]()
        if UNNAMED in self._weights:
            found = per_token(numbers, UNNAMED)
        else:
            means = {loss: per_token(numbers, loss) for loss in self._weights}
            found["loss"] = sum(w * means[x][f"{x}/loss"] for x, w in self._weights.items())
            found |= {name: number for mean in means.values() for name, number in mean.items()}
        found["n_windows"] = self._n_windows
        if reset:
            self._reset()
        return found

    def _sum_over_ranks(self) -> None:
        """Add the batches that each rank has evaluated to the totals: one all-gather."""
        bad, waiting, self._bad, self._waiting = self._bad, self._waiting, None, {}
        with self._exchange.tell_peers_on_error(METRICS):
            self._refuse_open_window("read metrics")
        sums = waiting.get(UNNAMED, torch.zeros(len(KINDS), dtype=torch.float64, device="cpu"))
        sent = self._exchange.send(METRICS, sums, self._equal(), fault=bad)
        self._count([UNNAMED], sent.wait())

    def state_dict(self) -> dict[str, Any]:
        """Totals of all ranks, as plain numbers. No collective.

        Equal on all ranks: one may save alone and all of them load it, in any number. Save between
        optimizer steps: the gradients of an open window live in ``.grad``, which no checkpoint has.
        """
        self._refuse_open_window("save the state (its gradients are in .grad, in no checkpoint)")
        if self._waiting:
            if self._exchange.ranks.size() > 1:
                raise RuntimeError(
                    "cannot save the state: batches were added on this rank that are not summed "
                    "over ranks yet. Call metrics() on all ranks first"
                )
            self._sum_over_ranks()
        self._exchange.raise_unread()
        numbers = numbers_of(self._sums)
        return {
            "loss_sum": numbers.pop("loss_sum", 0.0),
            "n_valid": int(numbers.pop("n_valid", 0)),
            "n_windows": self._n_windows,
            # Pairs in lists: a checkpoint may only load the keys that a new object has.
            "named": [[name, x] for name, x in numbers.items() if x],
            "weights": [[name, x] for name, x in self._weights.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the same bits as without the interruption.

        All ranks load the same state, whichever rank saved it, of however many.
        """
        self._refuse_open_window("load a state")
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict from state_dict(), got {type(state).__name__}")
        if missing := {"loss_sum", "n_valid", "n_windows", "named", "weights"} - set(state):
            raise ValueError(f"state must come from state_dict(), it lacks {sorted(missing)}")
        for name, kinds in (("n_valid", int), ("n_windows", int), ("loss_sum", (int, float))):
            x = state[name]
            if not isinstance(x, kinds) or isinstance(x, bool) or (kinds is int and x < 0):
                raise ValueError(f"state[{name!r}] must be a (whole) number >= 0, got {x!r}")
        numbers, weights = (_pairs(state, name) for name in ("named", "weights"))
        if state["n_valid"] or state["loss_sum"] or not numbers:
            numbers |= {name: state[name] for name in ("loss_sum", "n_valid")}
        sums: Sums = {}
        for loss in {name.rpartition("/")[0]: None for name in numbers}:
            row = [float(numbers.get(key(loss, kind), 0.0)) for kind in KINDS]
            sums[loss] = torch.tensor(row, dtype=torch.float64, device="cpu")
        self._reset()
        self._waiting, self._bad = {}, None
        self._weights = {name: float(x) for name, x in weights.items()}
        self._n_windows, self._sums = state["n_windows"], sums
        self._trains = self._n_windows > 0


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
