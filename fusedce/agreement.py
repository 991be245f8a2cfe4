"""The one exchange by which ranks agree: settings that must be equal, numbers, and "I failed".

Each rank of a group sends one row, and all of them read the same table of rows. Whatever could end
differently on different ranks is decided from that table, so each of them decides alike.

A row holds a text, which must be the same on all ranks (settings by name, as JSON), and numbers of
this rank. The text of a rank that has failed on its way holds its error instead, and its numbers
are zeros: it keeps step with the others, who learn why.
"""

from __future__ import annotations

import builtins
import json
import struct
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

TEXT = 84  # int64 of a row that hold its text, 8 bytes each
_RAISED_AS_THEY_ARE = ("RuntimeError", "TypeError", "ValueError")
# torch 2.13 gave this one a new name
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Table(NamedTuple):
    """The rows that all ranks have sent, ``(ranks, TEXT + n)`` int64, equal on all of them."""

    rows: Tensor

    def numbers(self) -> Tensor:
        """``(ranks, n)`` int64."""
        return self.rows[:, TEXT:]

    def is_error(self) -> Tensor:
        """``()`` bool on the rows' device: somebody has failed, or settings differ."""
        return (self.rows[:, :TEXT] != self.rows[:1, :TEXT]).any()

    def read(self) -> list[Told]:
        """Copy the rows of all ranks to the host; waits for them."""
        return [_decoded(row) for row in self.rows.tolist()]


class Told(NamedTuple):
    """The row of one rank: ``settings`` or the text of an ``error``, and ``numbers``."""

    settings: dict[str, Any]
    error: str  # "KeyError: 'labels' (on rank 3)", with the rank among all processes
    numbers: list[int]


def row(settings: Mapping[str, object] | str, numbers: Tensor) -> Tensor:
    """``(TEXT + n,)`` int64 on the device of ``numbers (n,)`` int64, without waiting for it.

    Args:
        settings: what must be equal on all ranks, or an error's words (:func:`words_of`).
    """
    data = json.dumps(settings).encode()
    while len(data) > 8 * TEXT and isinstance(settings, str):
        settings = settings[: len(settings) * 3 // 4]
        data = json.dumps(settings).encode()
    told = torch.tensor(struct.unpack(f"{TEXT}q", data.ljust(8 * TEXT)))
    return torch.cat([told.to(numbers.device, non_blocking=True), numbers])


def send(row: Tensor, group: dist.ProcessGroup) -> tuple[Table, dist.Work]:
    """Start one all-gather of ``row (n,)`` int64; the table is there after ``work.wait()``."""
    rows = row.new_empty(dist.get_world_size(group), len(row))
    return Table(rows), getattr(dist, ALL_GATHER)(rows.view(-1), row, group=group, async_op=True)


def words_of(error: BaseException) -> str:
    """Describe an error to other ranks: its kind, where it was raised, its text."""
    text = f"{type(error).__name__}: {error}"
    return f"{text[:400]} (on rank {dist.get_rank()})"


def failure_of(told: Iterable[Told]) -> Exception | None:
    """The error of the first rank that has failed, in its words; others' are notes (Python 3.11).

    The three kinds that argument checks raise stay what they are, others become RuntimeError.
    """
    failed = [one.error for one in told if one.error]
    if not failed:
        return None
    name, _, text = failed[0].partition(": ")
    kept = name in _RAISED_AS_THEY_ARE
    error: Exception = getattr(builtins, name)(text) if kept else RuntimeError(failed[0])
    add_notes(error, failed[1:])
    return error


def add_notes(error: BaseException, words: Iterable[str]) -> None:
    """Tell of other ranks' errors below an error's traceback, where Python can (3.11)."""
    for other in words:
        getattr(error, "add_note", str)(f"another rank has failed, too: {other}")


def differing(told: list[Told]) -> tuple[str, list[Any]] | None:
    """The first setting in which ranks differ, and what each of them has said."""
    for name in told[0].settings if told else ():
        said = [one.settings.get(name) for one in told]
        if len({json.dumps(x) for x in said}) > 1:
            return name, said
    return None


def _decoded(row: list[int]) -> Told:
    text = json.loads(struct.pack(f"{TEXT}q", *row[:TEXT]))
    failed = isinstance(text, str)
    return Told({} if failed else text, text if failed else "", row[TEXT:])


# ---- groups -------------------------------------------------------------------------------------


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device that rows of ``group`` are sent from: its accelerator, if that has a backend.

    So it is the same on all ranks, wherever the numbers of each of them lie.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or _backend(group, accelerator.type) in (None, "gloo"):
        return device
    return accelerator


_OWN: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a group of the same ranks for exchanges while ``group`` still reduces gradients.

    Under gloo another group of the same ranks: a rank that has left a window early would meet
    another one in the middle of an all-reduce of gradients there, and gloo ends the process of
    both. It is made by the first who asks, a collective of its ranks.
    """
    cpu = torch.device("cpu")
    if device_for(group, cpu) != cpu or _backend(group, "cpu") != "gloo":
        return group
    if group not in _OWN:
        members = dist.get_process_group_ranks(group)
        _OWN[group] = dist.new_group(
            members,
            backend="gloo",
            timeout=timeout_for(group),
            use_local_synchronization=len(members) < dist.get_world_size(),
        )
    return _OWN[group]


def timeout_for(group: dist.ProcessGroup) -> timedelta | None:
    """Timeout for a group beside ``group``: its own, or that of ``init_process_group`` if less.

    Torch gives the groups of a ``DeviceMesh`` its own default, whatever the user has set.
    """
    found = [x for x in map(timeout_of, (group, dist.group.WORLD)) if x is not None]
    return min(found, default=None)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """The group's timeout, where its backend tells it."""
    if group is None:
        return None
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def _backend(group: dist.ProcessGroup, device: str) -> str | None:
    """Name of the backend for a type of device: "gloo" of "cpu:gloo,cuda:nccl"."""
    return dict(x.split(":", 1) for x in dist.get_backend_config(group).split(",")).get(device)
