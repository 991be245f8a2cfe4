"""Copies to shared memory that go on beside the program: cp.async, TMA, and mbarriers.

A copy of cp.async is waited for by its thread's groups, and its warps are taken to commit as one.
A TMA copy reports its bytes to an mbarrier, whose phase ends when all arrivals and bytes are in.
When they land is the launch's ``timing``: "late", as late as the program allows; "early", at once;
"random". A program that is right is right in all of them.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import numpy as np

from ptx.decode import form
from ptx.parse import Address
from ptx.races import GRANULE
from ptx.tensor_map import ATOM, swizzled

if TYPE_CHECKING:
    from ptx.cta import Cta


class Barrier:
    """An mbarrier: 8 bytes of shared memory."""

    def __init__(self, count: int, made: tuple[int, int], clock: int) -> None:
        self.count = self.pending = count  # arrivals of a phase; those it still waits for
        self.bytes = 0  # that are expected and not there
        self.phases = 0  # that are over
        self.made, self.clock = made, clock  # (epoch, warp)
        self.seen: dict[int, int] = {}  # by warp: phases whose end it has seen
        self.waited: dict[int, int] = {}  # by warp: the epoch in which it last did
        self.copies: list[int] = []  # of this phase


class Copies:
    """Asynchronous copies of a CTA that have not completed."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self._open = collections.defaultdict(list)  # by warp: cp.async of the group to come
        self._groups = collections.defaultdict(collections.deque)  # by warp
        self._tiles: collections.deque = collections.deque()  # TMA, in their order
        self._number = 0
        self.landed: dict[int, tuple[Barrier, int]] = {}  # TMA copy: whose phase it ended
        self.barriers: dict[int, Barrier] = {}

    def must_be_done(self) -> None:
        """At the end of the CTA."""
        if self._tiles:
            self.cta.fault("the CTA ends with TMA copies on their way")
        if self.barriers:
            self.cta.fault("the CTA ends with mbarriers that were not invalidated")

    # ---- cp.async -----------------------------------------------------------------------------

    def start(self, to: np.ndarray, source: np.ndarray, size: int, real: np.ndarray) -> None:
        """``size`` bytes a lane; zeros where it is not ``real``. All of active lanes."""
        cta = self.cta
        cta.shared.must_fit(to, size, size)
        warps = cta.warp[cta.active]
        data = np.zeros((len(to), size), np.uint8)
        if real.any():
            data[real] = cta.memory.copy(cta, source[real], warps[real], size)
        places = to[:, None] + np.arange(size)
        g = places[:, ::GRANULE] // GRANULE
        cta.shared.expect(g, warps, "cp.async", proxy=False)
        for warp in cta.active_warps(whole=False):
            lanes = warps == warp
            self._open[warp].append((places[lanes], g[lanes], data[lanes]))

    def commit(self) -> None:
        for warp in self.cta.active_warps():
            self._groups[warp].append(self._open.pop(warp, []))

    def wait(self, most: int) -> None:
        """Until each warp has at most so many groups on their way."""
        landing = []
        for warp in self.cta.active_warps():
            while len(self._groups[warp]) > most:
                landing += ((warp, *copy) for copy in self._groups[warp].popleft())
        for size in {data.shape[1] for _, _, _, data in landing}:
            warps, places, g, data = zip(
                *(x for x in landing if x[3].shape[1] == size), strict=True
            )
            self.cta.shared.bytes[np.concatenate(places)] = np.concatenate(data)
            warps = np.repeat(warps, [len(x) for x in g])
            self.cta.shared.arrived(np.concatenate(g), warps)

    # ---- mbarriers ----------------------------------------------------------------------------

    def barrier(self, address: int, warp: int) -> Barrier:
        """The one that ``warp`` is about to use."""
        found = self.barriers.get(address)
        if found is None:
            self.cta.fault("use of an mbarrier that was not initialised")
        epoch, by = found.made
        if epoch == self.cta.epoch and by != warp:
            self.cta.fault("use of an mbarrier that another warp made, no barrier between")
        return found

    def make(self, address: int, count: int, warp: int) -> None:
        cta, shared = self.cta, self.cta.shared
        shared.must_fit(np.array([address]), 8, 8)
        if address in self.barriers:
            cta.fault("mbarrier initialised twice")
        g = np.arange(address // GRANULE, (address + 8) // GRANULE)
        shared.expect(g[None], np.array([warp]), "mbarrier", proxy=False)
        shared.arrived(g[None], np.array([warp]))
        shared.is_barrier[g] = True
        self.barriers[address] = Barrier(count, (cta.epoch, warp), cta.clock)

    def unmake(self, address: int, warp: int) -> None:
        cta, b = self.cta, self.barrier(address, warp)
        if b.bytes or b.pending != b.count:
            cta.fault("mbarrier invalidated in the middle of a phase")
        if any(epoch == cta.epoch and other != warp for other, epoch in b.waited.items()):
            cta.fault("mbarrier invalidated where another warp may still wait for it")
        del self.barriers[address]
        g = np.arange(address // GRANULE, (address + 8) // GRANULE)
        cta.shared.is_barrier[g] = False
        cta.shared.touch(np.array([address]), np.array([warp], np.int16), 8, write=True)

    def arrive(self, address: int, warp: int, more_bytes: int) -> None:
        b = self.barrier(address, warp)
        late = [w for w in range(self.cta.warps) if b.seen.get(w, 0) < b.phases]
        if late:
            self.cta.fault(f"a phase of an mbarrier begins before warps {late} have seen the end "
                           "of the one before")  # fmt: skip
        if b.pending == 0:
            self.cta.fault("more arrivals at an mbarrier than it was made for")
        b.bytes += more_bytes
        b.pending -= 1
        self._end_phase(b)

    def try_wait(self, address: int, parity: int, warp: int) -> bool:
        b = self.barrier(address, warp)
        if b.phases % 2 == parity:
            return False
        seen = b.seen.get(warp, 0)
        if b.phases != seen + 1:
            self.cta.fault(f"a phase of an mbarrier missed: {b.phases} are over, warp {warp} waits "
                           f"for number {seen + 1} or one long past")  # fmt: skip
        b.seen[warp] = b.phases
        b.waited[warp] = self.cta.epoch
        return True

    def _end_phase(self, b: Barrier) -> None:
        if b.pending == 0 and b.bytes == 0:
            b.phases += 1
            b.pending = b.count
            for copy in b.copies:
                self.landed[copy] = (b, b.phases)
            b.copies = []

    # ---- TMA ----------------------------------------------------------------------------------

    def start_tile(self, to: int, name: int, column: int, row: int, at: int, warp: int) -> None:
        """A copy through tensor map ``name`` that reports to the mbarrier at ``at``."""
        cta, shared = self.cta, self.cta.shared
        tensor = cta.grid.maps.get(name)
        if tensor is None:
            cta.fault("TMA copy of what is no tensor map")
        rows, inner = tensor.box[0], tensor.box[1] * tensor.size
        align = 8 * ATOM[tensor.swizzle] if tensor.swizzle else 128
        shared.must_fit(np.array([to]), align, align)
        shared.must_fit(np.array([to]), rows * inner, 1)
        b = self.barrier(at, warp)
        if b.clock > cta.fenced[warp]:
            # Triton leaves it out, on every Hopper card: no fault, as the PTX ISA would have it.
            cta.grid.remarks["TMA copy whose mbarrier no fence.proxy.async made visible"] += 1
        if b.bytes < rows * inner:
            cta.fault("TMA copy of more bytes than its mbarrier expects")
        g = np.arange(to // GRANULE, (to + rows * inner) // GRANULE)
        shared.expect(g[None], np.array([warp]), "TMA copy", proxy=True)
        data = tensor.tile(cta, row, column).reshape(rows, inner)
        places = swizzled(to + np.arange(rows * inner).reshape(rows, inner), tensor.swizzle)
        self._number += 1
        self._tiles.append((self._number, places, g, data, b))
        if cta.timing == "early" or cta.grid.chance(0.5):
            self.land(len(self._tiles))

    def land(self, most: int) -> bool:
        """The oldest TMA copies; whether there was one."""
        done = 0
        while self._tiles and done < most:
            number, places, g, data, b = self._tiles.popleft()
            self.cta.shared.bytes[places] = data
            self.cta.shared.arrived(g[None], np.array([-1]), copy=number)
            b.bytes -= data.size
            b.copies.append(number)
            self._end_phase(b)
            done += 1
        return done > 0

    def maybe_land_one(self) -> None:
        if self._tiles and self.cta.grid.chance(0.1):
            self.land(1)


# ---- instructions -------------------------------------------------------------------------------


@form(r"cp\.async\.(ca|cg)\.shared\.global")
def _copy(d, _):
    d.count(3, 4)
    to, source = d.address(d.operands[0], wide=False), d.address(d.operands[1], wide=True)
    size = d.integer(d.operands[2])
    d.need(size in (4, 8, 16), f"{size} bytes")
    real = d.value(d.operands[3] if len(d.operands) == 4 else str(size), np.uint32)

    def step(cta):
        given = real(cta)[cta.active]
        if ((given != 0) & (given != size)).any():
            raise d.unknown("a part of the bytes is zeros")
        cta.copies.start(to(cta)[cta.active], source(cta)[cta.active], size, given > 0)

    return step


@form(r"cp\.async\.(commit|wait)_group|wgmma\.(commit|wait)_group\.sync\.aligned")
def _group(d, of_copies, of_products):
    """Of copies or products: ends one, or waits until so many are left."""
    d.count(0 if "commit" in (of_copies, of_products) else 1)
    most = [d.integer(x) for x in d.operands]
    if of_copies:
        return lambda cta: getattr(cta.copies, of_copies)(*most)
    return lambda cta: getattr(cta.groups, of_products)(*most)


@form(r"fence\.proxy\.async\.shared::cta|fence\.proxy\.async")
def _fence(d):
    d.count(0)

    def step(cta):
        cta.fenced[cta.active_warps()] = cta.clock

    return step


def _one(cta: Cta, *values: np.ndarray) -> list[int]:
    """Values of the only active lane, and its warp."""
    lanes = np.flatnonzero(cta.active)
    if len(lanes) != 1:
        cta.fault(f"{len(lanes)} threads at an instruction for one")
    return [*(int(value[lanes[0]]) for value in values), int(lanes[0]) // 32]


@form(r"mbarrier\.init\.shared(?:::cta)?\.b64")
def _init(d):
    d.count(2)
    address, count = d.address(d.operands[0], wide=False), d.integer(d.operands[1])

    def step(cta):
        at, warp = _one(cta, address(cta))
        cta.copies.make(at, count, warp)

    return step


@form(r"mbarrier\.inval\.shared(?:::cta)?\.b64")
def _inval(d):
    d.count(1)
    address = d.address(d.operands[0], wide=False)

    def step(cta):
        at, warp = _one(cta, address(cta))
        cta.copies.unmake(at, warp)

    return step


@form(r"mbarrier\.arrive\.expect_tx\.shared(?:::cta)?\.b64")
def _arrive(d):
    d.count(3)
    d.need(d.operands[0] == "_", "the phase that is arrived at")
    address = d.address(d.operands[1], wide=False)
    more = d.value(d.operands[2], np.uint32)

    def step(cta):
        at, more_bytes, warp = _one(cta, address(cta), more(cta))
        cta.copies.arrive(at, warp, more_bytes)

    return step


@form(r"mbarrier\.try_wait\.parity\.shared(?:::cta)?\.b64", control=True)
def _try_wait(d):
    """Control: whoever waits in vain lets the others go first."""
    d.count(3)
    put = d.put(d.operands[0], np.bool_)
    address, parity = d.address(d.operands[1], wide=False), d.value(d.operands[2], np.uint32)

    def step(cta):
        done = np.zeros((cta.warps, 32), bool)
        at, bits = address(cta).reshape(cta.warps, 32), parity(cta).reshape(cta.warps, 32)
        for warp in cta.active_warps():
            if (at[warp] != at[warp, 0]).any() or (bits[warp] != bits[warp, 0]).any():
                cta.fault("lanes of a warp wait for different mbarriers or phases")
            done[warp] = cta.copies.try_wait(int(at[warp, 0]), int(bits[warp, 0]), int(warp))
        put(cta, done.reshape(-1))
        cta.spin(cta.active & ~done.reshape(-1))

    return step


@form(
    r"cp\.async\.bulk\.tensor\.2d\.shared::(?:cta|cluster)\.global"
    r"\.mbarrier::complete_tx::bytes"
)
def _tile(d):
    """(A cluster is one CTA here.)"""
    d.count(3)
    to, at = (d.address(d.operands[i], wide=False) for i in (0, 2))
    source = d.operands[1]
    d.need(isinstance(source, Address) and len(source.coordinates) == 2, "no tile of two dims")
    name = d.value(source.base, np.uint64)
    column, row = (d.value(x, np.int32) for x in source.coordinates)

    def step(cta):
        """One thread of a warp; several warps where a tile has several boxes."""
        lanes = np.flatnonzero(cta.active)
        if len(set(lanes // 32)) != len(lanes):
            cta.fault(f"{len(lanes)} threads of a warp start a TMA copy that one should")
        values = [get(cta) for get in (to, name, column, row, at)]
        for lane in lanes:
            cta.copies.start_tile(*(int(value[lane]) for value in values), int(lane) // 32)

    return step
