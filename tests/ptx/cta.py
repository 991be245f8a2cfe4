"""State of one CTA: registers of all its lanes, the lanes that run next, and waits of the others.

Lanes run in lockstep at the lowest program counter, so warps do not interleave as they would on a
device. Hazards of interleaving are found by bookkeeping instead: an *epoch* lies between two
CTA-wide barriers, and whatever two warps do to one place in one epoch is a race.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ptx.copies import Copies
from ptx.decode import Kernel, form
from ptx.shared_memory import Shared
from ptx.wgmma import WarpGroups

if TYPE_CHECKING:
    from ptx.grid import Grid


class Fault(RuntimeError):
    """A hazard in the compiled code, or a limit of the hardware that it breaks."""


class Cta:
    """State of a CTA, which the steps of :mod:`ptx.decode` read and write."""

    def __init__(self, kernel: Kernel, grid: Grid, number: int, index: tuple[int, ...]) -> None:
        T = kernel.program.threads
        zeros = {width: np.zeros(T, width) for width in set(kernel.widths)}
        self.kernel, self.grid, self.number, self.index = kernel, grid, number, index
        self.memory, self.timing, self.threads, self.warps = grid.memory, grid.timing, T, T // 32
        self.registers = [zeros[width] for width in kernel.widths]
        self.written = [-1] * len(kernel.widths)  # when each register was
        self.lane = np.arange(T)
        self.warp = (self.lane // 32).astype(np.int16)
        self._every_warp = np.arange(self.warps)
        self.special = {"laneid": (self.lane % 32).astype(np.uint32)}
        self.special |= {"tid.x": self.lane.astype(np.uint32)}
        self.special |= {f"tid.{axis}": np.zeros(T, np.uint32) for axis in "yz"}
        for axis, at, size in zip("xyz", index, grid.shape, strict=True):
            self.special[f"ctaid.{axis}"] = np.full(T, at, np.uint32)
            self.special[f"nctaid.{axis}"] = np.full(T, size, np.uint32)
        self.clock = 0  # steps so far
        self.epoch = self.first_epoch = grid.epoch  # and one more after each CTA-wide barrier
        self.active, self.full = np.ones(T, bool), True  # lanes of the step at hand
        self.step = kernel.steps[0]
        self.fenced = np.full(self.warps, -1)  # when each warp last did fence.proxy.async
        self.shared = Shared(self, grid.shared_bytes)
        self.copies = Copies(self)
        self.groups = WarpGroups(self)
        self._counter = np.zeros(T, np.int64)
        self._alive = np.ones(T, bool)
        self._waiting = np.zeros(T, bool)  # for the CTA-wide barrier
        self._spinning = np.zeros(T, bool)  # tried an mbarrier in vain
        self._in_vain = 0  # how often in a row all of them did

    def run(self) -> None:
        """To its end.

        Raises:
            Fault: one of those that the docstring of this package lists.
        """
        while self._alive.any():
            ready = self._alive & ~self._waiting & ~self._spinning
            if not ready.any():
                self._let_somebody_go_on()
                continue
            lowest = self._counter[ready].min()
            lanes = ready & (self._counter == lowest)
            others = self._counter[ready & ~lanes]
            self._straight_on(lanes, int(lowest), int(others.min()) if others.size else None)
            self.copies.maybe_land_one()
        self.copies.must_be_done()
        self.groups.must_be_done()

    def _straight_on(self, lanes: np.ndarray, at: int, limit: int | None) -> None:
        """Until a step that decides who is next, or the one where other lanes join."""
        steps, whole = self.kernel.steps, bool(lanes.all())
        while at != limit:
            if at == len(steps):
                self._alive &= ~lanes
                return
            step = self.step = steps[at]
            at += 1
            self.clock += 1
            self.active, self.full, some = lanes, whole, True
            if step.guard is not None:
                slot, wanted = step.guard
                predicate = self.registers[slot]
                self.active = lanes & (predicate if wanted else ~predicate)
                self.full = whole and bool(self.active.all())
                some = self.full or bool(self.active.any())
            if not some:
                continue
            if self.groups.busy:
                self.groups.check(step)
            if step.control:
                self._counter[lanes] = at
                step.run(self)
                return
            step.run(self)
        self._counter[lanes] = at

    def _let_somebody_go_on(self) -> None:
        if self._spinning.any():
            self._in_vain = 0 if self.copies.land(1) else self._in_vain + 1
            if self._in_vain > 1:  # (once, a copy may have landed since they tried)
                self.fault("threads wait for an mbarrier whose phase never ends")
            self._spinning[:] = False
        else:  # all that are left wait for the barrier
            self._waiting[:] = False
            self.epoch += 1

    # ---- for steps --------------------------------------------------------------------------

    def fault(self, what: str) -> NoReturn:
        this, barriers = self.step.instruction, self.epoch - self.first_epoch
        raise Fault(
            f"{what}\n"
            f"  kernel {self.kernel.program.name}, CTA {self.index}, after {barriers} barriers\n"
            f"  PTX line {this.line}: {this.text[:200]}\n"
            f"  source {this.place}"
        )

    def active_warps(self, *, whole: bool = True) -> np.ndarray:
        """Warps that take part; with ``whole`` all their lanes must."""
        if self.full:
            return self._every_warp
        lanes = self.active.reshape(self.warps, 32)
        some = lanes.any(1)
        if whole and not (lanes.all(1) == some).all():
            self.fault("a part of a warp at an instruction for whole warps")
        return np.flatnonzero(some)

    def jump(self, to: int) -> None:
        self._counter[self.active] = to

    def leave(self) -> None:
        self._alive &= ~self.active

    def wait(self) -> None:
        self.active_warps()
        self._waiting |= self.active

    def spin(self, lanes: np.ndarray) -> None:
        """These go on after the others, or after a copy has landed."""
        self._spinning |= lanes
        if not lanes.any():
            self._in_vain = 0


@form(r"bra(?:\.uni)?", control=True)
def _branch(d):
    (to,) = d.operands

    def step(cta):
        cta.jump(to)

    return step


@form(r"ret|exit", control=True)
def _return(d):
    d.count(0)
    return Cta.leave


@form(r"bar\.sync|barrier\.sync\.aligned", control=True)
def _barrier(d):
    d.count(1)
    d.need(d.integer(d.operands[0]) == 0, "a barrier of a part of the CTA")
    return Cta.wait
