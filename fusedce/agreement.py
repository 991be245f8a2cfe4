"""The all-gather by which ranks compare settings, share numbers and report failures.

Each rank of a group sends one row, and all of them read the same table of rows. Decisions that
could differ between ranks are made from that table alone, so they are the same everywhere.

A row holds a text, which must be the same on all ranks (settings by name, as JSON), and numbers of
this rank. A rank that has failed sends its error as the text and zeros as the numbers: so the
others do not wait for it in vain, and can raise its error.
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
GUARDS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Guards of accumulators. While there is one, a sharded loss compares the ranks' hidden states."""
SHARE_TOKENS: set[tuple[int, ...]] = set()
"""Ranks that are known to hold the same tokens: those of a sharded vocabulary."""
_KEPT_KINDS = ("RuntimeError", "TypeError", "ValueError")
# torch 2.13 gave this one a new name
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class Table(NamedTuple):
    """The rows that all ranks have sent, ``(ranks, TEXT + n)`` int64, equal on all of them."""

    rows: Tensor

    def numbers(self) -> Tensor:
        """The numbers of all ranks, ``(ranks, n)`` int64."""
        return self.rows[:, TEXT:]

    def is_error(self) -> Tensor:
        """Whether a rank has failed, or settings differ: ``()`` bool on the rows' device."""
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
        settings: what must be equal on all ranks, or an error's words (:func:`words_of`), which
            are cut to fit.

    Raises:
        ValueError: the settings are longer than a row's text.
    """
    data = json.dumps(settings, separators=(",", ":")).encode()
    while len(data) > 8 * TEXT and isinstance(settings, str):
        settings = settings[: len(settings) * 3 // 4]
        data = json.dumps(settings).encode()
    if len(data) > 8 * TEXT and not isinstance(settings, str):
        name = max(settings, key=lambda x: len(json.dumps(settings[x])))
        raise ValueError(
            f"settings that ranks compare must fit {8 * TEXT} bytes, these settings need "
            f"{len(data)}: pass a shorter {name}, now {json.dumps(settings[name])[:40]}..."
        )
    told = torch.tensor(struct.unpack(f"{TEXT}q", data.ljust(8 * TEXT)), device="cpu")
    return torch.cat([told.to(numbers.device, non_blocking=True), numbers])


def send(row: Tensor, group: dist.ProcessGroup) -> tuple[Table, dist.Work]:
    """Start one all-gather of ``row (n,)`` int64; the table is complete after ``work.wait()``."""
    rows = row.new_empty(dist.get_world_size(group), len(row))
    return Table(rows), getattr(dist, ALL_GATHER)(rows.view(-1), row, group=group, async_op=True)


def words_of(error: BaseException) -> str:
    """Describe an error to other ranks: its kind, where it was raised, its text."""
    text = f"{type(error).__name__}: {error}"
    return f"{text[:400]} (on rank {dist.get_rank()})"


def failure_of(told: Iterable[Told]) -> Exception | None:
    """The error of the first rank that has failed; those of others are its notes (Python 3.11).

    The kinds of :data:`_KEPT_KINDS`, which argument checks raise, are kept. Others become
    ``RuntimeError``. The result is ``None`` if no rank has failed.
    """
    failed = [one.error for one in told if one.error]
    if not failed:
        return None
    name, _, text = failed[0].partition(": ")
    kept = name in _KEPT_KINDS
    error: Exception = getattr(builtins, name)(text) if kept else RuntimeError(failed[0])
    add_notes(error, failed[1:])
    return error


def add_notes(error: BaseException, words: Iterable[str]) -> None:
    """Add the errors of other ranks to ``error`` as notes, from Python 3.11 on."""
    for other in words:
        getattr(error, "add_note", str)(f"another rank has failed, too: {other}")


def differing(told: list[Told]) -> tuple[str, list[Any]] | None:
    """The first setting in which ranks differ, and its value on each of them, else ``None``."""
    for name in dict.fromkeys(name for one in told for name in one.settings):
        values = [one.settings.get(name) for one in told]
        if len({json.dumps(x) for x in values}) > 1:
            return name, values
    return None


def _decoded(row: list[int]) -> Told:
    """Read the row that :func:`row` has made."""
    text = json.loads(struct.pack(f"{TEXT}q", *row[:TEXT]))
    failed = isinstance(text, str)
    return Told({} if failed else text, text if failed else "", row[TEXT:])


# ---- groups -------------------------------------------------------------------------------------


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device that rows of ``group`` are sent from: the accelerator, if it has a backend there.

    It must be the same on all ranks, wherever the numbers of each of them lie.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or _backend(group, accelerator.type) in (None, "gloo"):
        return device
    return accelerator


_OWN: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for exchanges while ``group`` still reduces gradients.

    Under gloo it is a new group, made at the first call, which is a collective of its ranks. In
    ``group`` itself, a rank that has left a window early would send its row while another one is
    in an all-reduce of gradients, and gloo would abort both processes. Other backends use
    ``group``.
    """
    if _is_to_be_made(group):
        members = dist.get_process_group_ranks(group)
        _OWN[group] = dist.new_group(
            members,
            backend="gloo",
            timeout=timeout_for(group),
            use_local_synchronization=len(members) < dist.get_world_size(),
        )
    return _OWN.get(group, group)


_ATTEMPTS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def meet(group: dist.ProcessGroup) -> Exception | None:
    """Wait until all ranks have come, before :func:`own_group` makes a group with all of them.

    They tell it in the store: making the group would wait for a rank that has failed before.

    Returns:
        The error if a rank has failed (:func:`has_failed_before_meeting`); all return the same.
    """
    if not _is_to_be_made(group):
        return None
    keys = _tell(group, "")
    store = dist.distributed_c10d._get_default_store()
    timeout = timeout_for(group)
    store.wait(keys, *([] if timeout is None else [timeout]))
    told = [Told({}, store.get(key).decode()[1:], []) for key in keys]
    return failure_of(told)


def has_failed_before_meeting(group: dist.ProcessGroup, words: str) -> bool:
    """Tell the other ranks an error in the store, if the group of :func:`own_group` is not made."""
    if to_be_made := _is_to_be_made(group):
        _tell(group, words)
    return to_be_made


def _tell(group: dist.ProcessGroup, words: str) -> list[str]:
    """Store what this rank has to say at this attempt to meet; return the keys of all ranks."""
    attempt = _ATTEMPTS[group] = _ATTEMPTS.get(group, 0) + 1
    keys = [
        f"fusedce/{group.group_name}/{attempt}/{rank}"
        for rank in dist.get_process_group_ranks(group)
    ]
    dist.distributed_c10d._get_default_store().set(keys[dist.get_rank(group)], f":{words}")
    return keys


def _is_to_be_made(group: dist.ProcessGroup) -> bool:
    """Whether exchanges of ``group`` need a group of their own that is not made yet."""
    cpu = torch.device("cpu")
    on_cpu = device_for(group, cpu) == cpu and _backend(group, "cpu") == "gloo"
    return on_cpu and group not in _OWN


def timeout_for(group: dist.ProcessGroup) -> timedelta | None:
    """Timeout for a group beside ``group``: its own, or that of ``init_process_group`` if less.

    Torch gives the groups of a ``DeviceMesh`` its own default, whatever the user has set.
    """
    found = [x for x in map(timeout_of, (group, dist.group.WORLD)) if x is not None]
    return min(found, default=None)


def not_all_came(group: dist.ProcessGroup | None, purpose: str) -> str:
    """The words for a rank whose wait for others has failed; it has come to do ``purpose``."""
    timeout = None if group is None else timeout_for(group)
    over = "" if timeout is None else f" ({timeout.total_seconds():g} s)"
    return (
        f"this rank has come to {purpose}, and not all others have: the process group's "
        f"timeout{over} is over, or one of them has ended"
    )


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
