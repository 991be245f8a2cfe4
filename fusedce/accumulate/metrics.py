"""What windows and evaluation have added up to: read as metrics, saved and loaded."""

from __future__ import annotations

from typing import Any

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.ranks import METRICS
from fusedce.accumulate.steps import Steps
from fusedce.accumulate.totals import ONLY, Sums, add, names_of, stacked, sums_of
from fusedce.contract.monitors import MonitoredLossSum


class Metrics:
    """The totals of ``steps``, and what this rank has evaluated and not summed over ranks yet."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._evaluated: Sums = {}
        self._faults = steps.new_faults()

    def add(self, out: MonitoredLossSum) -> None:
        if self._steps.totals.n_windows:
            raise RuntimeError(
                f"add: the metrics hold {self._steps.totals.n_windows} training windows since the "
                f"last reset, and would mix training with evaluation. Call metrics(reset=True) "
                f"first, or evaluate with a LossAccumulator of its own"
            )
        self._steps.evaluated = True
        self._faults.note(_faults.bad_label, out.n_valid < 0, out.n_valid)
        self._evaluated = add(self._evaluated, sums_of(ONLY, out))

    def read(self, reset: bool) -> dict[str, float]:
        steps = self._steps
        if self._evaluated or not steps.has_trained:
            self._sum_over_ranks()
        else:
            steps.refuse_open_window("read metrics")
        steps.raise_noted()
        found = steps.totals.metrics()
        if reset:
            steps.totals.reset()
            steps.evaluated = False
        return found

    def state(self) -> dict[str, Any]:
        steps = self._steps
        steps.refuse_open_window("save the state (its gradients are in .grad, in no checkpoint)")
        if self._evaluated:
            if steps.meeting.ranks.size() > 1:
                raise RuntimeError(
                    "cannot save the state: batches were added on this rank that are not summed "
                    "over ranks yet. Call metrics() on all ranks first"
                )
            self._sum_over_ranks()
        steps.raise_noted()
        return steps.totals.state()

    def load(self, state: Any) -> None:
        self._steps.load(state)
        self._evaluated, self._faults = {}, self._steps.new_faults()

    def _sum_over_ranks(self) -> None:
        """Add what each rank has evaluated to the totals: one all-reduce."""
        steps, faults = self._steps, self._faults
        self._faults = steps.new_faults()
        with steps.meeting.on_the_way(METRICS):
            steps.refuse_open_window("read metrics")
        names = names_of([ONLY])
        sums = stacked(self._evaluated, names)
        sent = steps.meeting.send(METRICS, sums, steps.equal(), faults=faults)
        steps.totals.add(names, sent.wait())
        steps.keep(faults)
        self._evaluated = {}
