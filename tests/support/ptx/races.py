"""Record the last access to each 2 bytes of a memory, by warp and epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from support.ptx.cta import Cta

GRANULE = 2  # bytes: an access of one byte stands for both
NOBODY, SEVERAL = -1, -2  # instead of a warp


def granules(places: np.ndarray, size: int) -> np.ndarray:
    """``(lanes, granules)`` that accesses of ``size`` bytes at ``places (lanes,)`` touch."""
    return places[:, None] // GRANULE + np.arange(max(size // GRANULE, 1))


class Touched:
    """Last writers and readers. (Epochs of different CTAs are different numbers.)"""

    def __init__(self, size: int) -> None:
        n = size // GRANULE
        self.write_epoch, self.writer = np.full(n, -1, np.int32), np.full(n, NOBODY, np.int16)
        self.read_epoch, self.reader = np.full(n, -1, np.int32), np.full(n, NOBODY, np.int16)

    def race(self, cta: Cta, g: np.ndarray, warps: np.ndarray, where: str, *, write: bool) -> None:
        """Notes an access of ``warps (lanes,)`` to ``g (lanes, granules)``; a race is a fault."""
        self.after_write(cta, g, warps, where, write=write)
        warps = warps[:, None]
        read = self.read_epoch[g] == cta.epoch
        if write and (read & (self.reader[g] != warps)).any():
            cta.fault(f"race in {where}: write over what another warp read since the last barrier")
        if not write:
            others = read & (self.reader[g] != warps)
            self.read_epoch[g] = cta.epoch
            self._sign(self.reader, g, warps)
            self.reader[g[others]] = SEVERAL

    def after_write(
        self, cta: Cta, g: np.ndarray, warps: np.ndarray, where: str, *, write: bool
    ) -> None:
        """The same, but for writes over what was read."""
        warps = warps[:, None]
        if ((self.write_epoch[g] == cta.epoch) & (self.writer[g] != warps)).any():
            what = "write over" if write else "read of"
            cta.fault(f"race in {where}: {what} what another warp wrote since the last barrier")
        if write:
            self.write_epoch[g] = cta.epoch
            self._sign(self.writer, g, warps)

    @staticmethod
    def _sign(names: np.ndarray, g: np.ndarray, warps: np.ndarray) -> None:
        """Enters the warps; where several of them touch one place at once, all of them."""
        names[g] = warps
        others = names[g] != warps
        if others.any():
            names[g[others]] = SEVERAL


def store_once(cta: Cta, memory: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
    """``memory[at + i] = values[:, i]``; lanes that write one place must write the same."""
    places = at + np.arange(values.shape[1])
    memory[places] = values
    if (memory[places] != values).any():
        cta.fault("race of threads: one instruction writes different values to one place")
