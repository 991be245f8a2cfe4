"""Errors that are found in device tensors, reported without waiting for the device.

On a CPU they are raised at once. Elsewhere the first one is kept in a small device tensor, and
raised when something is read from the device anyway.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedce.contract.labels import bad_label_message


def bad_label(code: int) -> Exception:
    return ValueError(bad_label_message(code))


def count_differs(micro_batch: int, declared: int, seen: int) -> Exception:
    return RuntimeError(
        f"window: micro-batch {micro_batch} was declared with {declared} valid tokens, its loss "
        f"counts {seen}. Were the labels counted before the shift, or with another ignore_index?"
    )


def ranks_differ(here: int, together: int, ranks: int) -> Exception:
    return RuntimeError(
        f"ranks have different numbers of micro-batches in this window: {here} here, {together} "
        f"on {ranks} ranks together. Each rank needs the same number; empty ones may be all "
        f"ignored."
    )


# What ranks meet for: a position in this tuple is what they tell each other.
WINDOW, ESTIMATE, FINISH, METRICS = MEETINGS = (
    "open a window",
    "start streaming",
    "finish a window",
    "read metrics",
)


def ranks_elsewhere(meeting: int) -> Exception:
    return RuntimeError(
        f"this rank wants to {MEETINGS[meeting]}, another one to do something else: each rank "
        f"needs the same windows and the same calls of metrics(). Did one run out of data?"
    )


_KINDS: tuple[Callable[..., Exception], ...] = (
    bad_label,
    count_differs,
    ranks_differ,
    ranks_elsewhere,
)
_MOST_NUMBERS = 3


class DeviceFaults:
    """The first error seen in device tensors."""

    def __init__(self) -> None:
        self._first: Tensor | None = None  # (4,) int64: 1 + index in _KINDS or 0, its numbers

    def note(
        self, kind: Callable[..., Exception], condition: Tensor, *numbers: Tensor | int
    ) -> None:
        """Raise ``kind(*numbers)`` where ``condition ()`` holds: now on a CPU, else later."""
        device = condition.device
        if readable(device):
            if condition:
                raise kind(*(int(x) for x in numbers))
            return
        padded = (1 + _KINDS.index(kind), *numbers, *[0] * (_MOST_NUMBERS - len(numbers)))
        fault = torch.stack(
            [
                moved(x, device).long()
                if isinstance(x, Tensor)
                else torch.full((), x, dtype=torch.int64, device=device)
                for x in padded
            ]
        )
        old = torch.zeros_like(fault) if self._first is None else moved(self._first, device)
        self._first = torch.where((old[0] == 0) & condition, fault, old)

    def count(self, device: torch.device) -> Tensor:
        """``()`` int64 on ``device``: 1 if an error was noted. Does not wait."""
        if self._first is None:
            return torch.zeros((), dtype=torch.int64, device=device)
        return (self._first[0] != 0).long().to(device)

    def raise_first(self) -> None:
        """Raise what was noted, and forget it. Waits for the device."""
        if self._first is None:
            return
        kind, *numbers = self._first.tolist()
        self._first = None
        if kind:
            fault = _KINDS[kind - 1]
            raise fault(*numbers[: fault.__code__.co_argcount])


def moved(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``. From the host without waiting for what is queued there already."""
    return x.to(device, non_blocking=x.device.type == "cpu")


def readable(device: torch.device) -> bool:
    """Whether a value there can be looked at without waiting."""
    return device.type == "cpu"
