"""Observe the fused losses of a forward, for code that counts tokens itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from fusedce.contract.monitors import MonitoredLossSum
from fusedce.contract.results import LossSum


class LossObserver:
    """Collects, inside its ``with`` block, the sums of every fused ``F.cross_entropy``.

    Losses per token and losses with class weights are not collected.

    Args:
        denominator: ``()``, in tokens: losses with ``reduction="mean"`` divide by it instead of by
            their own count.
        monitor: names of the sums to compute beside each loss.

    Attributes:
        losses: ``(loss_sum, n_valid, reduction)`` of each loss, in order.
        results: what each ``F.cross_entropy`` has returned, with its graph; not in compiled code.
        monitors: the sums that ``monitor`` names, in the same order
            (:class:`fusedce.contract.monitors.MonitoredLossSum`).

    Raises:
        RuntimeError: another observer is entered already.
    """

    current: LossObserver | None = None

    def __init__(self, denominator: Tensor | None = None, *, monitor: Collection[str] = ()) -> None:
        self.denominator, self.monitor = denominator, monitor
        self.monitors: list[Mapping[str, Tensor]] = []
        self.losses: list[tuple[Tensor, Tensor, str]] = []
        self.results: list[Tensor] = []

    def observe(self, out: LossSum, reduction: str) -> None:
        """Collect one loss."""
        self.losses.append((out.loss_sum.detach(), out.n_valid, reduction))
        if isinstance(out, MonitoredLossSum):
            self.monitors.append(out.monitors)

    def __enter__(self) -> LossObserver:
        if LossObserver.current is not None:
            raise RuntimeError(
                "a LossObserver is entered already: observers do not nest, leave its block first"
            )
        LossObserver.current = self
        return self

    def __exit__(self, *_: object) -> None:
        LossObserver.current = None
