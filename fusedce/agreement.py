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

TEXT = 108  # int64 of a row that hold its text, 8 bytes each
_KEPT_KINDS = ("RuntimeError", "TypeError", "ValueError")
# torch 2.13 gave this one a new name
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


class RankReport(NamedTuple):
    """The row of one rank: ``settings`` or the text of an ``error``, and ``numbers``."""

    settings: dict[str, Any]
    error: str  # "KeyError: 'labels' (on rank 3)", with the rank among all processes
    numbers: list[int]


def read(table: Tensor) -> list[RankReport]:
    """Copy the rows of all ranks, ``(ranks, TEXT + n)`` int64, to the host; waits for them."""
    told = []
    for row in table.tolist():
        text = json.loads(struct.pack(f"{TEXT}q", *row[:TEXT]))
        failed = isinstance(text, str)
        told.append(RankReport({} if failed else text, text if failed else "", row[TEXT:]))
    return told


def row(settings: Mapping[str, object] | str, numbers: Tensor) -> Tensor:
    """``(TEXT + n,)`` int64 on the device of ``numbers (n,)`` int64, without waiting for it.

    Args:
        settings: what must be equal on all ranks, or an error's words (:func:`error_text`), which
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


def send(row: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start one all-gather of ``row (n,)`` int64; the table is complete after ``work.wait()``."""
    table = row.new_empty(dist.get_world_size(group), len(row))
    return table, getattr(dist, ALL_GATHER)(table.view(-1), row, group=group, async_op=True)


def error_text(error: BaseException) -> str:
    """Describe an error to other ranks: its kind, where it was raised, its text."""
    text = f"{type(error).__name__}: {error}"
    return f"{text[:400]} (on rank {dist.get_rank()})"


def failure_of(told: Iterable[RankReport]) -> Exception | None:
    """The error of the first rank that has failed; ``None`` if none has.

    The kinds of :data:`_KEPT_KINDS`, which argument checks raise, are kept. Others become
    ``RuntimeError``.
    """
    words = next((one.error for one in told if one.error), None)
    if words is None:
        return None
    name, _, text = words.partition(": ")
    return getattr(builtins, name)(text) if name in _KEPT_KINDS else RuntimeError(words)


def differing(told: list[RankReport]) -> tuple[str, list[Any]] | None:
    """The first setting in which ranks differ, and its value on each of them, else ``None``."""
    for name in dict.fromkeys(name for one in told for name in one.settings):
        values = [one.settings.get(name) for one in told]
        if len({json.dumps(x) for x in values}) > 1:
            return name, values
    return None


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
_ATTEMPTS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def own_group(group: dist.ProcessGroup, error: str = "") -> dist.ProcessGroup | Exception | None:
    """A group of the same ranks for exchanges while ``group`` still reduces gradients.

    Under gloo it is a new group, made at the first call. In ``group`` itself, a rank that has left
    a window early would send its row while another one is in an all-reduce of gradients, and gloo
    would abort both processes. Other backends use ``group``.

    Making it would wait for a rank that has failed before. So each rank first tells in the store
    that it has come, or its ``error``: then the result is ``None``, and on other ranks that error.
    """
    cpu = torch.device("cpu")
    if device_for(group, cpu) != cpu or _backend(group, "cpu") != "gloo":
        return group
    if group not in _OWN:
        members, timeout = dist.get_process_group_ranks(group), timeout_for(group)
        attempt = _ATTEMPTS[group] = _ATTEMPTS.get(group, 0) + 1
        keys = [f"{__name__}/{group.group_name}/{attempt}/{rank}" for rank in members]
        store = dist.distributed_c10d._get_default_store()
        store.set(keys[dist.get_rank(group)], f":{error}")
        if error:
            return None
        store.wait(keys, *([] if timeout is None else [timeout]))
        failure = failure_of(RankReport({}, store.get(key).decode()[1:], []) for key in keys)
        if failure is not None:
            return failure
        _OWN[group] = dist.new_group(
            members,
            backend="gloo",
            timeout=timeout,
            use_local_synchronization=len(members) < dist.get_world_size(),
        )
    return _OWN[group]


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
