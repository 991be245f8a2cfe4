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

# The purposes of an exchange, which must be the same on all ranks.
WINDOW, FINISH, CLOSE, METRICS = (
    "open a window",
    "finish a window",
    "leave a window",
    "read metrics",
)
VALUES = 128  # float64 values in a message that are summed over ranks
_SIGNATURE = 2  # int64 values in a message: see `signature` of Exchange.send
LENGTH = agreement.TEXT + VALUES + _faults.ROW + _SIGNATURE
_ADVICE = (
    "Look at what the other ranks do: each needs the same windows, the same number of "
    "micro-batches in them (empty ones may be all ignored) and the same calls of metrics(), and "
    "one that has failed says why in its own output. With TORCH_DISTRIBUTED_DEBUG=INFO, a rank "
    "that begins a micro-batch looks whether another one has ended the window, before it waits"
)
_WAITED = re.compile(r"time(d |-)?out|connection (closed|reset)", re.IGNORECASE)
GRACE = timedelta(seconds=1)  # time for other ranks to report errors before one is raised
_FAILED = -1  # in a mark of an ended window: an error ended it


@dataclass
class Pending:
    """A message that was sent; :meth:`wait` gives the sums over ranks."""

    values: Tensor  # (n,) float64, this rank's
    exchange: Exchange
    purpose: str = ""
    table: Table | None = None  # rows of all ranks; None on a single one
    work: dist.Work | None = None
    _sums: Tensor | None = field(default=None, init=False)

    def wait(self) -> Tensor:
        """The sums over ranks, ``(n,)`` float64. On a device, only its queue waits, not the host.

        Raises:
            RuntimeError, TypeError, ValueError: one rank has failed, or settings differ; the error
                is the same on all ranks. On a device it is raised when a value is read there.
            RuntimeError: other ranks have not come within the group's timeout.
        """
        if self.table is None:
            return self.values
        if self._sums is None:
            assert self.work is not None
            with self.exchange.waiting(self.purpose):
                self.work.wait()
            self.exchange.check(self.table)  # a second wait raises the error again
            values = self.table.numbers()[:, : len(self.values)].contiguous()
            self._sums = values.view(torch.float64).sum(0)
        return self._sums

    def read_rows(self) -> list[Told]:
        """The rows of all ranks, if they arrive on a CPU within :data:`GRACE`; else none."""
        if self.table is not None and _faults.readable(self.table.rows.device):
            assert self.work is not None
            with contextlib.suppress(RuntimeError):  # the others are elsewhere, or gone
                if self.work.wait(GRACE):
                    return self.table.read()
        return []


_COUNTERS: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class Exchange:
    """Messages between the ranks of one accumulator, each an all-gather of one row per rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.shared_error: BaseException | None = None  # the last error that all ranks were told of
        # The same accumulator has the same number on all ranks, which make them in the same order.
        self._number = next(_COUNTERS[ranks.name()])
        self._n_messages = 0  # messages so far
        self._unread: Table | None = None  # the first device message that is an error

    @contextlib.contextmanager
    def tell_peers_on_error(self, purpose: str) -> Iterator[None]:
        """Send an error of the block to the other ranks, which come for ``purpose``; raise it."""
        try:
            yield
        except Exception as error:
            self.fail(purpose, error)
            raise

    def send(
        self,
        purpose: str,
        values: Tensor,
        settings: Mapping[str, object],
        signature: tuple[int, int] = (0, 0),
        faults: _faults.Faults | None = None,
    ) -> Pending:
        """Start one all-gather of ``values (n,)``, as float64.

        Args:
            purpose: one of the four of this module, equal on all ranks.
            values: this rank's numbers, to be summed over ranks.
            settings: must be equal on all ranks.
            signature: the number of micro-batches plus one, and a hash of the losses, equal on all
                ranks that have losses; ranks without any send zeros.
            faults: the first error that this rank has found in tensors.
        """
        values = values.detach().double()
        if (group := self.ranks.group()) is None:
            return Pending(values, self)
        values = _faults.moved(values, agreement.device_for(group, values.device))
        row = (faults or _faults.Faults(False)).row(values.device)
        losses = _faults.moved(torch.tensor(signature, device="cpu"), values.device)
        padding = row.new_zeros(VALUES - len(values))
        numbers = [values.view(torch.int64), padding, row, losses]
        ends = purpose == FINISH and signature[0] > 0
        if ends:
            self._mark(signature[0] - 1)
        text = {"accumulator": self._number, "purpose": purpose, **settings}
        sent = self._post(purpose, values, text, torch.cat(numbers))
        if ends:
            self._check_ahead(signature[0] - 1, sent)
        return sent

    def fail(self, purpose: str, error: BaseException) -> None:
        """Send ``error`` to the other ranks, which come for ``purpose``.

        Errors that they report within :data:`GRACE` become notes of this one (Python 3.11).
        """
        if (group := self.ranks.group()) is None:
            return
        words = words_of(error)
        device = agreement.device_for(group, torch.device("cpu"))
        nothing = torch.zeros(LENGTH - agreement.TEXT, dtype=torch.int64, device=device)
        with contextlib.suppress(RuntimeError):  # no rank has answered
            if purpose in (FINISH, CLOSE):
                self._mark(_FAILED)
            sent = self._post(purpose, nothing.double(), words, nothing)
            if purpose == WINDOW and not _faults.readable(device):
                # Ranks that do not read their device go on until the window's end.
                self._post(CLOSE, nothing.double(), words, nothing)
            others = (one.error for one in sent.read_rows())
            agreement.add_notes(error, [x for x in others if x not in ("", words)])
        self.shared_error = error

    def _post(
        self, purpose: str, values: Tensor, text: Mapping[str, object] | str, numbers: Tensor
    ) -> Pending:
        """Start the all-gather of one message, ``numbers (LENGTH - TEXT,)`` int64."""
        group = self.ranks.group()
        assert group is not None
        self._n_messages += 1
        with self.waiting(purpose):
            group = agreement.own_group(group)
        table, work = agreement.send(agreement.row(text, numbers), group)
        return Pending(values, self, purpose, table, work)

    # ---- errors -----------------------------------------------------------------------------

    def check(self, table: Table) -> None:
        """Raise the error that a message holds; on a device, keep it until a value is read."""
        if _faults.readable(table.rows.device):
            if (error := explain(table.read())) is not None:
                self.shared_error = error
                raise error
        elif self._unread is None:
            self._unread = table
        else:
            rows = torch.where(_is_error(self._unread), self._unread.rows, table.rows)
            self._unread = Table(rows)

    def raise_unread(self) -> None:
        """Raise the error that messages on a device hold, and forget it. Waits for the device."""
        if self._unread is not None:
            table, self._unread = self._unread, None
            if (error := explain(table.read())) is not None:
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

    def note_wait(self, error: BaseException) -> None:
        """Add the advice as a note to an error of the engine's own collective that timed out."""
        if self.ranks.group() is not None and _WAITED.search(str(error)):
            getattr(error, "add_note", str)(f"in a window of LossAccumulator: {_ADVICE}")

    # ---- marks of ended windows, under TORCH_DISTRIBUTED_DEBUG ------------------------------

    # An exchange waits for all ranks, and so does each backward of DDP. A rank that has run out of
    # micro-batches, or failed, enters the exchange while others enter a backward: a deadlock. So a
    # rank that ends a window or begins a micro-batch first sets a mark in the store of
    # torch.distributed and then reads the marks of the others; at least one of two such ranks finds
    # the mark of the other. This costs two requests per micro-batch to one server.
    #
    # Keys hold the number of messages that were sent before the window's last one, equal on all
    # ranks: "begun/M/3" says that a rank has begun micro-batch 3 of that window, "end/M" after how
    # many micro-batches a rank has ended it. The message that ends the window raises `_n_messages`
    # to M + 1, so what is read after it was sent subtracts 1.

    def before_micro_batch(
        self, n_done: int, streams: bool, settings: Mapping[str, object]
    ) -> None:
        """Raise, before micro-batch ``n_done + 1``, if another rank has ended the window.

        Args:
            n_done: micro-batches that this rank has differentiated in the window.
            streams: whether this is a streaming window. In one of declared counts, only a rank that
                has failed ends the window early.
            settings: as for :meth:`send`.
        """
        if (store := self._store()) is None:
            return
        with _explaining_store_errors():
            store.set(f"begun/{self._n_messages}/{n_done + 1}", str(self.ranks.rank()))
            key = f"end/{self._n_messages}"
            ended = int(store.get(key)) if store.check([key]) else None
        if ended == _FAILED or (streams and ended is not None and ended <= n_done):
            nothing = torch.zeros(0, dtype=torch.float64, device="cpu")
            self.send(FINISH if streams else CLOSE, nothing, settings, (n_done + 2, 0)).wait()
            self.raise_unread()

    def _mark(self, micro_batches: int) -> None:
        """Mark the window as ended after ``micro_batches``, or by an error (:data:`_FAILED`).

        It is called before the message that ends the window is sent.
        """
        if (store := self._store()) is not None:
            with _explaining_store_errors():
                store.set(f"end/{self._n_messages}", str(micro_batches))

    def _check_ahead(self, micro_batches: int, sent: Pending) -> None:
        """Raise if a rank has begun more micro-batches of the window that this one has ended.

        It is called after the message that ends the window was sent. A rank that has found this
        one's mark answers it soon; then the message tells all ranks the same.
        """
        if (store := self._store()) is None:
            return
        n_before = self._n_messages - 1  # as when the window ran
        key = f"begun/{n_before}/{micro_batches + 1}"
        with _explaining_store_errors():
            rank = int(store.get(key)) if store.check([key]) else None
        if rank is not None and not sent.read_rows():
            raise RuntimeError(
                f"ranks have different numbers of micro-batches in this window: this one ends "
                f"it after {micro_batches}, rank {rank} has begun number {micro_batches + 1}. Each "
                f"rank needs the same number; empty ones may be all ignored. (If DDP reduces "
                f"gradients in that one's backward, it waits there until this process ends.)"
            )

    def _store(self) -> dist.Store | None:
        """The store for marks; ``None`` unless torch's debug switch asks for them."""
        group = self.ranks.group()
        if group is None or dist.get_debug_level() == dist.DebugLevel.OFF:
            return None
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"fusedce/{group.group_name}/{self._number}", store)


@contextlib.contextmanager
def _explaining_store_errors() -> Iterator[None]:
    """Raise ``RuntimeError`` with advice where the store cannot be reached."""
    try:
        yield
    except dist.DistError as error:
        raise RuntimeError(
            "the store of torch.distributed, in which ranks leave marks under "
            "TORCH_DISTRIBUTED_DEBUG, cannot be reached: the process that serves it, rank 0's or "
            "torchrun, has ended. Look at what rank 0 has printed, and let all ranks end together "
            "(dist.barrier())"
        ) from error


def explain(rows: list[Told]) -> Exception | None:
    """The error that the rows of all ranks amount to, equal on all of them; ``None`` if none."""
    if (failure := agreement.failure_of(rows)) is not None:
        return failure
    if (differ := agreement.differing(rows)) is not None:
        return _disagreement(*differ)
    faults = [_faults.of_row(one.numbers[VALUES:-_SIGNATURE]) for one in rows]
    if (fault := next((x for x in faults if x is not None), None)) is not None:
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
            f"{counts[few]}, {many - 1} on rank {counts[many]}. Each rank needs the same number; "
            f"empty ones may be all ignored."
        )
    return None


def _is_error(table: Table) -> Tensor:
    """``()`` bool on the table's device: whether :func:`explain` finds an error."""
    numbers = table.numbers()
    losses = numbers[:, -_SIGNATURE:]
    differ = ((losses != 0) & (losses != losses.amax(0))).any()
    return table.is_error() | (numbers[:, VALUES] != 0).any() | differ


def _disagreement(name: str, said: list[Any]) -> Exception:
    """The error for a setting ``name`` whose values by rank are ``said``."""
    have = [f"{x!r} on {n}" for x, n in Counter(said).items()]
    if name == "accumulator":
        return RuntimeError(
            f"messages of different accumulators have met: those of numbers {said}, counted in the "
            f"order in which each rank has made them. All ranks must make the same accumulators in "
            f"the same order, and open, finish and read them in the same order"
        )
    if name == "purpose":
        at = ", ".join(f"{n} to {purpose}" for purpose, n in Counter(said).items())
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
