"""Errors that are found in tensors while a window runs, and raised where all ranks meet.

In a single process on a CPU they are raised at once. On a device, that would wait for it; on
several ranks, the others would wait for the one that left. There the first one is kept in a small
tensor, which the next meeting carries to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedce.contract.labels import bad_label_message


def bad_label(code: int) -> Exception:
    return ValueError(bad_label_message(code))


def count_differs(micro_batch: int, declared: int, seen: int) -> Exception:
    if seen > declared:
        reason = (
            "Does the loss get labels without shift_labels(labels), which drops the first of "
            "every sequence, or with another ignore_index?"
        )
    else:
        reason = "Were the labels counted before the shift, or with another ignore_index?"
    return RuntimeError(
        f"window: micro-batch {micro_batch} was declared with {declared} valid tokens, its loss "
        f"counts {seen}. {reason}"
    )


def too_many(declared: int) -> Exception:
    return RuntimeError(
        f"window: {declared} micro-batches were declared, this is number {declared + 1}"
    )


_KINDS: tuple[Callable[..., Exception], ...] = (bad_label, count_differs, too_many)
_NUMBERS = 4  # a kind and at most three numbers
_SHIFTS = (48, 32, 16, 0)
ROW = 1 + 2 * 4 * _NUMBERS  # in a message: a flag, quarters of the numbers, and their squares


class Faults:
    """The first error seen in tensors.

    Args:
        at_once: whether one found on a CPU may be raised where it is found.
    """

    def __init__(self, at_once: bool) -> None:
        self._at_once = at_once
        self._first: Tensor | None = None  # (4,) int64: 1 + index in _KINDS or 0, its numbers

    def note(
        self, kind: Callable[..., Exception], condition: Tensor, *numbers: Tensor | int
    ) -> None:
        """Raise ``kind(*numbers)`` where ``condition ()`` holds: now if that may be, else later."""
        device = condition.device
        if self._at_once and readable(device):
            if condition:
                raise kind(*(int(x) for x in numbers))
            return
        padded = (1 + _KINDS.index(kind), *numbers, *[0] * (_NUMBERS - 1 - len(numbers)))
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
        """Take over what another one noted, unless there is one already."""
        if other._first is not None:
            self._keep(other._first)

    def _keep(self, fault: Tensor) -> None:
        old = self._first
        if old is not None:
            old = moved(old, fault.device)
            fault = torch.where(old[0] == 0, fault, old)
        self._first = fault

    def row(self, device: torch.device) -> Tensor:
        """``(ROW,)`` float64 on ``device``, exact, and so that the rows of ranks can be added."""
        if self._first is None:
            return torch.zeros(ROW, dtype=torch.float64, device=device)
        first = moved(self._first, device)
        quarters = torch.stack([(first >> shift) & 0xFFFF for shift in _SHIFTS], dim=1).reshape(-1)
        return torch.cat([(first[:1] != 0).long(), quarters, quarters * quarters]).double()

    def raise_first(self) -> None:
        """Raise what was noted, and forget it. Waits for the device."""
        if self._first is None:
            return
        numbers = self._first.tolist()
        self._first = None
        if numbers[0]:
            raise _error(numbers)


def of_row(row: Sequence[float]) -> Exception | None:
    """The error in the sum of the ranks' rows; ``None`` if there is none."""
    failed, *quarters = (int(x) for x in row)
    if not failed:
        return None
    sums, squares = quarters[: len(quarters) // 2], quarters[len(quarters) // 2 :]
    if any(failed * y != x * x for x, y in zip(sums, squares, strict=True)):
        return RuntimeError(f"{failed} ranks found errors in their losses, different ones")
    numbers = []
    for i in range(0, len(sums), len(_SHIFTS)):
        one = sum(x // failed << shift for x, shift in zip(sums[i:], _SHIFTS, strict=False))
        numbers.append(one - (1 << 64) if one >> 63 else one)
    return _error(numbers)


def _error(numbers: Sequence[int]) -> Exception:
    fault = _KINDS[numbers[0] - 1]
    return fault(*numbers[1 : 1 + fault.__code__.co_argcount])


def moved(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``. From the host without waiting for what is queued there already."""
    return x.to(device, non_blocking=x.device.type == "cpu")


def readable(device: torch.device) -> bool:
    """Whether a value there can be looked at without waiting."""
    return device.type == "cpu"
