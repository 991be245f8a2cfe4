"""Matrix products of a warp, and what brings their operands to registers and back.

Layouts as in the PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions": m16n8k16 (bf16,
fp16) and m16n8k8 (tf32) under "Matrix Fragments", ldmatrix under its own name.
Products are exact and sums are in float64, rounded once to float32; tensor cores round otherwise.
"""

import numpy as np

from ptx.arithmetic import from_bf16
from ptx.decode import form

LANES = np.arange(32)


def numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """The operand as a tensor core reads it, in float64: tf32 drops the lowest 13 bits."""
    if kind == "bf16":
        return from_bf16(bits).astype(np.float64)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float64)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def fragment(rows: int, columns: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """``(row, column)`` of element ``i`` of lane ``t``, each (32, elements).

    8 lanes of 4 hold 8 rows; what a lane holds of a row is 4 bytes long, or for accumulators (size
    of 8 here) two float32. Beyond that come first the rows 8 below, then the columns to the right.
    """
    pair = {2: 2, 4: 1, 8: 2}[size]
    wide = 4 * pair  # columns of 8 rows that are in one register, or pair of accumulators
    down, right = rows // 8, columns // wide
    i = np.arange(pair * down * right)
    within, block = i % pair, i // pair
    row = LANES[:, None] // 4 + 8 * (block % down)
    column = LANES[:, None] % 4 * pair + within + wide * (block // down)
    return row, column


def gathering(shape: tuple[int, int], at: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The place in a matrix of ``shape`` of each of a warp's elements, lane by lane."""
    places = np.empty(shape, np.int64)
    places[at] = np.arange(at[0].size).reshape(at[0].shape)
    return places


@form(r"mma\.sync\.aligned\.m16n8k(8|16)\.row\.col\.f32\.(bf16|f16|tf32)\.(bf16|f16|tf32)\.f32")
def _product(d, k, kind, same):
    d.count(4)
    size = 4 if kind == "tf32" else 2
    K = int(k)
    d.need(kind == same and K * size == 32, "another shape")
    puts = [d.put(name, np.float32) for name in d.names(d.operands[0])]
    a, b = ([d.value(x, np.uint32) for x in d.names(d.operands[i])] for i in (1, 2))
    c = [d.value(x, np.float32) for x in d.names(d.operands[3])]
    d.need((len(puts), len(a), len(b), len(c)) == (4, 4, 2, 4), "registers")
    of_sums = fragment(16, 8, 8)
    of_a, of_b = (gathering((n, K), fragment(n, K, size)) for n in (16, 8))
    of_c, back = gathering((16, 8), of_sums), 8 * of_sums[0] + of_sums[1]
    element = np.uint16 if size == 2 else np.uint32

    def matrices(cta, reads, places, dtype):
        registers = np.stack([read(cta) for read in reads], 1).view(dtype)
        return registers.reshape(cta.warps, -1)[:, places]

    def step(cta):
        cta.active_warps()
        x = numbers(matrices(cta, a, of_a, element), kind)
        y = numbers(matrices(cta, b, of_b, element), kind)
        z = matrices(cta, c, of_c, np.float32)
        z = (x @ y.transpose(0, 2, 1) + z).astype(np.float32)
        z = z.reshape(cta.warps, -1)[:, back].reshape(cta.threads, 4)
        for i, put in enumerate(puts):
            put(cta, np.ascontiguousarray(z[:, i]))

    return step


@form(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])\.shared\.b16")
def _matrices(d, way, count):
    """Lane 8 j + i has the address of row i of matrix j, lane 4 r + q two numbers of row r."""
    d.count(2)
    n = int(count)
    registers, place = d.operands if way == "ld" else d.operands[::-1]
    names = d.names(registers)
    d.need(len(names) == n, "registers")
    each = [d.put(x, np.uint32) if way == "ld" else d.value(x, np.uint32) for x in names]
    address = d.address(place, wide=False)

    def step(cta):
        warps = cta.active_warps()
        rows = address(cta).reshape(cta.warps, 32)[warps, : 8 * n].reshape(-1)
        of_warps = np.repeat(warps, 8 * n).astype(np.int16)
        if way == "st":
            held = np.stack([read(cta).reshape(cta.warps, 32)[warps] for read in each], 1)
            return cta.shared.store(cta, rows, of_warps, held.view(np.uint16).reshape(-1, 8))
        found = cta.shared.load(cta, rows, of_warps, np.uint16, 8)
        held = np.ascontiguousarray(found).reshape(-1, n, 64).view(np.uint32)
        for j, put in enumerate(each):
            value = np.zeros((cta.warps, 32), np.uint32)
            value[warps] = held[:, j]
            put(cta, value.reshape(-1))

    return step
