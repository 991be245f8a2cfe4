"""Matrix products of a warp group, which run beside the program until it waits for them.

A product reads its operands in shared memory and its accumulators in registers at any time until
the group of products that it was committed to has been waited for. Accumulators stay in flight from
the first product to that wait; whoever touches them before is a fault, which ptxas would find, too
(C7514), and cure by waiting after every product.

Fragments as in the PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "Register Fragments
and Shared Memory Matrix Layouts": those of a warp (see :mod:`ptx.matrices`), 16 rows each.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import numpy as np

from ptx.decode import Step, form
from ptx.matrices import fragment, numbers
from ptx.races import GRANULE
from ptx.tensor_map import Descriptor

if TYPE_CHECKING:
    from ptx.cta import Cta

_LANES = 128  # of a warp group


class Product:
    """One wgmma of one group, between its start and its end."""

    def __init__(self, slots: tuple[int, ...], kind: str, *, adds: bool) -> None:
        self.slots, self.adds = slots, adds  # accumulators, and whether it adds to them
        self.kind = kind  # of its operands
        self.read: list[np.ndarray] = []  # granules of shared memory, still to be read
        self.a: np.ndarray | None = None  # (64, K) float64, once it is read
        self.b: np.ndarray | None = None  # (N, K)
        self.places: list[np.ndarray] = []  # of A and B


class WarpGroups:
    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.busy: dict[int, set[int]] = {}  # accumulator: groups whose products hold it
        self._sums: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}  # (64, N) accumulators
        self._uses: collections.Counter = collections.Counter()  # products under way on those
        self._fenced = np.full(cta.warps, -1)  # when each warp last did wgmma.fence
        self._open = collections.defaultdict(list)  # by group
        self._committed = collections.defaultdict(collections.deque)

    def must_be_done(self) -> None:
        if self.busy:
            self.cta.fault("the CTA ends with products of wgmma that nobody waited for")

    def check(self, step: Step) -> None:
        """Before every other instruction, while products are under way."""
        if step.instruction.opcode.startswith("wgmma."):
            return
        groups = set(np.flatnonzero(self.cta.active.reshape(-1, _LANES).any(1)).tolist())
        touched = [slot for slot in step.reads | step.writes if self.busy.get(slot, set()) & groups]
        if touched:
            self.cta.fault("a register of wgmma is touched before the product is waited for "
                           "(C7514 of ptxas)")  # fmt: skip

    def fence(self) -> None:
        self._fenced[self.cta.active_warps()] = self.cta.clock

    def commit(self) -> None:
        for group in self._active():
            self._committed[group].append(self._open.pop(group, []))

    def wait(self, most: int) -> None:
        for group in self._active():
            self._finish(group, most)

    def start(self, step: _Wgmma) -> None:
        for group in self._active():
            self._start(step, group, slice(_LANES * group, _LANES * (group + 1)))

    def _active(self) -> list[int]:
        warps = self.cta.active_warps()
        groups = sorted({int(warp) // 4 for warp in warps})
        if len(warps) != 4 * len(groups):
            self.cta.fault("a part of a warp group at wgmma")
        return groups

    def _start(self, step: _Wgmma, group: int, lanes: slice) -> None:
        cta = self.cta
        adds = step.adds(cta)[lanes]
        if adds.any() != adds.all():
            cta.fault("threads of a warp group disagree whether wgmma adds to its accumulators")
        product = Product(step.slots, step.kind, adds=bool(adds[0]))
        self._hold(step, group, lanes)
        for descriptor, rows in step.operands:
            bits = descriptor(cta)[lanes]
            if (bits != bits[0]).any():
                cta.fault("threads of a warp group give wgmma different matrix descriptors")
            places, g = self._operand(int(bits[0]), rows, step, group)
            product.places.append(places)
            product.read.append(g)
            cta.shared.being_read[g] += 1
        if cta.timing == "early" or cta.grid.chance(0.5):
            self._read(product, step.size)
        self._uses[group, step.slots] += 1
        self._open[group].append((product, step))

    def _hold(self, step: _Wgmma, group: int, lanes: slice) -> None:
        """The accumulators are the product's from now on."""
        cta = self.cta
        if (group, step.slots) in self._sums:
            return
        if any(group in self.busy.get(slot, ()) for slot in step.slots):
            cta.fault("accumulators that another product of wgmma holds in another order")
        if step.adds(cta)[lanes].any():
            self._need_fence(step.slots, group)
        registers = np.stack([cta.registers[slot][lanes] for slot in step.slots], 1)
        total = np.empty((64, step.N), np.float32)
        total[_rows(fragment(16, step.N, 8))] = registers.view(np.float32)
        self._sums[group, step.slots] = total
        for slot in step.slots:
            self.busy.setdefault(slot, set()).add(group)

    def _need_fence(self, slots: tuple[int, ...], group: int) -> None:
        fenced = self._fenced[4 * group : 4 * group + 4].min()
        if any(self.cta.written[slot] > fenced for slot in slots):
            self.cta.fault("a register of wgmma was written after the last wgmma.fence")

    def _operand(self, bits: int, rows: int, step: _Wgmma, group: int):
        cta, shared = self.cta, self.cta.shared
        descriptor = Descriptor.read(bits)
        if descriptor.base:
            raise NotImplementedError("base offset of a matrix descriptor")
        places = descriptor.places(rows, step.K, step.size)
        if places.max() + step.size > shared.size:
            cta.fault("matrix descriptor past the end of shared memory")
        g = np.unique(places[..., None] // GRANULE + np.arange(step.size // GRANULE))
        warps = range(4 * group, 4 * group + 4)
        if shared.is_barrier[g].any() or not shared.known[g].all():
            cta.fault("wgmma reads shared memory that was never written")
        if shared.filling[g].any():
            cta.fault("wgmma reads shared memory that an asynchronous copy still fills")
        if (shared.touched.write_epoch[g] == cta.epoch).any():
            cta.fault("race in shared memory: wgmma reads what a warp wrote since the last barrier")
        copies = shared.copy[g]
        if (shared.generic[g][copies < 0] > min(cta.fenced[warp] for warp in warps)).any():
            what = "wgmma reads ordinary writes, no fence.proxy.async between"
            if cta.grid.fences:
                cta.fault(what)
            cta.grid.remarks[what] += 1
        for copy in np.unique(copies[copies >= 0]):
            b, phase = cta.copies.landed.get(int(copy), (None, 0))
            if b is None:
                cta.fault("wgmma reads a TMA copy whose phase is not over")
            if any(b.seen.get(warp, 0) < phase for warp in warps):
                cta.fault("wgmma reads a TMA copy whose mbarrier its warps did not wait for")
        return places, g

    def _read(self, product: Product, size: int) -> None:
        """Operands of shared memory, at last."""
        memory = self.cta.shared.bytes.view(np.uint16 if size == 2 else np.uint32)
        product.a, product.b = (
            numbers(memory[places // size], product.kind) for places in product.places
        )

    def _finish(self, group: int, most: int) -> None:
        """All but the last ``most`` groups of products of a warp group."""
        while len(self._committed[group]) > most:
            for product, step in self._committed[group].popleft():
                self._end(product, step, group)

    def _end(self, product: Product, step: _Wgmma, group: int) -> None:
        cta, key = self.cta, (group, step.slots)
        if product.b is None:
            self._read(product, step.size)
        for g in product.read:
            cta.shared.being_read[g] -= 1
            cta.shared.touched.read_epoch[g] = cta.epoch
            cta.shared.touched.reader[g] = -2
        total = product.a @ product.b.T
        if product.adds:
            total = total + self._sums[key]
        self._sums[key] = total.astype(np.float32)
        self._uses[key] -= 1
        if self._uses[key]:
            return
        lanes = slice(_LANES * group, _LANES * (group + 1))
        registers = self._sums.pop(key)[_rows(fragment(16, step.N, 8))].view(np.uint32)
        for slot, values in zip(step.slots, registers.T, strict=True):
            register = cta.registers[slot].copy()
            register[lanes] = values
            cta.registers[slot] = register
            self.busy[slot].discard(group)
            if not self.busy[slot]:
                del self.busy[slot]


def _rows(of_warp: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """A warp's fragment of 16 rows, for the 4 warps of a group: ``(128, elements)``."""
    row, column = of_warp
    return np.concatenate([row + 16 * warp for warp in range(4)]), np.tile(column, (4, 1))


class _Wgmma:
    """A decoded ``wgmma.mma_async``."""

    def __init__(self, d, n: str, k: str, kind: str) -> None:
        self.N, self.K, self.kind = int(n), int(k), kind
        self.size = 4 if kind == "tf32" else 2
        d.need(self.K * self.size == 32 and self.N % 8 == 0 and self.N <= 256, "another shape")
        names = d.names(d.operands[0])
        d.need(len(names) == self.N // 2, f"{len(names)} accumulators")
        self.slots = tuple(d.slot(name, np.uint32) for name in names)
        d.need(isinstance(d.operands[1], str), "A in registers")
        self.operands = [(d.value(d.operands[1], np.uint64), 64),
                         (d.value(d.operands[2], np.uint64), self.N)]  # fmt: skip
        self.adds = d.value(d.operands[3], np.bool_)
        flags = [d.integer(x) for x in d.operands[4:]]
        wanted = [1, 1] if self.size == 4 else [1, 1, 0, 0]
        d.need(flags == wanted, "operands negated or transposed")


@form(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(bf16|f16|tf32)\.(bf16|f16|tf32)")
def _start(d, n, k, kind, same):
    d.need(kind == same, "operands of two types")
    decoded = _Wgmma(d, n, k, kind)
    return lambda cta: cta.groups.start(decoded)


@form(r"wgmma\.fence\.sync\.aligned")
def _fence(d):
    d.count(0)
    return lambda cta: cta.groups.fence()
