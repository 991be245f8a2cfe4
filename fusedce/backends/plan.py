"""Choose the way a loss is computed within a memory budget, by the bytes that each way holds.

Three ways, each slower than the one before it where both fit:

=============  =================  ==============================================================
way            products of V*H    what grows
=============  =================  ==============================================================
one chunk      3                  the logits of all tokens
chunks         3                  the logits of a chunk, and float32 sums of the weight gradient
tiles          4                  the logits of a block of tokens for a tile of the vocabulary
=============  =================  ==============================================================

With tiles the log-sum-exp is known from a pass of its own, so a tile's rows of the weight gradient
are complete at once and are rounded once. A student beside a teacher never takes tiles, which would
need eight products for some divergences.

Both backends ask here, and so do all predictions; no torch is needed. Bytes are counted beside the
inputs and the gradients in the inputs' dtype.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

MiB = 2**20

# ---- devices ------------------------------------------------------------------------------------

CPU_BUDGET = 56 * MiB  # of a chunk's logits; 64 MiB with the tiles and GEMM buffers beside it
# Adding a chunk of C tokens moves the weight gradient twice, about 24 / C of its product's time. So
# a chunk may hold H / 4 tokens on a CPU: in float32 logits a quarter of that gradient's bytes.
_TOKENS_BY_H_CPU = 1 / 4
DEVICE_BUDGET = 1024 * MiB  # of a chunk's logits on a GPU
# Bytes of a chunk's logits on a GPU of so many bytes or more.
LARGE_DEVICE_BUDGET, LARGE_DEVICE = 2048 * MiB, 40 * 10**9
# Beside a chunk the Triton backend holds a tile of float32 products of all its tokens. More tokens
# do not make the GEMMs any faster.
_DEVICE_TOKENS = 8192
ROW_MULTIPLE = 64  # blocks of so many tokens give a token the same bits in every batch
_LEAST_CLASSES = 64

# Float32 products that are held at a time. At least: what stays in L2 until they
# are read. At most: memory. Between them: so many FLOPs that the host has the next launches ready.
TILE_ELEMENTS = (2**23, 2**25)
TILE_FLOPS = 2**36
EXP_BLOCK_V = 2048  # vocabulary entries of a row that share one maximum in training
EXP_GEMM_H = 2304  # hidden size up to which one GEMM makes the exponentials, on sm_90 and sm_100
MAX_SPLITS = 128  # of the vocabulary, in the pass that finds the statistics
WEIGHT_ROWS = 16384  # rows of a weight gradient whose product is held before it is added

SCRATCH_CPU = 4 * MiB  # of MKL and oneDNN, and of the allocator (measured)
COMPARED_ELEMENTS_CPU = 2**17  # of a tile of logits beside another head's, a thread


class Limits(NamedTuple):
    """Sizes of chunks, tiles and blocks that suit the GEMMs and caches of a kind of device."""

    least_tokens: int  # in smaller chunks, adding to d_weight costs more than a fourth product
    multiple: int  # of tokens of a chunk
    tile_elements: int  # torch backend: of a tile of logits that stay in the cache
    tile_classes: int
    block_tokens: int  # torch backend: of a block of a tile


CPU, DEVICE = Limits(64, 16, 2**20, 1024, 1024), Limits(768, 128, 2**26, 8192, 8192)


def device_budget(memory: int | None) -> int:
    """Bytes of a chunk's logits on a GPU of ``memory`` bytes (None: not known)."""
    large = memory is not None and memory >= LARGE_DEVICE
    return LARGE_DEVICE_BUDGET if large else DEVICE_BUDGET


# ---- calls and ways -----------------------------------------------------------------------------

ONE_CHUNK, CHUNKS, TILES = WAYS = ("one chunk", "chunks", "tiles")


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
    teacher: int | None = None  # H of a teacher beside; 0: given probabilities are

    def beside(self, teacher: int | None) -> Call:
        """The call of a divergence: from a teacher of that H, or from probabilities (None)."""
        return self._replace(logit=self.acc, teacher=teacher or 0)

    @property
    def limits(self) -> Limits:
        """Limits of the device that computes the call."""
        return CPU if self.on_cpu else DEVICE

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


_Sizes = tuple[Callable[[int], Way], int, int]  # a way by its tokens, and the fewest and the most


def way_of(call: Call, *, chunk_tokens: int | None = None, memory_budget: int | None = None) -> Way:
    """The fastest way within ``memory_budget`` bytes; without one, chunks as large as are useful.

    ``chunk_tokens`` is obeyed as it is.

    Raises:
        ValueError: the budget is less than the least possible, which the message says.
    """
    if memory_budget is None:
        C = chunk_size(call, chunk_tokens)
        return chunked(call, C, tile_classes(call, None, min(C, call.n)))
    return _fitting(call, _ways(call, tile_classes(call, memory_budget)), memory_budget)


def tiles_of(
    call: Call, *, chunk_tokens: int | None = None, memory_budget: int | None = None
) -> Way:
    """The way by tiles of the vocabulary: of all functions that have a gradient of each token.

    ``chunk_tokens``: of a block.

    Raises:
        ValueError: the budget is less than the least possible.
    """
    if memory_budget is not None:
        return _fitting(call, _tilings(call, tile_classes(call, memory_budget)), memory_budget)
    n, most = max(call.n, 1), call.limits.block_tokens
    T = tile_classes(call, None, most)
    if call.triton:
        most = call.budget // (T * (4 + call.element))
    if chunk_tokens is not None:
        return by_tiles(call, min(chunk_tokens, n), T)
    return by_tiles(call, equal_parts(n, most, _block_multiple(call)), T)


def least_bytes(call: Call) -> int:
    """The least budget of :func:`way_of`."""
    return min(make(least).bytes for make, least, _ in _ways(call, _LEAST_CLASSES))


def _fitting(call: Call, ways: Iterable[_Sizes], budget: int) -> Way:
    """The first of ``ways`` within a budget, of as many tokens as fit, in chunks of equal size."""
    tried = []
    for make, least, most in ways:
        way = make(least)
        if way.bytes <= budget:
            if least == most:
                return way
            sizes = range(least, most + 1, call.limits.multiple)  # bytes grow with the tokens
            most = sizes[bisect.bisect(sizes, budget, key=lambda C: make(C).bytes) - 1]
            return make(min(equal_parts(call.n, most, call.limits.multiple), most))
        tried.append(way)
    least_way = min(tried, key=lambda way: way.bytes)
    held = ", ".join(f"{name} {count / MiB:.1f} MiB" for name, count in least_way.held.items())
    raise ValueError(
        f"memory_budget must be at least {least_way.bytes} bytes for {call.N} tokens, V={call.V}, "
        f"H={call.H}, got {budget}: {held}"
    )


def _ways(call: Call, classes: int) -> Iterator[_Sizes]:
    """Ways to try, with tiles of at most so many classes, the fastest first."""
    n, most = max(call.n, 1), _most_tokens(call)
    # Where tiles are no choice, a small budget makes chunks of very few tokens.
    few = call.limits.least_tokens if call.teacher is None else call.limits.multiple
    sizes = [(n, n), (few, most)] if few < n and few <= most else [(n, n)]
    for least, most in sizes:
        for T in _halved(classes, _LEAST_CLASSES):
            yield functools.partial(chunked, call, T=T), least, most
    if call.teacher is None:
        yield from _tilings(call, classes)


def _tilings(call: Call, classes: int) -> Iterator[_Sizes]:
    """Ways by tiles of at most so many classes, the fastest first."""
    n, multiple = max(call.n, 1), _block_multiple(call)
    most = n if call.triton else min(n, call.limits.block_tokens)
    for balanced in (True, False):  # rather narrower tiles than blocks of very few tokens
        for T in _halved(classes, _LEAST_CLASSES):
            least = max(multiple, min(4 * multiple, T // 4)) if balanced else multiple
            for R in _halved(most, least):
                size = equal_parts(n, R, multiple)
                yield functools.partial(by_tiles, call, T=T), size, size


def _halved(most: int, least: int) -> Iterator[int]:
    while most > least:
        yield most
        most //= 2
    yield least


def _block_multiple(call: Call) -> int:
    """The number that divides the tokens of a block."""
    return 128 if call.triton else ROW_MULTIPLE


# ---- sizes --------------------------------------------------------------------------------------


def chunk_size(call: Call, chunk_tokens: int | None = None) -> int:
    """Tokens per chunk where no budget is given, at least 1.

    The extra memory is ``C * V * logit`` for a chunk of ``C`` tokens and, with more than one chunk,
    ``4 * V * H`` for a float32 accumulator of the weight gradient wherever that is not the gradient
    itself. A single chunk saves the accumulator and its traffic, so it is both smaller and faster
    while ``n <= C + 4 * H / logit``. Beyond that, chunks of equal size, rounded up to what suits
    the GEMMs.
    """
    if chunk_tokens is not None:
        return chunk_tokens
    n, most = call.n, _most_tokens(call)
    if n <= most + (4 * call.H // call.logit if call.accumulator else 0):
        return max(n, 1)
    return min(equal_parts(n, most, call.limits.multiple), most)


def _most_tokens(call: Call) -> int:
    budget = CPU_BUDGET if call.on_cpu else call.budget
    most = max(budget // (call.V * call.logit), call.limits.multiple)
    if not call.on_cpu:
        return min(most, _DEVICE_TOKENS)
    return max(most, int(call.H * _TOKENS_BY_H_CPU)) if call.weight else most


def tile_classes(call: Call, memory_budget: int | None, C: int = 1) -> int:
    """Classes of a tile, at most. Under a budget they follow from H, the dtype and the budget.

    With a budget of four times the least or more, these are the classes of a tile of every batch,
    and a token has the same bits in each. Nearer to the least, the number of tokens decides whether
    tiles must be narrower (:func:`_tilings`), and the last bits depend on it.
    """
    most = call.limits.tile_classes
    if memory_budget is None:
        if call.triton:
            return most
        return min(max(call.limits.tile_elements // max(C, 1), 256), 8192)
    tokens = 2048 if call.triton else 128
    each = tokens * (4 + call.element) + (1 if call.triton else 3) * call.H * call.acc
    while most > _LEAST_CLASSES and most * each > memory_budget // 3:
        most //= 2
    return most


def compared_classes(call: Call, C: int, T: int) -> int:
    """Classes that two heads' logits are compared of at a time: they stay in a core's own cache."""
    return min(max(COMPARED_ELEMENTS_CPU * call.threads // C, 64), T) if call.on_cpu else T


def equal_parts(n: int, most: int, multiple: int) -> int:
    """The size of the fewest parts of equal size, none larger than ``most``."""
    equal = -(-n // -(-n // most))
    return -(-equal // multiple) * multiple


def exp_block(V: int, most: int = EXP_BLOCK_V) -> int:
    """Classes of a row that share one maximum: at least the 16 that rows are padded to."""
    return min(max(1 << (V - 1).bit_length(), 16), most)


def tile_shape(
    C: int, V: int, H: int, block: int, elements: tuple[int, int] = TILE_ELEMENTS
) -> tuple[int, int]:
    """Rows and columns of the products of ``C`` tokens that the Triton backend holds at a time.

    The rows are the fewest equal parts of ``C``, multiples of 128: a part of a few rows would take
    a product of its own that leaves most of a GPU idle.
    """
    least, most = elements
    count = min(max(TILE_FLOPS // (2 * H), least), most)
    rows = min(C, equal_parts(C, max(count // block // 128 * 128, 128), 128))
    return rows, min(max(count // rows // block, 1) * block, V)


def rows_of_hidden(H: int, elements: tuple[int, int] = TILE_ELEMENTS) -> int:
    """Rows of the products of d_hidden that the Triton backend holds at a time."""
    return max(elements[0] // H // 128 * 128, 128)


def multiple_of_16(n: int) -> int:
    """``n`` rounded up to a multiple of 16: rows of what kernels write, as their masks are."""
    return -(-n // 16) * 16


# ---- bytes --------------------------------------------------------------------------------------


def chunked(call: Call, C: int, T: int) -> Way:
    """The way by chunks of ``C`` tokens, on the torch backend by tiles of ``T`` classes."""
    n, V, H, acc = call.n, call.V, call.H, call.acc
    T, narrow = min(T, V), call.element < acc
    name, C = (ONE_CHUNK, max(n, 1)) if n <= C else (CHUNKS, C)
    heads = 2 if call.teacher else 1
    width = multiple_of_16(V) if call.triton else V
    held = {"logits of a chunk": C * width * call.logit * heads}
    if call.triton:
        T, block = V, call.gemm_block
        products = min(rows_of_hidden(H), C) * H  # of d_hidden, in the same buffer
        if not block:
            block = EXP_BLOCK_V
            rows, T = tile_shape(C, V, H, exp_block(V))
            products = max(products, rows * multiple_of_16(T))
        held["tile of products"] = 4 * products
        # Single entries and their sorted copies take 80 bytes a token.
        held["statistics and entries"] = C * (8 * -(-V // block) + 84)
        if call.weight and narrow:
            held["scaled hidden states"] = C * H * call.element
        if call.fp16 and call.weight:
            held["rows of d_weight"] = min(WEIGHT_ROWS, V) * H * acc
    else:
        held["tiles"] = call.copies * C * T * acc
        held["rows of hidden states"] = 7 * C * H * acc
        held["rows of weight"] = T * (H + (call.teacher or 0)) * acc if narrow else 0
    if name == CHUNKS and call.accumulator:
        held["d_weight in float32"] = acc * V * H
    if call.teacher is not None:
        held["hidden states of the teacher"] = C * call.teacher * acc
        if call.triton:
            held["d_hidden of a chunk"] = C * H * acc
            held["probabilities of a chunk"] = 0 if call.teacher else C * V * acc
        else:
            held["tiles of divergences"] = 4 * C * compared_classes(call, C, T) * acc
    return _way(name, C, T, held, call)


def by_tiles(call: Call, R: int, T: int) -> Way:
    """Tiles of R tokens and T classes, and the bytes that they hold."""
    n, H, acc = call.n, call.H, call.acc
    T, narrow = min(T, call.V), call.element < acc
    if call.triton:
        held = {
            "tile of products": R * multiple_of_16(T) * 4,
            "gradient of a tile": R * multiple_of_16(T) * call.element,
        }
        if call.hidden and n < call.N:
            held["d_hidden of the rows used"] = n * H * acc
        if call.weight and narrow and n > R:
            held["d_weight of a tile"] = T * H * acc
        if call.fp16 and call.weight:
            held["scaled hidden states"] = n * H * (acc + call.element)
            held["rows of d_weight"] = T * H * acc
        # Up to five numbers a row and split, before the tiles are made.
        before = 20 * call.N * min(-(-call.V // 64), MAX_SPLITS)
        held["statistics"] = max(before - sum(held.values()), 0) + 4 * 16 * n
    else:
        held = {
            "tiles": call.copies * R * T * acc,
            "rows of hidden states": 3 * R * H * acc,
            "statistics": 8 * 16 * n,
            "rows of weight": T * H * acc if narrow else 0,
            "d_weight of a tile": T * H * acc if call.weight and narrow else 0,
        }
    return _way(TILES, R, T, held, call)


def _way(name: str, tokens: int, classes: int, held: dict[str, int], call: Call) -> Way:
    """A way that holds ``held``, and what every way holds."""
    N, H, acc, narrow = call.N, call.H, call.acc, call.element < call.acc
    held |= {
        "d_hidden in float32": N * H * acc if call.hidden and narrow else 0,
        "d_weight waiting in float32": call.V * H * acc if call.weight and call.wide_weight else 0,
        "hidden states gathered": call.n * H * call.element if call.triton and call.n < N else 0,
        "positions": 24 * N,
        "held besides": call.fixed,
        "products of the library": SCRATCH_CPU if call.on_cpu else 0,
    }
    return Way(name, tokens, classes, {name: count for name, count in held.items() if count})
