"""Choose the way a loss is computed within a memory budget, and count what each way holds.

Three ways, each slower than the one before it where both fit:

=============  =================  ==============================================================
way            products of V*H    what grows
=============  =================  ==============================================================
one chunk      3                  the logits of all tokens
chunks         3                  the logits of a chunk, and float32 sums of the weight gradient
tiles          4                  the logits of a block of tokens for a tile of the vocabulary
=============  =================  ==============================================================

With tiles the log-sum-exp is known from a pass of its own, so a tile's rows of the weight gradient
are complete at once and are rounded once. Both backends ask here, and so do all predictions; no
torch is needed. "Bytes" are those beside the inputs and the gradients in the inputs' dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

MiB = 2**20
CPU_BUDGET = 56 * MiB  # of a chunk's logits; 64 MiB with the tiles and GEMM buffers beside it
# Adding a chunk of C tokens moves the weight gradient twice, about 24 / C of its product's time. So
# a chunk may hold H / 4 tokens on a CPU: in float32 logits a quarter of that gradient's bytes.
_TOKENS_BY_H_CPU = 1 / 4
DEVICE_BUDGET = 1024 * MiB  # of a chunk's logits on a GPU, and on one of LARGE_DEVICE bytes or more
LARGE_DEVICE_BUDGET, LARGE_DEVICE = 2048 * MiB, 40 * 10**9
# Beside a chunk the Triton backend holds a tile of float32 products of all its tokens. More tokens
# do not make the GEMMs any faster.
_DEVICE_TOKENS = 8192
# Chunks of fewer tokens lose more by adding to the weight gradient than a fourth product costs.
_LEAST_TOKENS_CPU, _LEAST_TOKENS_DEVICE = 64, 768

# Triton backend: float32 products that are held at a time. At least: what stays in L2 until they
# are read. At most: memory. Between them: so many FLOPs that the host has the next launches ready.
TILE_ELEMENTS = (2**23, 2**25)
TILE_FLOPS = 2**36
EXP_BLOCK_V = 2048  # vocabulary entries of a row that share one maximum in training
EXP_GEMM_H = 2304  # hidden size up to which one GEMM makes the exponentials, on sm_90 and sm_100
FORWARD_NARROW_H = 1024  # hidden size up to which two forward programs share a multiprocessor
MAX_SPLITS = 128  # of the vocabulary, in the pass that finds the statistics
WEIGHT_ROWS = 16384  # rows of a weight gradient whose product is held before it is added

# Torch backend: elements of a tile of logits that stay in the cache; tokens of a block.
_TILE_ELEMENTS_CPU, _TILE_ELEMENTS_DEVICE = 2**20, 2**26
ROW_MULTIPLE = 64  # blocks of so many tokens give a token the same bits in every batch
_BLOCK_TOKENS_CPU, _BLOCK_TOKENS_DEVICE = 1024, 8192
_TILE_CLASSES_CPU, _TILE_CLASSES_DEVICE = 1024, 8192
_LEAST_CLASSES = 64
_COMPARED_ELEMENTS_CPU = 2**17  # of a tile of logits beside another head's, a thread
SCRATCH_CPU = 4 * MiB  # of MKL and oneDNN, and of the allocator (measured)

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
    on_cpu: bool = False  # by the torch backend
    triton: bool = True
    copies: int = 2  # float32 tiles that the torch backend's steps hold at a time
    fp16: bool = False  # whose range the factors of rows do not fit
    fixed: int = 0  # bytes that whoever asks holds besides
    threads: int = 1  # of a CPU
    budget: int = DEVICE_BUDGET  # bytes of a chunk's logits on a GPU: see `device_budget`
    gemm_block: int = 0  # classes of a block where one GEMM makes the exponentials; 0: tiles do

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


def device_budget(memory: int | None) -> int:
    """Bytes of a chunk's logits on a GPU of ``memory`` bytes (None: not known)."""
    large = memory is not None and memory >= LARGE_DEVICE
    return LARGE_DEVICE_BUDGET if large else DEVICE_BUDGET


def way_of(call: Call, *, chunk_tokens: int | None = None, memory_budget: int | None = None) -> Way:
    """The fastest way within ``memory_budget`` bytes; without one, chunks as large as are useful.

    ``chunk_tokens`` is obeyed as it is.

    Raises:
        ValueError: the budget is less than the least possible, which the message says.
    """
    if memory_budget is None:
        return chunked(call, chunk_size(call, chunk_tokens))
    for way in _ways(call, tile_classes(call, memory_budget)):
        if way.bytes <= memory_budget:
            if way.name != CHUNKS:
                return way
            wider = functools.partial(chunked, call, classes=way.classes)
            return _largest_chunks(call, wider, way.tokens, _most_tokens(call), memory_budget)
    raise _too_small(call, memory_budget, _ways(call, _LEAST_CLASSES))


def least_bytes(call: Call) -> int:
    """The least budget of :func:`way_of`."""
    return min(way.bytes for way in _ways(call, _LEAST_CLASSES))


def _ways(call: Call, classes: int) -> Iterator[Way]:
    """Ways to try, with tiles of at most so many classes, the fastest first."""
    least = _LEAST_TOKENS_CPU if call.on_cpu else _LEAST_TOKENS_DEVICE
    n = max(call.n, 1)
    for tokens in (n, least):
        for T in _halved(classes, _LEAST_CLASSES):
            if tokens == n or tokens < min(n, _most_tokens(call)):
                yield chunked(call, tokens, T)
    yield from _tilings(call, classes)


def _too_small(call: Call, budget: int, ways: Iterator[Way]) -> ValueError:
    least = min(ways, key=lambda way: way.bytes)
    held = ", ".join(f"{name} {count / MiB:.1f} MiB" for name, count in least.held.items())
    return ValueError(
        f"memory_budget must be at least {least.bytes} bytes for {call.N} tokens, V={call.V}, "
        f"H={call.H}, got {budget}: {held}"
    )


def _halved(most: int, least: int) -> Iterator[int]:
    while most > least:
        yield most
        most //= 2
    yield least


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
    return min(_equal(n, most, _multiple(call)), most)


def _most_tokens(call: Call) -> int:
    budget = CPU_BUDGET if call.on_cpu else call.budget
    most = max(budget // (call.V * call.logit), _multiple(call))
    if not call.on_cpu:
        return min(most, _DEVICE_TOKENS)
    return max(most, int(call.H * _TOKENS_BY_H_CPU)) if call.weight else most


def _multiple(call: Call) -> int:
    return 16 if call.on_cpu else 128


def _equal(n: int, most: int, multiple: int) -> int:
    """The size of the fewest parts of equal size, none larger than ``most``."""
    equal = -(-n // -(-n // most))
    return -(-equal // multiple) * multiple


def _largest_chunks(
    call: Call, way: Callable[[int], Way], least: int, most: int, budget: int
) -> Way:
    """``way`` of as many tokens a chunk, ``least`` to ``most``, as fit, in chunks of equal size."""
    multiple = _multiple(call)
    low, high = least // multiple, most // multiple
    while low < high:  # the bytes grow with the tokens
        middle = (low + high + 1) // 2
        fits = way(middle * multiple).bytes <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    most = low * multiple
    return way(min(_equal(call.n, most, multiple), most))


# ---- what each way holds ----------------------------------------------------------------------


def chunked(call: Call, C: int, classes: int | None = None) -> Way:
    """The way by chunks of ``C`` tokens."""
    n, V, H, acc = call.n, call.V, call.H, call.acc
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
        T = classes or tile_classes(call, None, C)
        held["tiles"] = call.copies * C * T * acc
        held["rows of hidden states"] = 7 * C * H * acc
        held["rows of weight"] = _rows_of_weight(call, T)
    if name == CHUNKS and call.accumulator:
        held["d_weight in float32"] = acc * V * H
    return Way(name, C, min(T, V), _without_zeros(held | _always(call)))


def tiles_of(
    call: Call, *, chunk_tokens: int | None = None, memory_budget: int | None = None
) -> Way:
    """The way by tiles of the vocabulary: of all functions that have a gradient of each token.

    ``chunk_tokens``: of a block.

    Raises:
        ValueError: the budget is less than the least possible.
    """
    n = max(call.n, 1)
    if memory_budget is not None:
        for way in _tilings(call, tile_classes(call, memory_budget)):
            if way.bytes <= memory_budget:
                return way
        raise _too_small(call, memory_budget, _tilings(call, _LEAST_CLASSES))
    if call.triton:
        T = tile_classes(call, None)
        most = call.budget // (T * (4 + call.element))
    else:
        most = _BLOCK_TOKENS_CPU if call.on_cpu else _BLOCK_TOKENS_DEVICE
        T = tile_classes(call, None, most)
    R = _equal(n, most, _block_multiple(call)) if chunk_tokens is None else min(chunk_tokens, n)
    return _by_tiles(call, R, T)


def least_of_tiles(call: Call) -> int:
    """The least budget of :func:`tiles_of`."""
    return min(way.bytes for way in _tilings(call, _LEAST_CLASSES))


def way_of_divergence(
    call: Call,
    teacher_H: int | None,  # None: probabilities are given, and there is no teacher
    *,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
) -> Way:
    """Choose how a student is compared with a teacher: one chunk or several, never tiles.

    Tiles would need eight products for some divergences. So a small budget makes small chunks.

    Raises:
        ValueError: the budget is less than chunks of the fewest tokens need.
    """
    # As many tokens as of a loss with one head: fewer make the products slower.
    of_one_head = call._replace(logit=call.acc)
    heads, H = (1, 0) if teacher_H is None else (2, teacher_H)
    both = call._replace(logit=heads * call.acc)

    def way(C: int, classes: int | None = None) -> Way:
        found = chunked(both, min(C, max(call.n, 1)), classes)
        rows, element = found.tokens, call.acc
        held = {"hidden states of the teacher": rows * H * element}
        if call.triton:
            held["d_hidden of a chunk"] = rows * call.H * element
            held["probabilities of a chunk"] = rows * call.V * element if heads == 1 else 0
        else:
            held["tiles of divergences"] = 4 * rows * compared_classes(call, found) * element
            held["rows of the teacher's weight"] = (
                found.classes * H * element if call.element < call.acc else 0
            )
        return found._replace(held=_without_zeros(found.held | held))

    if memory_budget is None:
        return way(chunk_size(of_one_head, chunk_tokens))
    fewest, most = _multiple(call), _most_tokens(of_one_head)
    for T in _halved(tile_classes(call, memory_budget), _LEAST_CLASSES):
        whole, least = way(call.n, T), way(fewest, T)
        if whole.bytes <= memory_budget:
            return whole
        if least.bytes <= memory_budget:
            of_tokens = functools.partial(way, classes=T)
            return _largest_chunks(call, of_tokens, fewest, most, memory_budget)
    raise _too_small(call, memory_budget, iter((whole, least)))


def compared_classes(call: Call, way: Way) -> int:
    """Classes that two heads' logits are compared of at a time: they stay in a core's own cache."""
    if not call.on_cpu:
        return way.classes
    return min(max(_COMPARED_ELEMENTS_CPU * call.threads // way.tokens, 64), way.classes)


def _tilings(call: Call, classes: int) -> Iterator[Way]:
    """Ways by tiles of at most so many classes, the fastest first."""
    n, multiple = max(call.n, 1), _block_multiple(call)
    most = n if call.triton else min(n, _BLOCK_TOKENS_CPU if call.on_cpu else _BLOCK_TOKENS_DEVICE)
    for balanced in (True, False):  # rather narrower tiles than blocks of very few tokens
        for T in _halved(classes, _LEAST_CLASSES):
            least = max(multiple, min(4 * multiple, T // 4)) if balanced else multiple
            for R in _halved(most, least):
                yield _by_tiles(call, _equal(n, R, multiple), T)


def _block_multiple(call: Call) -> int:
    """The number of which the tokens of a block are a multiple."""
    return 128 if call.triton else ROW_MULTIPLE


def tile_classes(call: Call, memory_budget: int | None, C: int = 1) -> int:
    """Classes of a tile, at most. Under a budget they follow from H, the dtype and the budget.

    With a budget of four times the least or more, these are the classes of a tile of every batch,
    and a token has the same bits in each. Nearer to the least, the number of tokens decides whether
    tiles must be narrower (:func:`_tilings`), and the last bits depend on it.
    """
    most = _TILE_CLASSES_CPU if call.on_cpu else _TILE_CLASSES_DEVICE
    if memory_budget is None:
        if call.triton:
            return most
        elements = _TILE_ELEMENTS_CPU if call.on_cpu else _TILE_ELEMENTS_DEVICE
        return min(max(elements // max(C, 1), 256), 8192)
    tokens = 2048 if call.triton else 128
    each = tokens * (4 + call.element) + (1 if call.triton else 3) * call.H * call.acc
    while most > _LEAST_CLASSES and most * each > memory_budget // 3:
        most //= 2
    return most


def _by_tiles(call: Call, R: int, T: int) -> Way:
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
    rows = min(C, _equal(C, max(count // block // 128 * 128, 128), 128))
    return rows, min(max(count // rows // block, 1) * block, V)


def rows_of_hidden(H: int, elements: tuple[int, int] = TILE_ELEMENTS) -> int:
    """Rows of the products of d_hidden that the Triton backend holds at a time."""
    return max(elements[0] // H // 128 * 128, 128)


def multiple_of_16(n: int) -> int:
    """``n`` rounded up to a multiple of 16: rows of what kernels write, as their masks are."""
    return -(-n // 16) * 16


def _without_zeros(held: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in held.items() if count}
