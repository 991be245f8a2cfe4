"""Windows whose count becomes known at their end, and what ranks agree on at a window's border."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.ranks import Ranks
from fusedce.accumulate.totals import Interval
from fusedce.contract.rounding import scale_

_UNKNOWN = 1024  # tokens: the estimate where the first micro-batches hold none


class Streaming(Interval):
    """Gradients are divided by an estimate while they come, and corrected once."""

    def __init__(self, ranks: Ranks, on_empty: Literal["zero", "skip", "raise"]) -> None:
        super().__init__(ranks)
        self._on_empty = on_empty
        self._should_step = True

    def finish(self, parameters: Iterable[Tensor]) -> bool:
        """Close a streaming window: correct every ``.grad`` once, in place, before clipping.

        Args:
            parameters: all parameters that received gradients, e.g. ``model.parameters()``. Shards
                (DTensor) are scaled locally; a parameter given twice is scaled once.

        Returns:
            :attr:`should_step`.

        Raises:
            RuntimeError: no micro-batch since the last window; no parameter has a gradient; ranks
                saw different numbers of micro-batches; ``on_empty="raise"`` and nothing was valid.
        """
        window = self._window
        if window is not None and window.declared is not None:
            raise RuntimeError(
                "finish is for streaming; a window with declared counts needs no correction"
            )
        if isinstance(parameters, (torch.nn.Module, Tensor)):
            raise TypeError(
                f"parameters must be an iterable of tensors, such as model.parameters(), got "
                f"{type(parameters).__name__}"
            )
        trained = list({id(p): p for p in parameters if p.grad is not None}.values())
        if window is None or window.totals is None:
            # The others may have seen some: they must not wait for this rank.
            self._reduce_counts(_faults.FINISH, torch.zeros((), dtype=torch.int64), 0)
            raise RuntimeError("finish: no micro-batch since the last window: nothing to finish")
        total = self._reduce_counts(_faults.FINISH, window.totals[1], window.seen)
        if not trained:
            raise RuntimeError(
                "finish: no parameter given has a .grad to correct (was the generator used up, or "
                "zero_grad called before finish?)"
            )
        self._window = None
        self._decide_step(total)
        correction = (_faults.moved(window.denominator, total.device) / total.clamp(min=1)).float()
        for p in trained:
            if self._should_step:
                scale_(_local(p.grad), correction)
            else:
                p.grad = None
        previous = self._previous_count
        if previous is None:
            previous = torch.tensor(_UNKNOWN)
        previous = _faults.moved(previous, total.device)
        self._previous_count = torch.where(total > 0, total, previous)
        self._close(window)
        return self._should_step

    @property
    def should_step(self) -> bool:
        """False after a window without any valid token under ``on_empty="skip"``, else True."""
        return self._should_step

    def discard_window(self) -> None:
        """Forget the micro-batches of an open streaming window; call ``zero_grad`` as well."""
        if self._window is not None and self._window.declared is not None:
            raise RuntimeError("discard_window is for streaming: leave the `with` block instead")
        self._window = None

    def _estimate(self, n_valid: Tensor) -> Tensor:
        """A streaming denominator all ranks agree on: only the first one costs a collective."""
        if self._previous_count is not None:
            return self._previous_count.double()
        n = n_valid.clamp(min=0)
        met = self._ranks.meet(_faults.ESTIMATE, torch.stack([n, 0 * n, 0 * n]), self._faults)
        return torch.where(met[0] > 0, met[0], float(_UNKNOWN))

    def _reduce_counts(self, what: str, local: Tensor, micro_batches: int) -> Tensor:
        """Valid tokens of all ranks; notes ranks with different numbers of micro-batches."""
        m = torch.full_like(local, micro_batches)
        met = self._ranks.meet(what, torch.stack([local, m, m * m]), self._faults)
        total, sum_m, sum_m2 = met.long().unbind()
        ranks = self._ranks.size()
        # The numbers are equal exactly where their variance is zero.
        differ = ranks * sum_m2 != sum_m * sum_m
        self._faults.note(_faults.ranks_differ, differ, micro_batches, sum_m, ranks)
        return total

    def _decide_step(self, total: Tensor) -> None:
        self._should_step = True
        if self._on_empty == "zero" or int(total) > 0:
            return
        if self._on_empty == "raise":
            raise RuntimeError(
                "no valid token in this window on any rank (on_empty='raise'): "
                "every label is ignore_index"
            )
        self._should_step = False


def _local(grad: Any) -> Tensor:
    """The shard of a DTensor that lies here; other gradients as they are."""
    return grad.to_local() if hasattr(grad, "to_local") else grad
