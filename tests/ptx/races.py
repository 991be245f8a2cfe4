"""Record the last access to each 2 bytes of a memory, by warp and epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ptx.cta import Cta

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

    def race(
        self,
        cta: Cta,
        g: np.ndarray,  # (lanes, granules)
        warps: np.ndarray,  # (lanes,)
        where: str,
        *,
        write: bool,
        several_may_read: bool = False,  # what is then written
    ) -> None:
        """Record an access of ``warps`` to ``g``; a race is a fault."""
        warps = warps[:, None]
        if ((self.write_epoch[g] == cta.epoch) & (self.writer[g] != warps)).any():
            what = "write over" if write else "read of"
            cta.fault(f"race in {where}: {what} what another warp wrote since the last barrier")
        reader = self.reader[g]
        others = (self.read_epoch[g] == cta.epoch) & (reader != warps)
        if not write:
            self.read_epoch[g] = cta.epoch
            self._sign(self.reader, g, warps)
            self.reader[g[others]] = SEVERAL
            return
        if (others & (reader != SEVERAL) if several_may_read else others).any():
            cta.fault(f"race in {where}: write over what another warp read since the last barrier")
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
