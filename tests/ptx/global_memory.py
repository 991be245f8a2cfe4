"""Global memory of one launch: the tensors it was given, with room around each.

Every access must lie inside a tensor and be aligned to its size. Of each 2 bytes it is known which
CTA wrote them, in which epoch and by which warp.

Inside a CTA, an access to what another warp wrote in the same epoch is a race, and so is a write
over what one other warp alone has read. (Where several have, it is none: of a number that it adds
to, Triton has every warp read the old value and one of them write the new one.)

Between CTAs, a place that one has written may be touched by another only where an atomic that
releases (by the writer, after the write) and one that acquires (by the other, before its access)
met at one address, as the PTX memory model has it. CTAs run one after the other, in an order of the
launch's choice; a race shows as an access that nothing orders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ptx.races import GRANULE, Touched, granules, store_once

if TYPE_CHECKING:
    from ptx.cta import Cta

BASE = 1 << 32
_ROOM = 512  # bytes around a tensor that no access may touch


class Moment(NamedTuple):
    """In the life of a CTA: an epoch, and a warp's part of it."""

    epoch: int
    warp: int


class Acquired(NamedTuple):
    """Writes of another CTA that a CTA may read: before ``by``, from ``since`` on."""

    by: Moment  # of the other
    since: Moment  # of one's own


class GlobalMemory:
    def __init__(self, size: int) -> None:
        """``size`` bytes; see :meth:`room_for`."""
        self.bytes = np.zeros(size, np.uint8)
        self._inside = np.zeros(size, bool)
        self._top = 0
        self._touched = Touched(size)
        self._author = np.full(size // GRANULE, -1, np.int32)  # number of the CTA
        self._released: dict[int, dict[int, Moment]] = {}  # by address: what CTAs released there
        self._acquired: dict[int, dict[int, Acquired]] = {}  # by CTA: of other CTAs

    @staticmethod
    def room_for(sizes: list[int]) -> int:
        return sum(-(-size // 256) * 256 + 3 * _ROOM for size in sizes) + _ROOM

    def place(self, data: np.ndarray, inside: list[tuple[int, int]], align: int = 256) -> int:
        """The address of a copy of ``data`` (bytes), of which ``inside`` may be touched."""
        begin = -(-(self._top + _ROOM) // align) * align
        self.bytes[begin : begin + data.size] = data
        for first, end in inside:
            self._inside[begin + first : begin + end] = True
        self._top = begin + data.size
        return BASE + begin

    def read_back(self, address: int, size: int) -> np.ndarray:
        return self.bytes[address - BASE : address - BASE + size]

    # ---- for CTAs ---------------------------------------------------------------------------

    def load(self, cta: Cta, at: np.ndarray, warps: np.ndarray, bits: type, count: int):
        """``(lanes, count)`` of ``bits`` at addresses ``at (lanes,)``."""
        size = np.dtype(bits).itemsize
        places = self._places(cta, at, size * count)
        self._order(cta, granules(places, size * count), warps, write=False)
        return self.bytes.view(bits)[places[:, None] // size + np.arange(count)]

    def store(self, cta: Cta, at: np.ndarray, warps: np.ndarray, values: np.ndarray) -> None:
        """``values (lanes, count)``."""
        size, count = values.dtype.itemsize, values.shape[1]
        places = self._places(cta, at, size * count)
        self._order(cta, granules(places, size * count), warps, write=True)
        store_once(cta, self.bytes.view(values.dtype), places[:, None] // size, values)

    def copy(self, cta: Cta, at: np.ndarray, warps: np.ndarray, size: int) -> np.ndarray:
        """``(lanes, size)`` bytes, for an asynchronous copy."""
        places = self._places(cta, at, size)
        self._order(cta, granules(places, size), warps, write=False)
        return self.bytes[places[:, None] + np.arange(size)]

    def tile(self, cta: Cta, at: np.ndarray) -> np.ndarray:
        """Bytes at addresses of any shape, for a copy of a tensor map."""
        places = at - BASE
        if not self._inside[places].all():
            cta.fault("TMA copy from outside of all tensors")
        return self.bytes[places]

    def add(self, cta: Cta, at: int, warp: int, more: int, *, orders: bool) -> int:
        """The old value of an atomic addition; what it orders is noted."""
        place = int(self._places(cta, np.array([at]), 4)[0])
        now, have = Moment(cta.epoch, warp), self._acquired.setdefault(cta.number, {})
        released = self._released.setdefault(place, {})
        if orders:  # it releases and acquires
            for other, moment in released.items():
                have[other] = Acquired(moment, now)
            for other, x in have.items():  # what was seen before is passed on
                if x.since.epoch < now.epoch or x.since.warp == warp:
                    released[other] = x.by
            released[cta.number] = now
        cell = self.bytes[place : place + 4].view(np.uint32)
        old = int(cell[0])
        cell[0] = (old + int(more)) & 0xFFFFFFFF
        return old

    def _places(self, cta: Cta, at: np.ndarray, size: int) -> np.ndarray:
        places = at - BASE
        if (places % size).any():
            cta.fault(f"misaligned access of {size} bytes of global memory")
        outside = (places < 0) | (places + size > self.bytes.size)
        if not outside.any():
            outside = ~(self._inside[places] & self._inside[places + size - 1])
        if outside.any():
            cta.fault(f"access out of bounds of every tensor, by {outside.sum()} threads")
        return places

    def _order(self, cta: Cta, g: np.ndarray, warps: np.ndarray, *, write: bool) -> None:
        author = self._author[g]
        others = (author >= 0) & (author != cta.number)
        if others.any():
            where, _ = np.nonzero(others)
            for other in np.unique(author[others]):
                of_other = author[others] == other
                own = warps[where[of_other]]
                self._must_be_seen(cta, int(other), g[others][of_other], own, write=write)
        self._touched.race(cta, g, warps, "global memory", write=write, several_may_read=True)
        if write:
            self._author[g] = cta.number

    def _must_be_seen(self, cta: Cta, other: int, g, warps, *, write: bool) -> None:
        seen = self._acquired.get(cta.number, {}).get(other)
        if seen is not None:
            written = self._touched.write_epoch[g], self._touched.writer[g]
            before = (written[0] < seen.by.epoch) | (
                (written[0] == seen.by.epoch) & (written[1] == seen.by.warp)
            )
            after = (cta.epoch > seen.since.epoch) | (warps == seen.since.warp)
            if (before & after).all():
                return
        what = "write over" if write else "read of"
        cta.fault(f"race of CTAs: {what} what CTA number {other} wrote, and nothing orders the two")
