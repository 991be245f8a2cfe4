"""What one rank tells the others in one row of float64, and what they read in the sum of all rows.

What ranks must agree on is sent as ``x`` and ``x^2``: numbers are equal exactly where their
variance is zero.
"""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fusedce.accumulate import faults as _faults

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


def written(
    values: Tensor,
    place: str,
    terms: Terms,
    fault: Tensor,
    failure: Exception | None,
    rank: int,
) -> Tensor:
    """``(LENGTH,)`` float64 on the device of ``fault (ROW,)``: ``values (n,)`` and all the rest."""
    words = "" if failure is None else f"{type(failure).__name__}: {failure}"
    agree = [float(terms.has_loss and getattr(terms, name)) for name in _AGREE]
    told = [
        *[0.0] * (VALUES - len(values)),
        float(terms.has_loss),
        *agree,
        *[x * x for x in agree],
        *map(float, terms.settings),
        *[float(place == other) for other in PLACES],
        float(failure is not None),
        float(failure is not None and rank),
        *[float(x) for x in (hash_of(words), hash_of(words) ** 2)],
    ]
    host = torch.tensor([*told, *_encode(words)], dtype=torch.float64)
    host = _faults.moved(host, fault.device)
    values = _faults.moved(values, fault.device)
    return torch.cat([values, host[: len(told)], fault, host[len(told) :]])


def is_error(message: Tensor, ranks: int) -> Tensor:
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
