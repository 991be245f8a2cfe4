"""The exchange between the ranks of an accumulator: sums, settings and errors at once.

One process is a group of one rank, whose table has one row and needs no collective.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fusedce import agreement
from fusedce.accumulate import faults as _faults
from fusedce.agreement import Told
from fusedce.contract.groups import Ranks
from fusedce.contract.results import MONITORS

# The purposes of an exchange, which must be the same on all ranks.
WINDOW, FINISH = "open a window", "finish a window"
CLOSE, METRICS = "leave a window", "read metrics"
UNNAMED = ""  # the name of a window's only loss where the user gave none
KINDS = ("loss_sum", "n_valid", *(x for name in MONITORS for x in (name, f"{name} of")))
_CPU = torch.device("cpu")
VALUES = 128  # float64 values in a message that are summed over ranks
_SAID = 2  # int64 values in a message: see `said` of Exchange.send
LENGTH = agreement.TEXT + VALUES + _faults.ROW + _SAID
_UNREAD = 32  # messages on a device that wait to be read, at most
GRACE = timedelta(seconds=1)  # time for other ranks to report errors before one is raised
_ADVICE = (
    "Look at what the other ranks do: each needs the same windows, the same number of "
    "micro-batches in them (empty ones may be all ignored) and the same calls of metrics(), and "
    "one that has failed says why in its own output"
)
_COUNTERS: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


def known(error: BaseException) -> BaseException:
    """Mark an error of which all ranks know."""
    error.is_known = True  # type: ignore[attr-defined]
    return error


def is_known(error: BaseException) -> bool:
    """Whether all ranks know of an error."""
    return getattr(error, "is_known", False)


class Pending(NamedTuple):
    """A message that was sent; :meth:`wait` gives the sums over ranks."""

    exchange: Exchange
    purpose: str
    table: Tensor
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
        values = self.table[:, agreement.TEXT :][:, :VALUES]
        return values.contiguous().view(torch.float64).sum(0)

    def read_rows(self) -> list[Told]:
        """The rows of all ranks, if they arrive on a CPU within :data:`GRACE`; else none."""
        if self.work is not None and _faults.readable(self.table.device):
            with contextlib.suppress(RuntimeError):  # the others are elsewhere, or gone
                if self.work.wait(GRACE):
                    return agreement.read(self.table)
        return []


class Exchange:
    """Messages between the ranks of one accumulator, each an all-gather of one row per rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._number: int | None = None
        self._unread: list[Tensor] = []  # messages on a device

    def __reduce__(self) -> Any:
        return Exchange, (self.ranks,)

    def number(self) -> int:
        """Its number among those of the same ranks, in the order of their first use.

        One rank may make accumulators alone; those that are used are the same on all ranks.
        """
        if self._number is None:
            self._number = next(_COUNTERS[self.ranks.name()])
        return self._number

    def send(
        self,
        purpose: str,
        values: Tensor,
        settings: Mapping[str, object],
        said: tuple[int, int] = (0, 0),
        fault: Tensor | None = None,
    ) -> Pending:
        """Start one all-gather.

        Args:
            purpose: one of the four of this module, equal on all ranks.
            values: ``(n,)``, this rank's numbers, to be summed over ranks as float64.
            settings: must be equal on all ranks.
            said: the number of declared micro-batches plus one, and a hash of the losses, equal on
                all ranks that have them. Zeros say nothing.
            fault: the first error that this rank has found in tensors.
        """
        group, values = self.ranks.group(), values.detach().double()
        at = values.device if group is None else agreement.device_for(group, values.device)
        if fault is None:
            fault = torch.zeros(_faults.ROW, dtype=torch.int64, device="cpu")
        padding = torch.zeros(VALUES - len(values), dtype=torch.int64, device=at)
        numbers = [values.view(torch.int64), padding, fault, torch.tensor(said, device="cpu")]
        row = torch.cat([_faults.moved(x, at) for x in numbers])
        text = {"accumulator": self.number(), "purpose": purpose, **settings}
        pending = self._post(purpose, agreement.row(text, row))
        assert pending is not None
        return pending

    def fail(self, purpose: str, error: BaseException) -> None:
        """Send ``error`` to the other ranks, which come for ``purpose``; give them time to hear."""
        self.number()
        if (group := self.ranks.group()) is None:
            return
        words, device = agreement.words_of(known(error)), agreement.device_for(group, _CPU)
        nothing = torch.zeros(LENGTH - agreement.TEXT, dtype=torch.int64, device=device)
        row = agreement.row(words, nothing)
        with contextlib.suppress(RuntimeError):  # no rank has answered
            sent = self._post(purpose, row, words)
            if purpose == WINDOW and not _faults.readable(device):
                # Ranks that do not read their device go on until the window's end.
                self._post(CLOSE, row, words)
            if sent is not None:
                sent.read_rows()

    @contextlib.contextmanager
    def tell_peers_on_error(self, purpose: str) -> Iterator[None]:
        """Send an error of the block to the other ranks, which come for ``purpose``; raise it."""
        try:
            yield
        except Exception as error:
            self.fail(purpose, error)
            raise

    def _post(self, purpose: str, row: Tensor, error: str = "") -> Pending | None:
        """Send a row; ``None`` if the other ranks hear of ``error`` without it."""
        if (group := self.ranks.group()) is None:
            return Pending(self, purpose, row[None])
        with self.waiting(purpose):
            own = agreement.own_group(group, error)
        if isinstance(own, Exception):
            raise known(own)
        return None if own is None else Pending(self, purpose, *agreement.send(row, own))

    def check(self, table: Tensor) -> None:
        """Raise the error that a message holds; on a device, keep it until a value is read."""
        self._unread.append(table)
        if _faults.readable(table.device) or len(self._unread) > _UNREAD:
            self.raise_unread()

    def raise_unread(self) -> None:
        """Raise the first error that kept messages hold, and forget them. Waits for a device."""
        unread, self._unread = self._unread, []
        for table in unread:
            if (error := explain(agreement.read(table))) is not None:
                raise known(error)

    @contextlib.contextmanager
    def waiting(self, purpose: str) -> Iterator[None]:
        """Explain an error of waiting: other ranks have not come in time."""
        try:
            yield
        except RuntimeError as error:
            words = agreement.not_all_came(self.ranks.group(), purpose)
            raise known(RuntimeError(f"{words}. {_ADVICE}")) from error


def explain(rows: list[Told]) -> Exception | None:
    """The error that the rows of all ranks amount to, equal on all of them; ``None`` if none."""
    if (failure := agreement.failure_of(rows)) is not None:
        return failure
    if (differ := agreement.differing(rows)) is not None:
        name, said = differ
        have = " and ".join(f"{x!r} on {n}" for x, n in Counter(said).items())
        if name == "accumulator":
            return RuntimeError(
                f"messages of different accumulators have met: those of numbers {said}, counted in "
                f"the order in which each rank has used them first. All ranks must open, finish "
                f"and read those that they share in the same order"
            )
        if name == "purpose":
            at = ", ".join(f"{n} to {purpose}" for purpose, n in Counter(said).items())
            return RuntimeError(
                f"the {len(said)} ranks are at different places, {at}: each rank needs the same "
                f"windows and the same calls of metrics(). Did one run out of data?"
            )
        return ValueError(
            f"{name} must be the same on all ranks: it is {have} of the {len(said)} ranks"
        )
    for one in rows:
        if (fault := _faults.of_row(one.numbers[VALUES:-_SAID])) is not None:
            return fault
    counts, losses = (
        {one.numbers[i]: rank for rank, one in enumerate(rows) if one.numbers[i]} for i in (-2, -1)
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
