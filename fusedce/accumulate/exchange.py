"""The exchange between the ranks of an accumulator: sums, settings and errors at once.

A rank that finds an error sends its words instead of its sums, so that all ranks raise it. The host
reads each message where it needs it: at a window's beginning (declared counts) and end.

One process is a group of one rank, whose table has one row and needs no collective.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import agreement
from ..agreement import RankReport
from ..contract.groups import Ranks
from ..contract.results import MONITORS

# The purposes of an exchange, which must be the same on all ranks.
WINDOW, FINISH = "open a window", "finish a window"
CLOSE, METER = "leave a window", "compute a LossMeter"
SUMS = ("loss_sum", "n_valid", *(x for name in MONITORS for x in (name, f"{name} of")))
# A step may have so many losses. Each row has room for the sums of all of them: ranks that name
# different losses must meet in one all-gather to hear of it.
MOST_LOSSES = 8
_NUMBERS = MOST_LOSSES * len(SUMS)
LENGTH = agreement.TEXT + _NUMBERS + 1
GRACE = timedelta(seconds=1)  # time for other ranks to report errors before one is raised
_CPU = torch.device("cpu")
_ADVICE = (
    "Look at what the other ranks do: each needs the same windows and the same number of "
    "micro-batches in them (add some with all labels ignored), and one that has failed says why in "
    "its own output"
)


def mark_shared(error: BaseException) -> BaseException:
    """Mark an error of which all ranks know."""
    error.is_shared = True  # type: ignore[attr-defined]
    return error


class Pending(NamedTuple):
    """A message that was sent; :meth:`wait` gives the sums over ranks."""

    exchange: Exchange
    purpose: str
    table: Tensor
    work: dist.Work | None = None  # None on a single rank

    def wait(self) -> list[float]:
        """The sums over ranks, :data:`SUMS` of each loss after the other.

        Raises the same error on all ranks if one has failed or settings differ, and
        ``RuntimeError`` if others have not come within the timeout.
        """
        if self.work is not None:
            with self.exchange.waiting(self.purpose):
                self.work.wait()
        rows = agreement.read(self.table)
        if (error := explain(rows)) is not None:
            raise mark_shared(error)
        bits = (struct.pack(f"{_NUMBERS}q", *one.numbers[:_NUMBERS]) for one in rows)
        floats = (struct.unpack(f"{_NUMBERS}d", x) for x in bits)
        return [sum(of_ranks) for of_ranks in zip(*floats, strict=True)]

    def read_rows(self) -> list[RankReport]:
        """The rows of all ranks, if they arrive on a CPU within :data:`GRACE`; else none.

        On a GPU ``wait`` only orders streams, and reading the table would block without a limit.
        """
        if self.work is not None and self.table.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # the others are elsewhere, or gone
                if self.work.wait(GRACE):
                    return agreement.read(self.table)
        return []


class Exchange:
    """Messages between the ranks of an accumulator or meter, each an all-gather of a row per rank.

    Args:
        name: what tells accumulators of the same ranks apart.
    """

    def __init__(self, ranks: Ranks, name: str | None = None) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a string, got {type(name).__name__}")
        self.ranks, self.name = ranks, name

    def send(
        self,
        purpose: str,  # one of the four of this module, equal on all ranks
        values: Sequence[float],  # to be summed over ranks
        settings: Mapping[str, object],  # must be equal on all ranks
        micro: int = 0,  # declared micro-batches plus one; 0 on ranks without losses
    ) -> Pending:
        """Start one all-gather. The first one makes a group for it, and waits for all ranks."""
        group = self.ranks.group()
        at = _CPU if group is None else agreement.device_for(group, _CPU)
        # As bits in int64: one collective carries numbers, settings and words, and every rank adds
        # up the same numbers in the same order.
        floats = struct.pack(f"{_NUMBERS}d", *values, *[0.0] * (_NUMBERS - len(values)))
        numbers = [*struct.unpack(f"{_NUMBERS}q", floats), micro]
        # (A tensor made on a GPU would wait for all work before it.)
        row = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(at, non_blocking=True)
        text = {"name": self.name, "purpose": purpose, **settings}
        pending = self._post(purpose, agreement.row(text, row))
        assert pending is not None
        return pending

    def fail(self, purpose: str, error: BaseException) -> None:
        """Send ``error`` to the other ranks, which come for ``purpose``; give them time to hear."""
        if (group := self.ranks.group()) is None:
            return
        words, device = agreement.error_text(mark_shared(error)), agreement.device_for(group, _CPU)
        nothing = torch.zeros(LENGTH - agreement.TEXT, dtype=torch.int64, device=device)
        row = agreement.row(words, nothing)
        with contextlib.suppress(RuntimeError):  # no rank has answered
            sent = self._post(purpose, row, words)
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
        # A group of its own: in the engine's, a message could meet a gradient's all-reduce.
        with self.waiting(purpose):
            own = agreement.own_group(group, error)
        if isinstance(own, Exception):
            raise mark_shared(own)
        return None if own is None else Pending(self, purpose, *agreement.send(row, own))

    @contextlib.contextmanager
    def waiting(self, purpose: str) -> Iterator[None]:
        """Explain an error of waiting: other ranks have not come in time."""
        try:
            yield
        except RuntimeError as error:
            words = agreement.not_all_came(self.ranks.group(), purpose)
            raise mark_shared(RuntimeError(f"{words}. {_ADVICE}")) from error


def explain(rows: list[RankReport]) -> Exception | None:
    """The error that all ranks raise for the rows of all of them; ``None`` if none."""
    if (failure := agreement.failure_of(rows)) is not None:
        return failure
    if (differ := agreement.differing(rows)) is not None:
        name, said = differ
        have = " and ".join(f"{x!r} on {n}" for x, n in Counter(said).items())
        if name == "name":
            return RuntimeError(
                f"messages of different LossAccumulators have met, or of LossMeters, those named "
                f"{said} (one per rank): all ranks must open and finish the windows of those that "
                f"they share in the same order, and compute meters so"
            )
        if name == "purpose":
            at = ", ".join(f"{n} to {purpose}" for purpose, n in Counter(said).items())
            return RuntimeError(
                f"the {len(said)} ranks are at different places, {at}: each rank needs the same "
                f"windows and evaluations. Did one run out of data?"
            )
        return ValueError(
            f"{name} must be the same on all ranks: it is {have} of the {len(said)} ranks"
        )
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


def read(values: Iterable[Tensor]) -> list[Any]:
    """The numbers of ``()`` tensors of one dtype, in one copy: this waits for their device."""
    values = list(values)
    at = values[0].device if values else _CPU
    return torch.stack([x.to(at, non_blocking=True) for x in values]).tolist() if values else []
