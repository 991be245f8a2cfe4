"""Where ranks meet: one small all-reduce that carries sums, what must agree, and "I failed".

All that could end differently on different ranks travels with the numbers that are exchanged
anyway, so that each of them ends with the same words, at the same place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.channel import FAILED, GRACE, Channel, channel_of
from fusedce.accumulate.message import (
    CLOSE,
    FINISH,
    WINDOW,
    Terms,
    explain,
    is_error,
    written,
)
from fusedce.contract.groups import Ranks


@dataclass
class Sent:
    """A message on its way; :meth:`wait` gives the sums over ranks."""

    message: Tensor  # (LENGTH,) float64
    n_values: int
    meeting: Meeting
    work: dist.Work | None = None
    ends_after: int | None = None  # micro-batches of a streaming window
    _done: bool = field(default=False, init=False)

    def wait(self) -> Tensor:
        """``(n,)`` float64, the sums. On a device, only what is queued there waits.

        Raises:
            RuntimeError, TypeError, ValueError: what one rank found, or what they do not agree on;
                the same on all of them. On a device it is raised when something is read there.
        """
        if not self._done:
            if self.work is not None:
                self._wait(self.work)
            self.meeting.heard(self.message)
            self._done = True  # an error is raised to everybody who asks
        return self.message[: self.n_values]

    def _wait(self, work: dist.Work) -> None:
        """Wait, unless another rank waits for this one: it has begun one more micro-batch."""
        if self.ends_after is None or not _faults.readable(self.message.device):
            work.wait()
            return
        before = None
        while True:
            try:
                work.wait(GRACE)
            except RuntimeError:
                if work.is_completed():
                    raise
            else:
                return
            ahead = self.meeting.channel().ahead(self.ends_after)
            if ahead is not None and ahead == before:  # it had the time to come here as well
                raise RuntimeError(
                    f"ranks have different numbers of micro-batches in this window: this one ends "
                    f"it after {self.ends_after}, rank {ahead[0]} has begun number {ahead[1]}. "
                    f"Each rank needs the same number; empty ones may be all ignored. (If DDP "
                    f"reduces gradients in that one's backward, it waits there until this process "
                    f"ends.)"
                )
            before = ahead

    def error(self) -> Exception | None:
        """What is known to be wrong within the time of grace, on a CPU."""
        if self.work is not None and not self._done:
            with contextlib.suppress(RuntimeError):  # the others are elsewhere, or gone
                self._done = self.work.wait(GRACE)
        if self.work is None or not self._done or not _faults.readable(self.message.device):
            return None
        return self.meeting.explain(self.message)


class Meeting:
    """The ranks of one accumulator, and what they have told each other without being read yet."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.told: Exception | None = None  # the last error that all ranks were told of
        self._unread: Tensor | None = None  # (LENGTH,): the first device message that is an error

    @contextlib.contextmanager
    def on_the_way(self, place: str, expected: bool = True) -> Iterator[None]:
        """Tell the others, if they are ``expected`` at ``place``, of an error on the way there."""
        try:
            yield
        except Exception as error:
            told = self.fail(place, error) if expected else error
            if told is error:
                raise
            raise told from error

    def send(
        self, place: str, values: Tensor, terms: Terms, faults: _faults.Faults | None = None
    ) -> Sent:
        """Start one all-reduce of ``values (n,)``, in float64, and of what must agree."""
        return self._post(place, values.detach().double(), terms, faults)

    def fail(self, place: str, error: Exception) -> Exception:
        """Tell the others, who are on their way to ``place``; returns the error that all raise."""
        if self.ranks.group() is None:
            return error
        nothing = torch.zeros(0, dtype=torch.float64)
        sent = self._post(place, nothing, Terms(), failure=error)
        if place == WINDOW and not _faults.readable(sent.message.device):
            # Ranks that do not look at their device go on, and come to the window's end.
            self._post(CLOSE, nothing, Terms(), failure=error)
        self.told = sent.error() or error
        return self.told

    def heard(self, message: Tensor) -> None:
        """Raise what a message says is wrong, or keep it until somebody reads from the device."""
        if self.ranks.group() is None:
            return
        if _faults.readable(message.device):
            self.told = self.explain(message)
            if self.told is not None:
                raise self.told
            return
        old, ranks = self._unread, self.ranks.size()
        self._unread = message if old is None else torch.where(is_error(old, ranks), old, message)

    def raise_unread(self) -> None:
        """Raise what device messages have said, and forget it. Waits for the device."""
        if self._unread is not None:
            message, self._unread = self._unread, None
            error = self.explain(message)
            if error is not None:
                raise error

    def channel(self) -> Channel:
        group = self.ranks.group()
        assert group is not None
        return channel_of(group)

    def join_who_has_ended(self, seen: int, streams: bool, terms: Terms) -> None:
        """Before another micro-batch: meet ranks that have ended the window, and raise why.

        Args:
            seen: micro-batches of this window so far.
            streams: whether this window ends when the rank says so; of another one, only errors.
        """
        if self.ranks.group() is None:
            return
        ended = self.channel().begins(seen + 1)
        if ended == FAILED or (streams and ended is not None and ended <= seen):
            nothing = torch.zeros(0, dtype=torch.float64)
            self.send(FINISH if streams else CLOSE, nothing, terms).wait()
            self.raise_unread()

    def explain(self, message: Tensor) -> Exception | None:
        return explain(message.tolist(), self.ranks.size())

    def _post(
        self,
        place: str,
        values: Tensor,
        terms: Terms,
        faults: _faults.Faults | None = None,
        failure: Exception | None = None,
    ) -> Sent:
        n_values, group = len(values), self.ranks.group()
        if group is None:
            return Sent(values, n_values, self)
        device = values.device
        if device.type == "cpu" and dist.get_backend(group) in ("nccl", "xccl"):
            device = torch.accelerator.current_accelerator() or device
        row = _faults.Faults(False).row(device) if faults is None else faults.row(device)
        message = written(values, place, terms, row, failure, self.ranks.rank())
        channel = channel_of(group)
        ends = None
        if failure is not None and place in (FINISH, CLOSE):
            channel.ends(FAILED)
        elif place == FINISH and terms.has_loss:
            channel.ends(ends := terms.micro_batches)
        channel.sends()
        work = dist.all_reduce(message, group=channel.group, async_op=True)
        return Sent(message, n_values, self, work, ends)
