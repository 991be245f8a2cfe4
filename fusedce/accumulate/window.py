"""The micro-batches of one optimizer step on this rank, and what they must agree with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults


@dataclass
class Window:
    """An open window: its denominator is known (declared counts), or an estimate (streaming)."""

    denominator: Tensor  # () float64, tokens of all ranks
    declared: list[Tensor] | None  # () int64 each; None when streaming
    seen: int = 0
    totals: Tensor | None = None  # (2,) float64: loss_sum, n_valid of this rank
    auxiliary: list[Tensor] = field(default_factory=list)  # waiting for the next loss

    def take(self, loss_sum: Tensor, n_valid: Tensor, faults: _faults.DeviceFaults) -> None:
        """Count one micro-batch, and hold it against what was declared."""
        if self.declared is not None:
            if self.seen == len(self.declared):
                raise RuntimeError(
                    f"window: {len(self.declared)} micro-batches were declared, "
                    f"this is number {self.seen + 1}"
                )
            expected = _faults.moved(self.declared[self.seen], n_valid.device)
            faults.note(_faults.count_differs, expected != n_valid, self.seen, expected, n_valid)
        self.seen += 1
        self.totals = add_totals(self.totals, loss_sum, n_valid)

    def take_auxiliary(self) -> Tensor | None:
        """The sum of what waits, divided by the number of micro-batches."""
        if not self.auxiliary:
            return None
        assert self.declared is not None
        total = torch.stack(self.auxiliary).sum() / len(self.declared)
        self.auxiliary = []
        return total

    def check_complete(self) -> None:
        """Raise unless as many micro-batches were seen as declared, and all losses were used."""
        if self.declared is not None and self.seen != len(self.declared):
            raise RuntimeError(
                f"window: {len(self.declared)} micro-batches were declared, {self.seen} were "
                f"seen: the gradients are divided by tokens that never came"
            )
        if self.auxiliary:
            raise RuntimeError(
                f"{len(self.auxiliary)} auxiliary losses were added after the last micro-batch: "
                f"call add_auxiliary before the backward it belongs to"
            )

    def refuse(self, action: str) -> None:
        """Raise: ``action`` needs a border between windows."""
        if self.declared is None:
            raise RuntimeError(
                f"cannot {action}: {self.seen} micro-batches since the last finish() are still "
                f"open. Call finish(model.parameters()) for them, an epoch's last, shorter window "
                f"included (or zero_grad and discard_window() to drop them)."
            )
        raise RuntimeError(
            f"cannot {action} inside a window: {self.seen} of {len(self.declared)} declared "
            f"micro-batches were seen; leave the `with` block first."
        )


def as_counts(counts: Iterable[Tensor | int]) -> list[Tensor]:
    """Declared counts as ``()`` int64 tensors.

    Raises:
        TypeError, ValueError: not iterable, not whole numbers, or negative (values in device
            tensors are not looked at).
    """
    if isinstance(counts, (int, float)) or (isinstance(counts, Tensor) and counts.dim() == 0):
        raise TypeError(
            f"counts must hold one number per micro-batch, e.g. [count_valid(b) for b in "
            f"micro_batches], got {describe(counts)}"
        )
    return [_as_count(i, count) for i, count in enumerate(counts)]


def _as_count(i: int, count: Tensor | int) -> Tensor:
    if isinstance(count, Tensor):
        if count.is_floating_point() or count.dtype == torch.bool or count.numel() != 1:
            raise TypeError(f"counts[{i}] must be one integer, got {describe(count)}")
        count = count.detach().reshape(()).long()
    elif isinstance(count, int) and not isinstance(count, bool):
        count = torch.tensor(count)
    else:
        raise TypeError(f"counts[{i}] must be an int or a tensor, got {describe(count)}")
    if _faults.readable(count.device) and count < 0:
        raise ValueError(f"counts[{i}] must be >= 0, got {int(count)}")
    return count


def unpack(out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """``loss_sum ()`` and ``n_valid ()`` int64 of what :func:`fused_ce` returned.

    Raises:
        TypeError: it is something else.
    """
    if (
        not isinstance(out, tuple)
        or len(out) != 2
        or not all(isinstance(x, Tensor) and x.numel() == 1 for x in out)
        or not out[0].is_floating_point()
        or out[1].is_floating_point()
    ):
        raise TypeError(
            f"out must be (loss_sum, n_valid) as fused_ce returns it: a floating and an integer "
            f"scalar tensor, got {describe(out)}"
        )
    return out[0].reshape(()), out[1].detach().reshape(()).long()


def add_totals(totals: Tensor | None, loss_sum: Tensor, n_valid: Tensor) -> Tensor:
    """``totals (2,)`` float64 with a batch added, on the batch's device."""
    new = torch.stack([loss_sum.detach().double(), n_valid.clamp(min=0).double()])
    return new if totals is None else _faults.moved(totals, new.device) + new


def describe(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and {x.dtype}"
    if isinstance(x, tuple):
        return "(" + ", ".join(describe(y) for y in x) + ")"
    return type(x).__name__
