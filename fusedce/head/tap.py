"""What the fused losses of a forward come to, for those who count tokens themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from fusedce.contract.monitors import MonitoredLossSum
from fusedce.contract.results import LossSum


class LossTap:
    """While it is entered, it sees every fused ``F.cross_entropy``.

    ``losses`` collects ``(loss_sum, n_valid, reduction)`` of all but those per token or with class
    weights, and those with ``reduction="mean"`` divide by ``denominator`` (in tokens) instead of
    their own count, where one is given. ``monitors`` collects what ``monitor`` asks of each
    (:class:`fusedce.contract.monitors.MonitoredLossSum`), in the same order.
    """

    current: LossTap | None = None

    def __init__(self, denominator: Tensor | None = None, *, monitor: Collection[str] = ()) -> None:
        self.denominator, self.monitor = denominator, monitor
        self.monitors: list[Mapping[str, Tensor]] = []
        self.losses: list[tuple[Tensor, Tensor, str]] = []

    def see(self, out: LossSum, reduction: str) -> None:
        self.losses.append((out.loss_sum.detach(), out.n_valid, reduction))
        if isinstance(out, MonitoredLossSum):
            self.monitors.append(out.monitors)

    def __enter__(self) -> LossTap:
        if LossTap.current is not None:
            raise RuntimeError("a LossTap is entered already: they do not nest")
        LossTap.current = self
        return self

    def __exit__(self, *_: object) -> None:
        LossTap.current = None
