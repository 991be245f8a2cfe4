"""The exchange between the ranks of an accumulator: sums, settings and errors at once."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import agreement
from fusedce.accumulate import faults as _faults
from fusedce.agreement import Table, Told, words_of
from fusedce.contract.groups import Ranks

# What ranks meet for.
WINDOW, FINISH, CLOSE, METRICS = (
    "open a window",
    "finish a window",
    "leave a window",
    "read metrics",
)
VALUES = 128  # numbers to be added over ranks, in one message
_OF_LOSSES = 2  # numbers that only ranks with losses send
LENGTH = agreement.TEXT + VALUES + _faults.ROW + _OF_LOSSES
_LOOK_AT = (
    "Look at what the other ranks do: each needs the same windows, the same number of "
    "micro-batches in them (empty ones may be all ignored) and the same calls of metrics(), and "
    "one that has failed says why in its own output. With TORCH_DISTRIBUTED_DEBUG=INFO, a rank "
    "that begins a micro-batch looks whether another one has ended the window, before it waits"
)
_WAITED = re.compile(r"time(d |-)?out|connection (closed|reset)", re.IGNORECASE)
GRACE = timedelta(seconds=1)  # for others that fail as well, before an error leaves its rank
_FAILED = -1  # micro-batches after which a window was ended by an error


@dataclass
class Sent:
    """A message on its way; :meth:`wait` gives the sums over ranks."""

    values: Tensor  # (n,) float64 of this rank
    meeting: Meeting
    place: str = ""
    table: Table | None = None  # of all ranks, where there are several
    work: dist.Work | None = None
    _sums: Tensor | None = field(default=None, init=False)

    def wait(self) -> Tensor:
        """``(n,)`` float64, the sums. On a device, only what is queued there waits.

        Raises:
            RuntimeError, TypeError, ValueError: what one rank found, or what they do not agree on;
                the same on all of them. On a device it is raised when something is read there.
                RuntimeError: other ranks have not come within the group's timeout.
        """
        if self.table is None:
            return self.values
        if self._sums is None:
            assert self.work is not None
            with self.meeting.waiting(self.place):
                self.work.wait()
            self.meeting.heard(self.table)  # an error is raised to everybody who asks
            told = self.table.numbers()[:, : len(self.values)].contiguous()
            self._sums = told.view(torch.float64).sum(0)
        return self._sums

    def told(self) -> list[Told]:
        """Return what all ranks sent, if it arrives within :data:`GRACE`; on a CPU."""
        if self.table is not None and _faults.readable(self.table.rows.device):
            assert self.work is not None
            with contextlib.suppress(RuntimeError):  # the others are elsewhere, or gone
                if self.work.wait(GRACE):
                    return self.table.read()
        return []


_COUNTERS: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class Meeting:
    """The ranks of one accumulator, and what they have told each other without being read yet."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.told: BaseException | None = None  # the last error that all ranks were told of
        # The same accumulator has the same number on all ranks, which make them in the same order.
        self._number = next(_COUNTERS[ranks.name()])
        self._met = 0  # messages so far
        self._unread: Table | None = None  # the first device message that is an error

    @contextlib.contextmanager
    def on_the_way(self, place: str) -> Iterator[None]:
        """Tell the others, who come to ``place``, of an error on the way there."""
        try:
            yield
        except Exception as error:
            self.fail(place, error)
            raise

    def send(
        self,
        place: str,
        values: Tensor,
        settings: Mapping[str, object],
        of_losses: tuple[int, int] = (0, 0),
        faults: _faults.Faults | None = None,
    ) -> Sent:
        """Start one all-gather of ``values (n,)``, in float64.

        Args:
            settings: equal on all ranks.
            of_losses: equal on all ranks but those that send zeros: the number of micro-batches
                plus one, and a hash of the losses.
        """
        values = values.detach().double()
        if (group := self.ranks.group()) is None:
            return Sent(values, self)
        values = _faults.moved(values, agreement.device_for(group, values.device))
        row = (faults or _faults.Faults(False)).row(values.device)
        said = torch.tensor(of_losses)
        padding = row.new_zeros(VALUES - len(values))
        numbers = [values.view(torch.int64), padding, row, _faults.moved(said, values.device)]
        ends = place == FINISH and of_losses[0] > 0
        if ends:
            self._mark(of_losses[0] - 1)
        told = {"accumulator": self._number, "place": place, **settings}
        sent = self._post(place, values, told, torch.cat(numbers))
        if ends:
            self._check_ahead(of_losses[0] - 1)
        return sent

    def fail(self, place: str, error: BaseException) -> None:
        """Tell the others, who are on their way to ``place``; their own errors become notes."""
        if (group := self.ranks.group()) is None:
            return
        words = words_of(error)
        device = agreement.device_for(group, torch.device("cpu"))
        nothing = torch.zeros(LENGTH - agreement.TEXT, dtype=torch.int64, device=device)
        with contextlib.suppress(RuntimeError):  # nobody came: the error leaves as it is
            if place in (FINISH, CLOSE):
                self._mark(_FAILED)
            sent = self._post(place, nothing.double(), words, nothing)
            if place == WINDOW and not _faults.readable(device):
                # Ranks that do not look at their device go on, and come to the window's end.
                self._post(CLOSE, nothing.double(), words, nothing)
            others = (one.error for one in sent.told())
            agreement.add_notes(error, [x for x in others if x not in ("", words)])
        self.told = error

    def _post(
        self, place: str, values: Tensor, told: Mapping[str, object] | str, numbers: Tensor
    ) -> Sent:
        group = self.ranks.group()
        assert group is not None
        self._met += 1
        with self.waiting(place):
            group = agreement.own_group(group)
        table, work = agreement.send(agreement.row(told, numbers), group)
        return Sent(values, self, place, table, work)

    # ---- errors -----------------------------------------------------------------------------

    def heard(self, table: Table) -> None:
        """Raise what a message says is wrong, or keep it until somebody reads from the device."""
        if _faults.readable(table.rows.device):
            if (error := explain(table.read())) is not None:
                self.told = error
                raise error
        elif self._unread is None:
            self._unread = table
        else:
            rows = torch.where(_is_error(self._unread), self._unread.rows, table.rows)
            self._unread = Table(rows)

    def raise_unread(self) -> None:
        """Raise what device messages have said, and forget it. Waits for the device."""
        if self._unread is not None:
            table, self._unread = self._unread, None
            if (error := explain(table.read())) is not None:
                raise error

    @contextlib.contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Say what to look at where others have not come."""
        try:
            yield
        except RuntimeError as error:
            group = self.ranks.group()
            timeout = None if group is None else agreement.timeout_for(group)
            over = "" if timeout is None else f" ({timeout.total_seconds():g} s)"
            self.told = RuntimeError(
                f"this rank has come to {place}, and not all others have: the process group's "
                f"timeout{over} is over, or one of them has ended. {_LOOK_AT}"
            )
            raise self.told from error

    def note_wait(self, error: BaseException) -> None:
        """The same as a note, where the engine's own collective has waited for the others."""
        if self.ranks.group() is not None and _WAITED.search(str(error)):
            getattr(error, "add_note", str)(f"in a window of LossAccumulator: {_LOOK_AT}")

    # ---- marks of ended windows, under TORCH_DISTRIBUTED_DEBUG ------------------------------

    # An exchange waits for all ranks, and so does each backward of DDP. A rank that has run out of
    # micro-batches, or failed, comes to the exchange while others are on their way to a backward:
    # they wait for each other. Whoever ends a window or begins a micro-batch sets a mark in the
    # store through which the processes have met, and then looks at those of the others, so that one
    # of them at least sees the other. These are two requests a micro-batch to one server.

    def begins(self, seen: int, streams: bool, settings: Mapping[str, object]) -> None:
        """Before micro-batch ``seen + 1``: meet ranks that have ended the window, and raise why.

        Args:
            streams: whether this window ends when the rank says so; of another one, only errors.
        """
        if (store := self._store()) is None:
            return
        with _store_in_words():
            store.set(f"at/{self.ranks.rank()}", f"{self._met} {seen + 1}")
            key = f"end/{self._met}"
            ended = int(store.get(key)) if store.check([key]) else None
        if ended == _FAILED or (streams and ended is not None and ended <= seen):
            nothing = torch.zeros(0, dtype=torch.float64)
            self.send(FINISH if streams else CLOSE, nothing, settings, (seen + 2, 0)).wait()
            self.raise_unread()

    def _mark(self, micro_batches: int) -> None:
        if (store := self._store()) is not None:
            with _store_in_words():
                store.set(f"end/{self._met}", str(micro_batches))

    def _check_ahead(self, micro_batches: int) -> None:
        """Raise if a rank has begun more micro-batches of the window that this one has ended."""
        if (store := self._store()) is None:
            return
        for rank in set(range(self.ranks.size())) - {self.ranks.rank()}:
            with _store_in_words():
                there = store.check([f"at/{rank}"])
                met, begun = map(int, store.get(f"at/{rank}").split()) if there else (-1, 0)
            if met == self._met - 1 and begun > micro_batches:
                raise RuntimeError(
                    f"ranks have different numbers of micro-batches in this window: this one ends "
                    f"it after {micro_batches}, rank {rank} has begun number {begun}. Each rank "
                    f"needs the same number; empty ones may be all ignored. (If DDP reduces "
                    f"gradients in that one's backward, it waits there until this process ends.)"
                )

    def _store(self) -> dist.Store | None:
        group = self.ranks.group()
        if group is None or dist.get_debug_level() == dist.DebugLevel.OFF:
            return None
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"fusedce/{group.group_name}/{self._number}", store)


@contextlib.contextmanager
def _store_in_words() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RuntimeError(
            "the store of torch.distributed, in which ranks leave marks under "
            "TORCH_DISTRIBUTED_DEBUG, cannot be reached: the process that serves it, rank 0's or "
            "torchrun, has ended. Look at what rank 0 has printed, and let all ranks end together "
            "(dist.barrier())"
        ) from error


def explain(told: list[Told]) -> Exception | None:
    """The error that a message tells all ranks, in the same words; ``None`` if all is well."""
    if (failure := agreement.failure_of(told)) is not None:
        return failure
    if (differ := agreement.differing(told)) is not None:
        return _disagreement(*differ)
    faults = [_faults.of_row(one.numbers[VALUES:-_OF_LOSSES]) for one in told]
    if (fault := next((x for x in faults if x is not None), None)) is not None:
        return fault
    counts, losses = (
        {one.numbers[i]: rank for rank, one in enumerate(told) if one.numbers[i]} for i in (-2, -1)
    )
    if len(losses) > 1:
        return RuntimeError(
            f"the ranks' windows hold different losses, those of ranks {sorted(losses.values())}: "
            f"the same names, in the same order, with the same weights, are needed on all of them"
        )
    if len(counts) > 1:
        few, many = min(counts), max(counts)
        return RuntimeError(
            f"ranks have different numbers of micro-batches in this window: {few - 1} on rank "
            f"{counts[few]}, {many - 1} on rank {counts[many]}. Each rank needs the same number; "
            f"empty ones may be all ignored."
        )
    return None


def _is_error(table: Table) -> Tensor:
    """``()`` bool on the table's device: whether :func:`explain` finds an error."""
    numbers = table.numbers()
    said = numbers[:, -_OF_LOSSES:]
    differ = ((said != 0) & (said != said.amax(0))).any()
    return table.is_error() | (numbers[:, VALUES] != 0).any() | differ


def _disagreement(name: str, said: list[Any]) -> Exception:
    have = [f"{x!r} on {n}" for x, n in Counter(said).items()]
    if name == "accumulator":
        return RuntimeError(
            f"messages of different accumulators have met: those of numbers {said}, counted in the "
            f"order in which each rank has made them. All ranks must make the same accumulators in "
            f"the same order, and open, finish and read them in the same order"
        )
    if name == "place":
        at = ", ".join(f"{n} to {place}" for place, n in Counter(said).items())
        return RuntimeError(
            f"the {len(said)} ranks are at different places, {at}: each rank needs the same "
            f"windows and the same calls of metrics(). Did one run out of data?"
        )
    if name == "estimate":
        return RuntimeError(
            "ranks stream from different estimates: they have loaded different states. Load the "
            "same one on all of them, or none"
        )
    return ValueError(
        f"{name} must be the same on all ranks: it is {' and '.join(have)} of the {len(said)} ranks"
    )
