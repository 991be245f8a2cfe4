"""What outlives a window: totals of the interval, metrics over all ranks, and the state to save."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.ranks import Ranks
from fusedce.accumulate.window import Window, add_totals, unpack

_STATE = ("loss_sum", "n_valid", "n_windows", "previous_count", "rank", "ranks")


class Interval:
    """Sums and counts since the last reset, on their device until somebody reads them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._faults = _faults.DeviceFaults()
        self._window: Window | None = None
        self._previous_count: Tensor | None = None  # () int64, > 0: the streaming estimate
        self._totals: Tensor | None = None  # (2,) float64: loss_sum, n_valid of this interval
        self._n_windows = 0

    def add(self, out: tuple[Tensor, Tensor]) -> None:
        """Count a batch in the metrics without training on it (evaluation). No collective.

        Args:
            out: what :func:`fused_ce` returned: ``loss_sum ()`` in nats, ``n_valid ()`` in tokens.

        Raises:
            TypeError: ``out`` is something else.
            ValueError: a label was out of range (at once on a CPU, else when metrics are read).
        """
        loss_sum, n_valid = unpack(out)
        self._faults.note(_faults.bad_label, n_valid < 0, n_valid)
        self._totals = add_totals(self._totals, loss_sum, n_valid)

    def metrics(self, *, reset: bool = False) -> dict[str, float]:
        """Metrics of the interval over all ranks; every rank must call it.

        A plain dict of numbers, ready for a tracker (``wandb.log(acc.metrics(reset=True))``). One
        all-reduce of 5 float64; the only place where training waits for the device.

        Args:
            reset: start a new interval.

        Returns:
            ``loss``: nats per token, sum of losses / number of tokens (NaN without tokens);
            ``perplexity``: ``exp(loss)``; ``n_tokens``: valid tokens; ``n_windows``: windows
            (optimizer steps, and those that ``on_empty="skip"`` left out).

        Raises:
            RuntimeError: a window is still open (an epoch's last, shorter window must be finished
                too); a count differed from the declared one; ranks are at different places;
                another rank found an error.
            ValueError: a label was out of range.

        Example:
            >>> acc = fusedce.LossAccumulator()
            >>> acc.add((torch.tensor(6.0), torch.tensor(4)))
            >>> acc.metrics()["loss"]
            1.5
        """
        self._refuse_open_window("read metrics")
        totals = torch.zeros(2, dtype=torch.float64) if self._totals is None else self._totals
        # The error of one rank travels with the sums: if it alone left, the others would wait.
        here = self._faults.count(totals.device).double()
        met = self._ranks.meet(_faults.METRICS, torch.cat([totals, here[None]]), self._faults)
        loss_sum, n_tokens, n_faults = met.tolist()
        self._faults.raise_first()
        if n_faults:
            raise RuntimeError(
                f"{int(n_faults)} other ranks found an error in this interval and name it there"
            )
        n_windows = self._n_windows
        if reset:
            self._totals, self._n_windows = None, 0
        loss = loss_sum / n_tokens if n_tokens else math.nan
        return {
            "loss": loss,
            "perplexity": math.exp(loss) if loss < 709 else math.inf if loss == loss else math.nan,
            "n_tokens": int(n_tokens),
            "n_windows": n_windows,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's totals and streaming estimate, as plain numbers. No collective.

        Raises:
            RuntimeError: a window is open. Its gradients live in ``.grad``, which no checkpoint
                holds: save between optimizer steps.
        """
        self._refuse_open_window("save the state (its gradients are in .grad, not in a checkpoint)")
        self._faults.raise_first()
        loss_sum, n_valid = (0.0, 0.0) if self._totals is None else self._totals.tolist()
        previous = self._previous_count
        return {
            "loss_sum": loss_sum,
            "n_valid": int(n_valid),
            "n_windows": self._n_windows,
            "previous_count": None if previous is None else int(previous),
            "rank": self._ranks.rank(),
            "ranks": self._ranks.size(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, with the same bits as without the interruption.

        Raises:
            RuntimeError: a window is open.
            ValueError: keys are missing, or the state is another rank's or of another number of
                ranks: totals are per rank, so each rank loads its own.
        """
        self._refuse_open_window("load a state")
        missing = set(_STATE) - set(state)
        if missing:
            raise ValueError(f"state must come from state_dict(), it lacks {sorted(missing)}")
        here = (self._ranks.rank(), self._ranks.size())
        if (state["rank"], state["ranks"]) != here:
            raise ValueError(
                f"state was saved by rank {state['rank']} of {state['ranks']}, this is rank "
                f"{here[0]} of {here[1]}: totals are per rank. Save and load each rank's own, or "
                f"start a new interval with metrics(reset=True) before saving."
            )
        self._totals = torch.tensor([state["loss_sum"], state["n_valid"]], dtype=torch.float64)
        self._n_windows = state["n_windows"]
        previous = state["previous_count"]
        self._previous_count = None if previous is None else torch.tensor(previous)

    def _refuse_open_window(self, action: str) -> None:
        if self._window is not None:
            self._window.refuse(action)

    def _close(self, window: Window) -> None:
        if window.totals is not None:
            before = self._totals
            self._totals = (
                window.totals
                if before is None
                else _faults.moved(before, window.totals.device) + window.totals
            )
        self._n_windows += 1
