"""Tensor maps of TMA and matrix descriptors of wgmma: where the bytes of a tile are.

Sources: CUDA driver API, cuTensorMapEncodeTiled (limits of a map); PTX ISA, "Swizzling Modes" and
"Matrix Descriptor Format" of wgmma; the canonical layouts are those in CUTLASS's mma_sm90_desc.hpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from ptx.cta import Cta

# Swizzling modes as a matrix descriptor numbers them: bytes of a row of an atom of 8 rows.
ATOM = {0: 16, 1: 128, 2: 64, 3: 32}
_MASK = {1: 0x380, 2: 0x180, 3: 0x80}  # bits of the address that are mixed into the lower ones
_OF_HOST = {0: 0, 1: 3, 2: 2, 3: 1}  # cuTensorMapEncodeTiled numbers them the other way round


def swizzled(address: np.ndarray, mode: int) -> np.ndarray:
    return address if mode == 0 else address ^ ((address & _MASK[mode]) >> 3)


class TensorMap(NamedTuple):
    """A matrix in global memory and the tile of it that a copy moves."""

    base: int
    swizzle: int  # as a matrix descriptor numbers it
    size: int  # bytes of an element
    box: tuple[int, int]  # rows and columns of a tile
    shape: tuple[int, int]
    stride: int  # bytes from row to row

    @classmethod
    def encode(cls, base, swizzle, size, box, shape, strides) -> TensorMap:
        """From what Triton's driver gives to cuTensorMapEncodeTiled; ValueError as it refuses."""
        if len(box) != 2:
            raise NotImplementedError("tensor maps of other than two dimensions")
        stride, inner = int(strides[0]) * size, int(box[1]) * size
        mode = _OF_HOST[swizzle]
        for fine, what in (
            (base % 16 == 0, "address"),
            (all(0 < b <= 256 for b in box), "box"),
            (stride % 16 == 0 and 0 < stride < 2**40 and strides[1] == 1, "strides"),
            (all(0 < n <= 2**32 for n in shape), "shape"),
            (inner % 16 == 0 and (mode == 0 or inner <= ATOM[mode]), "inner box"),
        ):
            if not fine:
                raise ValueError(f"{what} that no tensor map can have: {base=} {box=} {shape=} "
                                 f"{strides=} {swizzle=}")  # fmt: skip
        box, shape = (tuple(int(n) for n in x) for x in (box, shape))
        return cls(base, mode, size, box, shape, stride)

    def tile(self, cta: Cta, row: int, column: int) -> np.ndarray:
        """Bytes ``(rows, columns, size)``, zeros outside of the matrix."""
        i, j = row + np.arange(self.box[0]), column + np.arange(self.box[1])
        data = np.zeros((*self.box, self.size), np.uint8)
        rows = np.flatnonzero((i >= 0) & (i < self.shape[0]))
        columns = np.flatnonzero((j >= 0) & (j < self.shape[1]))
        at = self.base + i[rows][:, None] * self.stride + j[columns] * self.size
        data[np.ix_(rows, columns)] = cta.memory.tile(cta, at[..., None] + np.arange(self.size))
        return data


class Descriptor(NamedTuple):
    """An operand of wgmma in shared memory."""

    start: int
    leading: int  # byte offsets, as the canonical layouts name them
    stride: int
    base: int
    mode: int

    @classmethod
    def read(cls, bits: int) -> Descriptor:
        def field(low):
            return (bits >> low & 0x3FFF) << 4

        return cls(field(0), field(16), field(32), bits >> 49 & 7, bits >> 62)

    def places(self, rows: int, columns: int, size: int) -> np.ndarray:
        """Addresses ``(rows, columns)``: rows are M or N; columns are K, beside each other."""
        wide = ATOM[self.mode]
        if columns * size > wide:
            raise NotImplementedError("an instruction wider than a row of the atom")
        r, k = np.arange(rows)[:, None], np.arange(columns)
        offsets = r % 8 * wide + r // 8 * self.stride + k * size
        return swizzled(self.start + offsets, self.mode)
