"""Bytes that each way of computing a loss holds, and the sizes of the Triton backend's buffers.

No torch and no triton are needed.
"""

from __future__ import annotations

from typing import NamedTuple

MiB = 2**20
DEVICE_BUDGET = 1024 * MiB  # of a chunk's logits on a GPU

# Float32 products that are held at a time. At least: what stays in L2 until they
# are read. At most: memory. Between them: so many FLOPs that the host has the next launches ready.
TILE_ELEMENTS = (2**23, 2**25)
TILE_FLOPS = 2**36
EXP_BLOCK_V = 2048  # vocabulary entries of a row that share one maximum in training
EXP_GEMM_H = 2304  # hidden size up to which one GEMM makes the exponentials, on sm_90 and sm_100
FORWARD_NARROW_H = 1024  # hidden size up to which two forward programs share a multiprocessor
MAX_SPLITS = 128  # of the vocabulary, in the pass that finds the statistics
WEIGHT_ROWS = 16384  # rows of a weight gradient whose product is held before it is added

SCRATCH_CPU = 4 * MiB  # of MKL and oneDNN, and of the allocator (measured)
COMPARED_ELEMENTS_CPU = 2**17  # of a tile of logits beside another head's, a thread

ONE_CHUNK, CHUNKS, TILES = WAYS = ("one chunk", "chunks", "tiles")


class Limits(NamedTuple):
    """Sizes of chunks, tiles and blocks that suit the GEMMs and caches of a kind of device."""

    least_tokens: int  # in smaller chunks, adding to d_weight costs more than a fourth product
    multiple: int  # of tokens of a chunk
    tile_elements: int  # torch backend: of a tile of logits that stay in the cache
    tile_classes: int
    block_tokens: int  # torch backend: of a block of a tile


CPU, DEVICE = Limits(64, 16, 2**20, 1024, 1024), Limits(768, 128, 2**26, 8192, 8192)


class Call(NamedTuple):
    """Sizes and dtypes that decide the memory of one forward and backward pass."""

    n: int  # tokens that are computed
    N: int  # positions, with those that are ignored
    V: int
    H: int
    element: int  # bytes of an element of hidden and weight
    logit: int  # bytes a chunk holds of each logit
    wide_weight: bool = False  # the weight gradient waits for backward in float32
    hidden: bool = True  # gradients that are wanted
    weight: bool = True
    bias: bool = False
    on_cpu: bool = False  # by the torch backend
    triton: bool = True
    copies: int = 2  # float32 tiles that the torch backend's steps hold at a time
    fp16: bool = False  # float16 has too small a range for the factors of rows
    fixed: int = 0  # bytes that the caller holds besides
    threads: int = 1  # of a CPU
    budget: int = DEVICE_BUDGET  # bytes of a chunk's logits on a GPU: see `device_budget`
    gemm_block: int = 0  # classes of a block where one GEMM makes the exponentials; 0: tiles do

    @property
    def limits(self) -> Limits:
        """Those of its device."""
        return CPU if self.on_cpu else DEVICE

    @property
    def train(self) -> bool:
        """Whether any gradient is wanted."""
        return self.hidden or self.weight or self.bias

    @property
    def acc(self) -> int:
        """Bytes of an element of logits and sums."""
        return max(self.element, 4)

    @property
    def accumulator(self) -> bool:
        """Whether chunks need a sum of the weight gradient that is not the gradient itself."""
        return self.weight and self.element < self.acc and not self.wide_weight


class Way(NamedTuple):
    """The way one call is computed."""

    name: str  # one of WAYS
    tokens: int  # of a chunk, or of a block of a tile; at least 1
    classes: int  # of a tile
    held: dict[str, int]  # bytes by purpose

    @property
    def bytes(self) -> int:
        """Bytes held beside the inputs and the gradients."""
        return sum(self.held.values())


def chunked(call: Call, C: int, T: int) -> Way:
    """The way by chunks of ``C`` tokens, on the torch backend by tiles of ``T`` classes."""
    n, V, H, acc = call.n, call.V, call.H, call.acc
    T = min(T, V)
    name, C = (ONE_CHUNK, max(n, 1)) if n <= C else (CHUNKS, C)
    held = {"logits of a chunk": C * (multiple_of_16(V) if call.triton else V) * call.logit}
    if call.triton:
        T, products = _products(call, C)
        held["tile of products"] = products
        held["statistics of a chunk"] = C * (8 * -(-V // (call.gemm_block or EXP_BLOCK_V)) + 4)
        held["single entries"] = 2 * C * 40 if call.weight else 24 * C  # sorted, too
        if call.weight and call.element < acc:
            held["scaled hidden states"] = C * H * call.element
        if call.fp16 and call.weight:
            held["rows of d_weight"] = min(WEIGHT_ROWS, V) * H * acc
    else:
        held["tiles"] = call.copies * C * T * acc
        held["rows of hidden states"] = 7 * C * H * acc
        held["rows of weight"] = _rows_of_weight(call, T)
    if name == CHUNKS and call.accumulator:
        held["d_weight in float32"] = acc * V * H
    return Way(name, C, T, _without_zeros(held | _always(call)))


def compared(call: Call, C: int, T: int, teacher_H: int | None) -> Way:
    """The way of a divergence from a teacher, or from given probabilities (None), by chunks."""
    heads, H = (1, 0) if teacher_H is None else (2, teacher_H)
    found = chunked(call._replace(logit=heads * call.acc), C, T)
    rows, element = found.tokens, call.acc
    held = {"hidden states of the teacher": rows * H * element}
    if call.triton:
        held["d_hidden of a chunk"] = rows * call.H * element
        held["probabilities of a chunk"] = rows * call.V * element if heads == 1 else 0
    else:
        held["tiles of divergences"] = 4 * rows * compared_classes(call, found) * element
        of_teacher = found.classes * H * element if call.element < call.acc else 0
        held["rows of the teacher's weight"] = of_teacher
    return found._replace(held=_without_zeros(found.held | held))


def compared_classes(call: Call, way: Way) -> int:
    """Classes that two heads' logits are compared of at a time: they stay in a core's own cache."""
    if not call.on_cpu:
        return way.classes
    return min(max(COMPARED_ELEMENTS_CPU * call.threads // way.tokens, 64), way.classes)


def by_tiles(call: Call, R: int, T: int) -> Way:
    """Tiles of R tokens and T classes, and the bytes that they hold."""
    n, V, H, acc = call.n, call.V, call.H, call.acc
    T = min(T, V)
    if call.triton:
        held = {
            "tile of products": R * multiple_of_16(T) * 4,
            "gradient of a tile": R * multiple_of_16(T) * call.element,
        }
        if call.hidden and n < call.N:
            held["d_hidden of the rows used"] = n * H * acc
        if call.weight and call.element < acc and n > R:
            held["d_weight of a tile"] = T * H * acc
        if call.fp16 and call.weight:
            held["scaled hidden states"] = n * H * (acc + call.element)
            held["rows of d_weight"] = T * H * acc
        # Up to five numbers a row and split, before the tiles are made.
        before = 20 * call.N * min(-(-V // 64), MAX_SPLITS)
        held["statistics"] = max(before - sum(held.values()), 0) + 4 * 16 * n
    else:
        held = {
            "tiles": call.copies * R * T * acc,
            "rows of hidden states": 3 * R * H * acc,
            "statistics": 8 * 16 * n,
            "rows of weight": _rows_of_weight(call, T),
        }
        if call.weight and call.element < acc:
            held["d_weight of a tile"] = T * H * acc
    return Way(TILES, R, T, _without_zeros(held | _always(call)))


def _always(call: Call) -> dict[str, int]:
    """Bytes that every way holds."""
    wide_hidden = call.hidden and call.element < call.acc
    wide_weight = call.weight and call.wide_weight
    gathered = call.triton and call.n < call.N
    return {
        "d_hidden in float32": call.N * call.H * call.acc if wide_hidden else 0,
        "d_weight waiting in float32": call.V * call.H * call.acc if wide_weight else 0,
        "hidden states gathered": call.n * call.H * call.element if gathered else 0,
        "positions": 24 * call.N,
        "held besides": call.fixed,
        "products of the library": SCRATCH_CPU if call.on_cpu else 0,
    }


def _rows_of_weight(call: Call, T: int) -> int:
    """Bytes of weight rows that the torch backend widens."""
    return min(T, call.V) * call.H * call.acc if call.element < call.acc else 0


def _products(call: Call, C: int) -> tuple[int, int]:
    """Columns of a tile of the Triton backend's products; bytes of the buffer they share.

    The products of d_hidden are in the same buffer.
    """
    of_hidden = min(rows_of_hidden(call.H), C) * call.H
    if call.gemm_block:
        return call.V, 4 * of_hidden
    rows, T = tile_shape(C, call.V, call.H, exp_block(call.V))
    return T, 4 * max(rows * multiple_of_16(T), of_hidden)


def _without_zeros(held: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in held.items() if count}


def equal_parts(n: int, most: int, multiple: int) -> int:
    """The size of the fewest parts of equal size, none larger than ``most``."""
    equal = -(-n // -(-n // most))
    return -(-equal // multiple) * multiple


def exp_block(V: int, most: int = EXP_BLOCK_V) -> int:
    """Classes of a row that share one maximum: at least the 16 that rows are padded to."""
    return min(max(1 << (V - 1).bit_length(), 16), most)


def tile_shape(
    C: int,
    V: int,
    H: int,
    block: int,
    elements: tuple[int, int] = TILE_ELEMENTS,
    flops: int = TILE_FLOPS,
) -> tuple[int, int]:
    """Rows and columns of the products of ``C`` tokens that the Triton backend holds at a time.

    The rows are the fewest equal parts of ``C``, multiples of 128: a part of a few rows would take
    a product of its own that leaves most of a GPU idle.
    """
    least, most = elements
    count = min(max(flops // (2 * H), least), most)
    rows = min(C, equal_parts(C, max(count // block // 128 * 128, 128), 128))
    return rows, min(max(count // rows // block, 1) * block, V)


def rows_of_hidden(H: int, elements: tuple[int, int] = TILE_ELEMENTS) -> int:
    """Rows of the products of d_hidden that the Triton backend holds at a time."""
    return max(elements[0] // H // 128 * 128, 128)


def multiple_of_16(n: int) -> int:
    """``n`` rounded up to a multiple of 16: rows of what kernels write, as their masks are."""
    return -(-n // 16) * 16
