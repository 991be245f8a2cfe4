"""Shared memory of a CTA, with a record of the last accesses to each place.

Beside races between warps it records asynchronous copies on their way into a place, wgmma that
still reads one, and the proxy through which a place was last accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx.races import GRANULE, Touched, granules, store_once

if TYPE_CHECKING:
    from ptx.cta import Cta


class Shared:
    def __init__(self, cta: Cta, size: int) -> None:
        n = size // GRANULE
        self.cta, self.size = cta, size
        self.bytes = np.zeros(size, np.uint8)
        self.touched = Touched(size)
        self.known = np.zeros(n, bool)  # ever written
        self.filling = np.zeros(n, np.int16)  # asynchronous copies on their way
        self.being_read = np.zeros(n, np.int16)  # wgmma that have not yet read
        self.generic = np.full(n, -1, np.int64)  # clock of the last access that is no TMA's
        self.copy = np.full(n, -1, np.int32)  # the TMA copy that filled it
        self.is_barrier = np.zeros(n, bool)

    def load(self, cta: Cta, at: np.ndarray, warps: np.ndarray, bits: type, count: int):
        """``(lanes, count)`` of ``bits`` at addresses ``at (lanes,)``."""
        size = np.dtype(bits).itemsize
        self.touch(at, warps, size * count, write=False)
        return self.bytes.view(bits)[at[:, None] // size + np.arange(count)]

    def store(self, cta: Cta, at: np.ndarray, warps: np.ndarray, values: np.ndarray) -> None:
        """``values (lanes, count)``."""
        size = values.dtype.itemsize
        self.touch(at, warps, size * values.shape[1], write=True)
        store_once(cta, self.bytes.view(values.dtype), at[:, None] // size, values)

    def touch(self, at: np.ndarray, warps: np.ndarray, size: int, *, write: bool) -> None:
        """Notes an ordinary access of lanes of ``warps``."""
        what = "write to" if write else "read of"
        self.must_fit(at, size, size)
        g = granules(at, size)
        if self.is_barrier[g].any():
            self.cta.fault(f"{what} an mbarrier by an ordinary instruction")
        if self.filling[g].any():
            self.cta.fault(f"{what} shared memory that an asynchronous copy still fills")
        self.touched.race(self.cta, g, warps, "shared memory", write=write)
        if write:
            if self.being_read[g].any():
                self.cta.fault("write to shared memory that wgmma still reads")
            self.known[g] = True
            self.copy[g] = -1
        elif not self.known[g].all():
            self.cta.fault("read of shared memory that was never written")
        self.generic[g] = self.cta.clock

    def must_fit(self, at: np.ndarray, size: int, align: int) -> None:
        if (at % align).any():
            self.cta.fault(f"misaligned access of {size} bytes of shared memory")
        if (at < 0).any() or (at + size > self.size).any():
            self.cta.fault(f"access out of the {self.size} bytes of shared memory")

    # ---- asynchronous copies ----------------------------------------------------------------

    def expect(self, g: np.ndarray, warps: np.ndarray, what: str, *, proxy: bool) -> None:
        """Copies to granules ``g (copies, ...)``, by ``warps (copies,)``, are on their way."""
        cta, touched, own = self.cta, self.touched, warps[:, None]
        if self.is_barrier[g].any():
            cta.fault(f"{what} over an mbarrier")
        if self.filling[g].any():
            cta.fault(f"{what} to where another copy is on its way")
        if self.being_read[g].any():
            cta.fault(f"{what} over what wgmma still reads")
        for did, epoch, who in (
            ("read", touched.read_epoch, touched.reader),
            ("wrote", touched.write_epoch, touched.writer),
        ):
            if ((epoch[g] == cta.epoch) & (who[g] != own)).any():
                cta.fault(f"race in shared memory: {what} over what another warp {did} "
                          "since the last barrier")  # fmt: skip
        if proxy and (self.generic[g] > cta.fenced[own]).any():
            cta.fault(f"{what} after ordinary accesses, no fence.proxy.async between")
        self.filling[g] += 1

    def arrived(self, g: np.ndarray, warps: np.ndarray, *, copy: int = -1) -> None:
        """They are there: for ``warps`` (cp.async), or by TMA, whose mbarrier orders it."""
        self.filling[g] -= 1
        self.known[g] = True
        self.copy[g] = copy
        touched = self.touched
        touched.read_epoch[g] = -1
        touched.write_epoch[g] = self.cta.epoch if copy < 0 else -1
        touched.writer[g] = warps[:, None]
        if copy < 0:
            self.generic[g] = self.cta.clock
