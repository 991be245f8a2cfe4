"""The exchange between the ranks of an accumulator: sums, settings and errors at once.

One process is a group of one rank, whose table has one row and needs no collective.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedce import agreement
from fusedce.agreement import Told
from fusedce.contract.groups import Ranks
from fusedce.contract.labels import bad_label_message
from fusedce.contract.results import MONITORS

# The purposes of an exchange, which must be the same on all ranks.
WINDOW, FINISH = "open a window", "finish a window"
CLOSE, METRICS = "leave a window", "read metrics"
KINDS = ("loss_sum", "n_valid", *(x for name in MONITORS for x in (name, f"{name} of")))
_CPU = torch.device("cpu")
FAULT = 4  # int64 values of a fault: its kind, then that error's numbers; zeros if none
LENGTH = agreement.TEXT + len(KINDS) + FAULT + 1
_UNREAD = 32  # messages on a device that wait to be read, at most
GRACE = timedelta(seconds=1)  # time for other ranks to report errors before one is raised
_ADVICE = (
    "Look at what the other ranks do: each needs the same windows, the same number of "
    "micro-batches in them (add some with all labels ignored) and the same calls of metrics(), and "
    "one that has failed says why in its own output"
)
_COUNTERS: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


def known(error: BaseException) -> BaseException:
    """Mark an error of which all ranks know."""
    error.is_known = True  # type: ignore[attr-defined]
    return error


class Pending(NamedTuple):
    """A message that was sent; :meth:`wait` gives the sums over ranks."""

    exchange: Exchange
    purpose: str
    table: Tensor
    work: dist.Work | None = None  # None on a single rank

    def wait(self) -> Tensor:
        """The sums over ranks, ``(KINDS,)`` float64. On a device only its queue waits.

        Raises the same error on all ranks if one has failed or settings differ (on a device, when a
        value is read there), and ``RuntimeError`` if others have not come within the timeout.
        """
        if self.work is not None:
            with self.exchange.waiting(self.purpose):
                self.work.wait()
        self.exchange.check(self.table)
        values = self.table[:, agreement.TEXT :][:, : len(KINDS)]
        return values.contiguous().view(torch.float64).sum(0)

    def read_rows(self) -> list[Told]:
        """The rows of all ranks, if they arrive on a CPU within :data:`GRACE`; else none."""
        if self.work is not None and readable(self.table.device):
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
        """Number of this accumulator among those of the same ranks, in the order of first use.

        A rank may make accumulators that it never uses; only those that are used are counted.
        """
        if self._number is None:
            self._number = next(_COUNTERS[self.ranks.name()])
        return self._number

    def send(
        self,
        purpose: str,  # one of the four of this module, equal on all ranks
        values: Tensor,  # at most (KINDS,), to be summed over ranks as float64
        settings: Mapping[str, object],  # must be equal on all ranks
        micro: int = 0,  # declared micro-batches plus one; 0 on ranks without losses
        fault: Tensor | None = None,  # (FAULT,) int64: the first that this rank has found
    ) -> Pending:
        """Start one all-gather."""
        group, values = self.ranks.group(), F.pad(values.double(), (0, len(KINDS) - len(values)))
        at = values.device if group is None else agreement.device_for(group, values.device)
        if fault is None:
            fault = torch.zeros(FAULT, dtype=torch.int64, device="cpu")
        numbers = [values.view(torch.int64), fault, torch.tensor([micro], device="cpu")]
        row = torch.cat([moved(x, at) for x in numbers])
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
            if purpose == WINDOW and not readable(device):
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
        if readable(table.device) or len(self._unread) > _UNREAD:
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
                f"messages of different accumulators have met: those of numbers {said} (one per "
                f"rank), in the order of their first use there. All ranks must open, finish and "
                f"read the accumulators that they share in the same order"
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
        if (fault := fault_of(one.numbers[len(KINDS) : -1])) is not None:
            return fault
    counts = {one.numbers[-1]: rank for rank, one in enumerate(rows) if one.numbers[-1]}
    if len(counts) > 1:
        few, many = min(counts), max(counts)
        return RuntimeError(
            f"ranks have different numbers of micro-batches in this window: {few - 1} on rank "
            f"{counts[few]}, {many - 1} on rank {counts[many]}. Each rank declares the same number "
            f"(add some with all labels ignored); streaming allows others, if the engine waits for "
            f"other ranks only in the last backward (DDP under no_sync())"
        )
    return None


# ---- errors in tensors -------------------------------------------------------------------------

# A fault is a row of FAULT int64, made without waiting for a device, which the message that ends a
# window carries.
NONE, BAD_LABEL, OTHER_COUNT, MULTIPLIED, GONE, LEFT, WRITTEN, DIVIDED, MEAN = range(9)
TWICE = (
    "Or was a loss differentiated twice (retain_graph=True)? It counts twice, the second time as "
    "the next micro-batch"
)
_WORDS = {
    OTHER_COUNT: "window: micro-batch {} was declared with {} valid tokens, its loss counts {}. "
    "Does the loss get labels without shift_labels(labels), which drops the first of every "
    f"sequence? Were they counted before the shift, or with another ignore_index? {TWICE}",
    MULTIPLIED: "the loss was multiplied by {:g} after scale(): the window has divided it by all "
    "of its tokens already, so leave other divisions out (by the number of micro-batches, of "
    "ranks), or name a constant that the engine divides by as backward_divisor= (accelerate: "
    "LossAccumulator.from_accelerator)",
    GONE: "zero_grad() was called inside a window: the gradients of its earlier micro-batches are "
    "gone, though their tokens count. Call it once a window, after optimizer.step() (to drop the "
    "window, call discard_window() as well, or leave the `with` block by raising)",
    LEFT: "the window began over gradients that were there before it: those of the last step "
    "(zero_grad() is missing after optimizer.step()), or of another backward, which finish() would "
    "rescale (add it in a window with declared counts, or after finish())",
    WRITTEN: "gradients were changed inside a window by something else than its losses: clip and "
    "unscale after finish() or the last micro-batch; another loss (a regulariser, one of another "
    "accumulator) needs a window with declared counts, or comes after finish(). Several fused "
    "losses: `with a.window(...), b.window(...): (a.scale(x) + b.scale(y)).backward()`",
    DIVIDED: "the pipeline's schedule divides all gradients by its {} micro-batches, which the "
    "window has divided by all of its tokens already: make it with scale_grads=False",
    MEAN: "out must be (loss_sum, n_valid), got a mean: the loss was divided by its {} tokens "
    "before the accumulator got it, which divides by all tokens of the window. Give the sum: "
    "fused_ce(...) itself, or (mean * n, n)",
}


def fault_of(row: Sequence[int]) -> Exception | None:
    """The error that a row describes; ``None`` if there is none."""
    kind, *numbers = row
    if kind == BAD_LABEL:
        return ValueError(bad_label_message(numbers[0]))
    if kind == MULTIPLIED:  # by the float64 of these bits
        numbers = list(struct.unpack("d", struct.pack("q", numbers[0])))
    error = ValueError if kind == MEAN else RuntimeError
    return error(_WORDS[kind].format(*numbers)) if kind else None


def first(kind: int, wrong: Tensor, *numbers: Tensor) -> Tensor:
    """The row of the first case ``(cases,)`` that is ``wrong``, with its ``numbers``; or zeros."""
    kinds = torch.full_like(wrong, kind, dtype=torch.int64)
    columns = [kinds, *numbers, *[torch.zeros_like(kinds)] * (FAULT - 1 - len(numbers))]
    rows = torch.stack([moved(x, wrong.device) for x in columns], 1)
    at = wrong.int().argmax().reshape(1)
    return torch.where(wrong.any(), rows.index_select(0, at)[0], 0)


def first_of(rows: Iterable[Tensor | None]) -> Tensor | None:
    """The first of these rows that is a fault; ``None`` without any row."""
    found: Tensor | None = None
    for row in rows:
        if found is not None and row is not None:
            row = torch.where(found[0] == NONE, moved(row, found.device), found)
        found = found if row is None else row
    return found


def moved(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; a copy from the host does not wait for work queued on the device."""
    return x.to(device, non_blocking=x.device.type == "cpu")


def together(values: Iterable[Tensor]) -> Tensor:
    """Tensors of equal shape, stacked on the device of the first one."""
    values = list(values)
    return torch.stack([moved(x, values[0].device) for x in values])


def readable(device: torch.device) -> bool:
    """Whether a value on ``device`` can be read without waiting."""
    return device.type == "cpu"
