"""Errors found in tensors while a window runs, kept until raising them is safe.

In a single process on a CPU they are raised at once. On a device this would wait for the device,
and on several ranks the others would wait for the rank that left. In these cases the first error is
kept in a small tensor, and the next exchange carries it to all ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedce.contract.labels import bad_label_message


def bad_label(code: int) -> Exception:
    """A label out of range, described by a negative count."""
    return ValueError(bad_label_message(code))


_TWICE = (
    "Or was a loss differentiated twice (retain_graph=True)? It counts twice, the second time as "
    "the next micro-batch"
)


def count_differs(micro_batch: int, declared: int, counted: int) -> Exception:
    """A loss that has counted other tokens than were declared."""
    if counted > declared:
        reason = (
            "Does the loss get labels without shift_labels(labels), which drops the first of "
            "every sequence, or with another ignore_index?"
        )
    else:
        reason = "Were the labels counted before the shift, or with another ignore_index?"
    return RuntimeError(
        f"window: micro-batch {micro_batch} was declared with {declared} valid tokens, its loss "
        f"counts {counted}. {reason} {_TWICE}"
    )


def too_many(declared: int) -> Exception:
    """A micro-batch beyond the declared number."""
    return RuntimeError(
        f"window: {declared} micro-batches were declared, this is number {declared + 1}. {_TWICE}"
    )


def multiplied(bits: int) -> Exception:
    """An unexpected factor on a loss; ``bits`` are those of the factor as a float64."""
    (factor,) = struct.unpack("d", struct.pack("q", bits))
    return RuntimeError(
        f"the loss was multiplied by {factor:g} after scale(): the window has divided it "
        f"by all of its tokens already, so leave other divisions out (by the number of "
        f"micro-batches, of ranks), or name a constant that the engine divides by as "
        f"backward_divisor= (accelerate: LossAccumulator.from_accelerator)"
    )


def gradients_gone() -> Exception:
    """Gradients that were set to ``None`` or zero inside a window."""
    return RuntimeError(
        "zero_grad() was called inside a window: the gradients of its earlier micro-batches are "
        "gone, though their tokens count. Call it once a window, after optimizer.step() (to drop "
        "the window, call discard_window() as well, or leave the `with` block by raising)"
    )


_KINDS: tuple[Callable[..., Exception], ...] = (
    bad_label,
    count_differs,
    too_many,
    multiplied,
    gradients_gone,
)
ROW = 4  # int64 values of an error in a message: 1 + index in _KINDS (or 0), then its numbers


class Faults:
    """Holds the first error that was found in tensors.

    Args:
        at_once: raise an error found on a CPU where it is found.
    """

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self._first: Tensor | None = None  # (ROW,) int64

    def note(
        self, kind: Callable[..., Exception], condition: Tensor, *numbers: Tensor | int
    ) -> None:
        """Raise ``kind(*numbers)`` if ``condition ()`` holds: now where allowed, else later."""
        device = condition.device
        if self._at_once and readable(device):
            if condition:
                raise kind(*(int(x) for x in numbers))
            return
        padded = (1 + _KINDS.index(kind), *numbers, *[0] * (ROW - 1 - len(numbers)))
        fault = torch.stack(
            [
                moved(x, device).long()
                if isinstance(x, Tensor)
                else torch.full((), x, dtype=torch.int64, device=device)
                for x in padded
            ]
        )
        self._keep(torch.where(condition, fault, 0))

    def absorb(self, other: Faults) -> None:
        """Take over the error of ``other``, unless this object holds one already."""
        if other._first is not None:
            self._keep(other._first)

    def _keep(self, fault: Tensor) -> None:
        """Keep ``fault (ROW,)`` int64 unless an earlier error is kept."""
        old = self._first
        if old is not None:
            old = moved(old, fault.device)
            fault = torch.where(old[0] == 0, fault, old)
        self._first = fault

    def row(self, device: torch.device) -> Tensor:
        """The error as ``(ROW,)`` int64 on ``device``; zeros if there is none."""
        if self._first is None:
            return torch.zeros(ROW, dtype=torch.int64, device=device)
        return moved(self._first, device)

    def raise_first(self) -> None:
        """Raise the error that was noted, and forget it. Waits for the device."""
        if self._first is None:
            return
        numbers = self._first.tolist()
        self._first = None
        if (error := of_row(numbers)) is not None:
            raise error


def of_row(row: Sequence[int]) -> Exception | None:
    """The error that a row describes; ``None`` if there is none."""
    if not row[0]:
        return None
    fault = _KINDS[row[0] - 1]
    return fault(*row[1 : 1 + fault.__code__.co_argcount])


def moved(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; a copy from the host does not wait for work queued on the device."""
    return x.to(device, non_blocking=x.device.type == "cpu")


def readable(device: torch.device) -> bool:
    """Whether a value on ``device`` can be read without waiting."""
    return device.type == "cpu"
