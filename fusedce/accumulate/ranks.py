"""Where ranks meet: one small all-reduce that carries sums, what must agree, and "I failed".

All that could end differently on different ranks travels with the numbers that are exchanged
anyway, so that each of them ends with the same words, at the same place. What ranks must agree on
is sent as ``x`` and ``x^2``: numbers are equal exactly where their variance is zero.
"""

from __future__ import annotations

import builtins
import contextlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce.accumulate import faults as _faults
from fusedce.accumulate.channel import FAILED, GRACE, Channel, channel_of
from fusedce.contract.groups import Ranks

# What ranks meet for.
WINDOW, ESTIMATE, FINISH, CLOSE, METRICS = PLACES = (
    "open a window",
    "start streaming",
    "finish a window",
    "leave a window",
    "read metrics",
)

VALUES = 128  # numbers to be added over ranks, in one message
_TEXT, _BYTES = 64, 5  # numbers that hold the words of an error; 8192 * 2**40 is exact in float64
_AGREE = ("micro_batches", "losses", "estimate")


@dataclass(frozen=True)
class Terms:
    """What this rank brings to a meeting besides its sums.

    Attributes:
        has_loss: False on a rank of another pipeline stage, which sees no micro-batch's loss.
        micro_batches, losses, estimate: equal on all ranks with losses: how many micro-batches;
            what they are called and weigh, and a streaming estimate from a loaded state, as a hash
            below 2**20.
        settings: equal on all ranks, each 0 or 1: gradients are added; an empty window is skipped;
            an empty window raises.
    """

    has_loss: bool = True
    micro_batches: int = 0
    losses: int = 0
    estimate: int = 0
    settings: tuple[int, int, int] = (0, 0, 0)


_FIELDS = {
    "values": VALUES,
    "with_loss": 1,
    "agree": 2 * len(_AGREE),
    "settings": 3,
    "places": len(PLACES),
    "failed": 4,  # how many ranks, which one, a hash of its words and the square of that
    "fault": _faults.ROW,
    "text": _TEXT,
}
_ENDS = [sum(list(_FIELDS.values())[:i]) for i in range(len(_FIELDS) + 1)]
_SLICES = {name: slice(*ends) for name, ends in zip(_FIELDS, pairwise(_ENDS), strict=True)}
LENGTH = _ENDS[-1]


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
        return self.message[_SLICES["values"]][: self.n_values]

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
        return self._post(place, values.detach().double(), terms, faults, None)

    def fail(self, place: str, error: Exception) -> Exception:
        """Tell the others, who are on their way to ``place``; returns the error that all raise."""
        if self.ranks.group() is None:
            return error
        nothing = torch.zeros(0, dtype=torch.float64)
        sent = self._post(place, nothing, Terms(), None, error)
        if place == WINDOW and not _faults.readable(sent.message.device):
            # Ranks that do not look at their device go on, and come to the window's end.
            self._post(CLOSE, nothing, Terms(), None, error)
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
        self._unread = message if old is None else torch.where(_is_error(old, ranks), old, message)

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
        faults: _faults.Faults | None,
        failure: Exception | None,
    ) -> Sent:
        n_values, group = len(values), self.ranks.group()
        if group is None:
            return Sent(values, n_values, self)
        device = values.device
        if device.type == "cpu" and dist.get_backend(group) in ("nccl", "xccl"):
            device = torch.accelerator.current_accelerator() or device
        row = _faults.Faults(False).row(device) if faults is None else faults.row(device)
        words = "" if failure is None else f"{type(failure).__name__}: {failure}"
        agree = [float(terms.has_loss and getattr(terms, name)) for name in _AGREE]
        told = [
            *[0.0] * (VALUES - n_values),
            float(terms.has_loss),
            *agree,
            *[x * x for x in agree],
            *map(float, terms.settings),
            *[float(place == other) for other in PLACES],
            float(failure is not None),
            float(failure is not None and self.ranks.rank()),
            *[float(x) for x in (hash_of(words), hash_of(words) ** 2)],
        ]
        if failure is not None:  # its own settings are not the matter
            told[_SLICES["settings"].start - n_values : _SLICES["places"].start - n_values] = [
                0.0
            ] * 3
        host = torch.tensor([*told, *_encode(words)], dtype=torch.float64)
        n_told = len(told)
        host = _faults.moved(host, device)
        message = torch.cat([_faults.moved(values, device), host[:n_told], row, host[n_told:]])
        channel = channel_of(group)
        ends = None
        if failure is not None and place in (FINISH, CLOSE):
            channel.ends(FAILED)
        elif place == FINISH and terms.has_loss:
            channel.ends(ends := terms.micro_batches)
        channel.sends()
        work = dist.all_reduce(message, group=channel.group, async_op=True)
        return Sent(message, n_values, self, work, ends)


def _is_error(message: Tensor, ranks: int) -> Tensor:
    """``()`` bool on the message's device: whether :func:`explain` finds an error."""
    agree = message[_SLICES["agree"]]
    sums, squares = agree.chunk(2)
    differ = (message[_SLICES["with_loss"]] * squares != sums * sums).any()
    flags = message[_SLICES["settings"].start : _SLICES["places"].stop]
    mixed = (flags * (ranks - flags) != 0).any()
    failed = message[_SLICES["failed"].start] + message[_SLICES["fault"].start]
    return differ | mixed | (failed != 0)


def explain(message: Sequence[float], ranks: int) -> Exception | None:
    """The error that a message tells all ranks, in the same words; ``None`` if all is well."""
    part = {name: message[where] for name, where in _SLICES.items()}
    failed, which, words, square = (int(x) for x in part["failed"])
    if failed:
        where = f"rank {which} of {ranks}" if failed == 1 else f"{failed} of {ranks} ranks"
        if failed * square != words * words:
            return RuntimeError(f"{where} failed, with different errors: see the words of each")
        return _failure(_decode(part["text"], failed), where)
    if max(part["places"]) != ranks:
        at = ", ".join(
            f"{int(n)} to {what}" for what, n in zip(PLACES, part["places"], strict=True) if n
        )
        return RuntimeError(
            f"the {ranks} ranks are at different places, {at}: each rank needs the same windows "
            f"and the same calls of metrics(). Did one run out of data?"
        )
    added, skips, raises = (int(x) for x in part["settings"])
    if added % ranks:
        return ValueError(
            f"grad_reduction must be the same on all ranks: it is 'sum' on {added} of them and "
            f"'mean' on {ranks - added}"
        )
    if skips % ranks or raises % ranks:
        return ValueError(
            f"on_empty must be the same on all ranks: it is 'skip' on {skips}, 'raise' on {raises} "
            f"and 'zero' on {ranks - skips - raises} of them"
        )
    return _faults.of_row(part["fault"]) or _disagreement(part)


def _disagreement(part: dict[str, Sequence[float]]) -> Exception | None:
    (with_loss,) = part["with_loss"]
    sums, squares = part["agree"][: len(_AGREE)], part["agree"][len(_AGREE) :]
    together = dict(zip(_AGREE, sums, strict=True))
    words = {
        "losses": (
            "the ranks' windows hold different losses: the same names, in the same order, with "
            "the same weights, are needed on all of them"
        ),
        "micro_batches": (
            f"ranks have different numbers of micro-batches in this window: "
            f"{int(together['micro_batches'])} on {int(with_loss)} ranks together. Each rank needs "
            f"the same number; empty ones may be all ignored."
        ),
        "estimate": (
            "ranks start streaming from different estimates: they have loaded different states. "
            "Load the same one on all of them, or none"
        ),
    }
    for name, text in words.items():
        i = _AGREE.index(name)
        if with_loss * squares[i] != sums[i] ** 2:
            return RuntimeError(text)
    return None


def _failure(words: str, where: str) -> Exception:
    name, _, text = words.partition(": ")
    if name in ("RuntimeError", "TypeError", "ValueError"):
        return getattr(builtins, name)(f"{text} (on {where})")
    return RuntimeError(f"{words} (on {where})")


def hash_of(x: object) -> int:
    """A number below 2**20, which ranks can compare; 0 for what is empty."""
    return 1 + zlib.crc32(repr(x).encode()) % (2**20 - 1) if x else 0


def _encode(words: str) -> list[float]:
    data = words.encode(errors="replace")[: _TEXT * _BYTES].ljust(_TEXT * _BYTES, b"\0")
    return [float(int.from_bytes(data[i : i + _BYTES], "big")) for i in range(0, len(data), _BYTES)]


def _decode(text: Sequence[float], failed: int) -> str:
    """The words of ranks that failed in the same way."""
    data = b"".join((int(x) // failed).to_bytes(_BYTES, "big") for x in text)
    return data.rstrip(b"\0").decode(errors="ignore")
