"""The exchange between the ranks of an accumulator: sums, settings and errors at once.

One process is a group of one rank, whose table has one row and needs no collective.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import agreement
from fusedce.accumulate import faults as _faults
from fusedce.agreement import Table, Told
from fusedce.contract.groups import Ranks
from fusedce.contract.monitors import MONITORS

# The purposes of an exchange, which must be the same on all ranks.
WINDOW, FINISH, CLOSE, METRICS = (
    "open a window",
    "finish a window",
    "leave a window",
    "read metrics",
)
UNNAMED = ""  # the name of a window's only loss where the user gave none
KINDS = ("loss_sum", "n_valid", *(x for name in MONITORS for x in (name, f"{name} of")))
VALUES = 128  # float64 values in a message that are summed over ranks
_SAID = 5  # int64 values in a message: of a replica two, `said`, and the accumulator's number
LENGTH = agreement.TEXT + VALUES + _faults.ROW + _SAID
_MIXING = torch.tensor([3, 0x1E3779B97F4A7C15, 0x632BE59BD9B4E019, 0x7A646E19], device="cpu")
GRACE = timedelta(seconds=1)  # time for other ranks to report errors before one is raised
_ADVICE = (
    "Look at what the other ranks do: each needs the same windows, the same number of "
    "micro-batches in them (empty ones may be all ignored) and the same calls of metrics(), and "
    "one that has failed says why in its own output"
)
_NUMBERS = itertools.count(1)  # of the accumulators that this process makes
_MET: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()


class Pending(NamedTuple):
    """A message that was sent; :meth:`wait` gives the sums over ranks."""

    exchange: Exchange
    purpose: str
    table: Table
    work: dist.Work | None = None  # None on a single rank

    def wait(self) -> Tensor:
        """The sums over ranks, ``(VALUES,)`` float64. On a device only its queue waits.

        Raises:
            RuntimeError, TypeError, ValueError: one rank has failed, or settings differ; the error
                is the same on all ranks. On a device it is raised when a value is read there.
            RuntimeError: other ranks have not come within the group's timeout.
        """
        if self.work is not None:
            with self.exchange.waiting(self.purpose):
                self.work.wait()
        self.exchange.check(self.table)
        return self.table.numbers()[:, :VALUES].contiguous().view(torch.float64).sum(0)

    def read_rows(self) -> list[Told]:
        """The rows of all ranks, if they arrive on a CPU within :data:`GRACE`; else none."""
        if self.work is not None and _faults.readable(self.table.rows.device):
            with contextlib.suppress(RuntimeError):  # the others are elsewhere, or gone
                if self.work.wait(GRACE):
                    return self.table.read()
        return []


class Exchange:
    """Messages between the ranks of one accumulator, each an all-gather of one row per rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.shared_error: BaseException | None = None  # the last error that all ranks were told of
        self._number = next(_NUMBERS)
        self._numbers: Tensor | None = None  # (R,) of this accumulator on each rank, 0 if unknown
        self._before: Tensor | None = None  # the bits of the loss in the message before, ()
        self._unread: Table | None = None  # the first message on a device that is an error

    def send(
        self,
        purpose: str,
        values: Tensor,
        settings: Mapping[str, object],
        said: tuple[int, int] = (0, 0),
        fault: Tensor | None = None,
        replica: tuple[int, bool] = (0, False),
    ) -> Pending:
        """Start one all-gather.

        Args:
            purpose: one of the four of this module, equal on all ranks.
            values: ``(n,)``, this rank's numbers, to be summed over ranks as float64.
            settings: must be equal on all ranks.
            said: the number of declared micro-batches plus one, and a hash of the losses, equal on
                all ranks that have them; ranks without any send zeros.
            fault: the first error that this rank has found in tensors.
            replica: as :meth:`Guard.replicas`. Where the losses of two such ranks are equal, in
                two windows running unless one is enough, they hold the same tokens.
        """
        group, values = self.ranks.group(), values.detach().double()
        at = values.device if group is None else agreement.device_for(group, values.device)
        if fault is None:
            fault = torch.zeros(_faults.ROW, dtype=torch.int64, device="cpu")
        padding = torch.zeros(VALUES - len(values), dtype=torch.int64, device=at)
        bits, before = values.view(torch.int64), self._before
        if replica[1] or before is None:
            before = torch.tensor(int(replica[1]), device="cpu")
        if purpose in (CLOSE, FINISH):
            self._before = bits[0].clone()
        counts = torch.tensor([replica[0], *said, self._number], device="cpu")
        numbers = [bits, padding, fault, before[None], counts]
        row = torch.cat([_faults.moved(x, at) for x in numbers])
        return self._post(purpose, agreement.row({"purpose": purpose, **settings}, row))

    def fail(self, purpose: str, error: BaseException) -> None:
        """Send ``error`` to the other ranks, which come for ``purpose``.

        Errors that they report within :data:`GRACE` become notes of this one (Python 3.11).
        """
        if (group := self.ranks.group()) is None:
            return
        words = agreement.words_of(error)
        self.shared_error = error
        if agreement.has_failed_before_meeting(group, words):
            return
        device = agreement.device_for(group, torch.device("cpu"))
        nothing = torch.zeros(LENGTH - agreement.TEXT, dtype=torch.int64, device=device)
        with contextlib.suppress(RuntimeError):  # no rank has answered
            sent = self._post(purpose, agreement.row(words, nothing))
            if purpose == WINDOW and not _faults.readable(device):
                # Ranks that do not read their device go on until the window's end.
                self._post(CLOSE, agreement.row(words, nothing))
            others = (one.error for one in sent.read_rows())
            agreement.add_notes(error, [x for x in others if x not in ("", words)])

    @contextlib.contextmanager
    def tell_peers_on_error(self, purpose: str) -> Iterator[None]:
        """Send an error of the block to the other ranks, which come for ``purpose``; raise it."""
        try:
            yield
        except Exception as error:
            self.fail(purpose, error)
            raise

    def _post(self, purpose: str, row: Tensor) -> Pending:
        if (group := self.ranks.group()) is None:
            return Pending(self, purpose, Table(row[None]))
        with self.waiting(purpose):
            failure = agreement.meet(group)
        if failure is not None:
            self.shared_error = failure
            raise failure
        group = agreement.own_group(group)
        return Pending(self, purpose, *agreement.send(row, group))

    def check(self, table: Table) -> None:
        """Raise the error that a message holds; on a device, keep it until a value is read."""
        self._identify(table.numbers()[:, -1])
        if _faults.readable(table.rows.device):
            if (error := explain(table.read())) is not None:
                self.shared_error = error
                raise error
        elif self._unread is None:
            self._unread = table
        else:
            rows = torch.where(_is_error(self._unread), self._unread.rows, table.rows)
            self._unread = Table(rows)

    def _identify(self, numbers: Tensor) -> None:
        """Make ``numbers (R,)``, in place, negative if ranks speak of different accumulators.

        A process numbers the accumulators that it makes, and may make some alone. But those that
        have met were made in the same order on all ranks, and one that has met stays itself.
        """
        if self.ranks.group() is None:
            return
        _MET[self._number] = self
        mine, several = numbers.clone(), torch.zeros_like(numbers[0]).bool()
        for other in (ref() for ref in _MET.valuerefs()):
            met = None if other is None else other._numbers
            if other is not None and met is not None and other.ranks.name() == self.ranks.name():
                met = _faults.moved(met, mine.device)
                order = (mine - met).sign().masked_fill((mine == 0) | (met == 0), 2)
                ways = [(order == way).any().int() for way in (-1, 0, 1)]
                several |= sum(ways) > 1
        numbers *= torch.where(several, -1, 1)
        if self._numbers is None:
            self._numbers = mine  # with 0 for a rank that has failed

    def raise_unread(self) -> None:
        """Raise the error that messages on a device hold, and forget it. Waits for the device."""
        table, self._unread = self._unread, None
        if table is not None and (error := explain(table.read())) is not None:
            raise error

    @contextlib.contextmanager
    def waiting(self, purpose: str) -> Iterator[None]:
        """Explain an error of waiting: other ranks have not come in time."""
        try:
            yield
        except RuntimeError as error:
            words = agreement.not_all_came(self.ranks.group(), purpose)
            self.shared_error = RuntimeError(f"{words}. {_ADVICE}")
            raise self.shared_error from error


def explain(rows: list[Told]) -> Exception | None:
    """The error that the rows of all ranks amount to, equal on all of them; ``None`` if none."""
    if (failure := agreement.failure_of(rows)) is not None:
        return failure
    if (differ := agreement.differing(rows)) is not None:
        return _disagreement(*differ)
    if any(one.numbers[-1] < 0 for one in rows):
        return _several([abs(one.numbers[-1]) for one in rows])
    for one in rows:
        if (fault := _faults.of_row(one.numbers[VALUES:-_SAID])) is not None:
            return fault
    if replicas := _replicas(rows):
        return RuntimeError(
            f"ranks {replicas} of this accumulator hold the same tokens, which are counted "
            f"{len(replicas)} times: leave tensor-parallel ranks out, as in "
            f'LossAccumulator.from_mesh(mesh, "dp")'
        )
    counts, losses = (
        {one.numbers[i]: rank for rank, one in enumerate(rows) if one.numbers[i]} for i in (-3, -2)
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
            f"{counts[few]}, {many - 1} on rank {counts[many]}. Each rank declares the same number "
            f"(empty ones may be all ignored); streaming takes any, if the engine waits for other "
            f"ranks in the last backward alone (DDP under no_sync())"
        )
    return None


def _replicas(rows: list[Told]) -> list[int]:
    """The first ranks found that hold the same tokens; none if all hold their own."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, one in enumerate(rows):
        loss, n_valid, before, group = *one.numbers[:2], *one.numbers[-_SAID : 2 - _SAID]
        if n_valid and before and group:
            found.setdefault((group, before, loss, n_valid), []).append(rank)
    return next((ranks for ranks in found.values() if len(ranks) > 1), [])


def _is_error(table: Table) -> Tensor:
    """``()`` bool on the table's device: whether :func:`explain` finds an error."""
    numbers = table.numbers()
    said = numbers[:, -3:-1]
    differ = ((said != 0) & (said != said.amax(0))).any() | (numbers[:, -1] < 0).any()
    same = torch.stack([*numbers[:, :2].T, *numbers[:, -_SAID : 2 - _SAID].T])
    mixed = (same * _MIXING[:, None].to(same)).sum(0)  # wraps around; 0 for no replica
    mixed = mixed.masked_fill((same[1:] == 0).any(0), 0).sort().values
    differ |= ((mixed[1:] == mixed[:-1]) & (mixed[1:] != 0)).any()
    return table.is_error() | (numbers[:, VALUES] != 0).any() | differ


def _several(numbers: list[int]) -> Exception:
    return RuntimeError(
        f"messages of different accumulators have met: those of numbers {numbers}, counted in the "
        f"order in which each rank has made or opened them. All ranks must make, open, finish and "
        f"read those that they share in the same order"
    )


def _disagreement(name: str, said: list[Any]) -> Exception:
    """The error for a setting ``name`` whose values by rank are ``said``."""
    if name == "opened":
        return _several(said)
    if name == "purpose":
        at = ", ".join(f"{n} to {purpose}" for purpose, n in Counter(said).items())
        return RuntimeError(
            f"the {len(said)} ranks are at different places, {at}: each rank needs the same "
            f"windows and the same calls of metrics(). Did one run out of data?"
        )
    have = " and ".join(f"{x!r} on {n}" for x, n in Counter(said).items())
    return ValueError(
        f"{name} must be the same on all ranks: it is {have} of the {len(said)} ranks"
    )
