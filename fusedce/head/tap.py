"""What the fused losses of a forward come to, for those who count tokens themselves."""

from __future__ import annotations

from torch import Tensor


class LossTap:
    """While it is entered, it sees every fused ``F.cross_entropy``.

    ``losses`` collects ``(loss_sum, n_valid, reduction)`` of all but those per token or with class
    weights, and those with ``reduction="mean"`` divide by ``denominator`` (in tokens) instead of
    their own count, where one is given.
    """

    current: LossTap | None = None

    def __init__(self, denominator: Tensor | None = None) -> None:
        self.denominator = denominator
        self.losses: list[tuple[Tensor, Tensor, str]] = []

    def __enter__(self) -> LossTap:
        if LossTap.current is not None:
            raise RuntimeError("a LossTap is entered already: they do not nest")
        LossTap.current = self
        return self

    def __exit__(self, *_: object) -> None:
        LossTap.current = None
