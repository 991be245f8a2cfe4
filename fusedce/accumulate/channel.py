"""Where messages travel, and marks that say who has ended a window already.

A message waits for all ranks, and so does each backward of DDP. A rank that has run out of
micro-batches, or failed, comes to the message while others are on their way to a backward: they
would wait for each other. So who ends a window leaves a mark in the store through which the
processes met, and who begins a micro-batch looks there: no collective, and nobody is waited for.
"""

from __future__ import annotations

from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

FAILED = -1  # micro-batches after which a window was ended by an error
GRACE = timedelta(seconds=1)  # after which a rank that waits looks whether another one waits for it


class Channel:
    """A group for messages of the ranks of ``group`` alone, made when they first meet.

    On the engine's own group, a rank that leaves a window early would meet another one in the
    middle of an all-reduce of gradients; gloo ends the process of both.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        members = dist.get_process_group_ranks(group)
        if dist.get_backend(group) == "gloo":
            self.group = dist.new_group(
                members,
                backend="gloo",
                use_local_synchronization=len(members) < dist.get_world_size(),
            )
        self._others = [r for r in range(len(members)) if r != dist.get_rank(group)]
        self._me = dist.get_rank(group)
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"fusedce/{self.group.group_name}", store)
        self._met = 0  # messages so far, the same number on all ranks

    def sends(self) -> None:
        """The next message is on its way."""
        self._met += 1

    def ends(self, micro_batches: int) -> None:
        """Before that message: it ends a window after so many of them, or :data:`FAILED`."""
        self._store.set(f"end/{self._met}", str(micro_batches))
        if self._me == 0 and self._met >= 2:
            self._store.delete_key(f"end/{self._met - 2}")

    def begins(self, micro_batch: int) -> int | None:
        """After how many another rank has ended the window that this one goes on with."""
        self._store.set(f"at/{self._me}", f"{self._met} {micro_batch}")
        key = f"end/{self._met}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def ahead(self, micro_batches: int) -> tuple[int, int] | None:
        """Before the message that is on its way, who has begun more, and how many."""
        for rank in self._others:
            if self._store.check([f"at/{rank}"]):
                met, begun = map(int, self._store.get(f"at/{rank}").split())
                if met == self._met - 1 and begun > micro_batches:
                    return rank, begun
        return None


_CHANNELS: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup) -> Channel:
    """Made by the first who asks; under gloo a collective of the group's ranks."""
    if group not in _CHANNELS:
        _CHANNELS[group] = Channel(group)
    return _CHANNELS[group]
