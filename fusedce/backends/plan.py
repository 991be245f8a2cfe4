"""Choose the way a loss is computed within a memory budget, by the bytes that each way holds.

Four ways, each slower than the one before it where both fit:

=============  =================  ==============================================================
way            products of V*H    what grows
=============  =================  ==============================================================
one chunk      3                  the logits of all tokens
few chunks     3                  the logits of a chunk, at least a quarter of all
chunks         3                  the logits of a chunk, and float32 sums of the weight gradient
tiles          4                  the logits of a block of tokens for a tile of the vocabulary
=============  =================  ==============================================================

Few chunks (on a GPU, at most `FEW`) add their weight gradients in that gradient's own dtype: a
product's epilogue adds in float32 and rounds, so each chunk rounds the sum once. That is how
``.grad`` sums micro-batches, and needs no memory. Four such roundings err less than eager code
does (docs/accuracy.md); more would not, so beyond that the sum is held in float32.

With tiles the log-sum-exp is known from a pass of its own, the fourth product. A student beside a
teacher never takes tiles, which would need eight products for some divergences.

By default a GPU holds the logits of `LEAST_TOKENS` tokens or of a quarter of the call, whichever is
more: full logits do not exist, and few chunks cost 1 to 5% of the time of one (measured on an
H200; docs/benchmarks.md).

Both backends and all predictions use this module, which does not import torch. Bytes are counted
beyond the inputs and the gradients in the inputs' dtype.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import NamedTuple

MiB = 2**20
CPU_BUDGET = 56 * MiB  # of a chunk's logits; 64 MiB with the tiles and GEMM buffers beside it
# Bytes of a chunk's logits on a GPU; the larger value from LARGE_DEVICE bytes of memory on.
DEVICE_BUDGET = 1024 * MiB
LARGE_DEVICE_BUDGET, LARGE_DEVICE = 2048 * MiB, 40 * 10**9
# More tokens do not make the GEMMs any faster, and a row has buffers of its own.
_DEVICE_TOKENS = 8192
FEW = 4  # chunks whose weight gradients may be added in that gradient's own dtype
LEAST_TOKENS = 2048  # of a GPU's chunk by default: products of fewer tokens are slower
# Triton's chunks by tiles: tokens from which on more do not pay, classes of a tile below which the
# host decides the time, and the fewest, two blocks of the walk over them.
TILED_TOKENS, WIDE_TILE, LEAST_TILE = 4096, 4096, 512
ROW_MULTIPLE = 64  # blocks of so many tokens give a token the same bits in every batch
_LEAST_CLASSES = 64
# MKL, oneDNN and the allocator take at most this (measured); they pack copies of small operands.
SCRATCH_CPU = 4 * MiB
COMPARED_ELEMENTS_CPU = 2**17  # per thread, of a tile in which two heads' logits are compared

# Number of float32 logits that the Triton backend holds at a time. The least is 32 MiB, which an L2
# of 50 MB keeps only in part beside the products' operands; the most limits memory. Between them
# TILE_FLOPS decides: the host has the next launches ready by then.
TILE_ELEMENTS = (2**23, 2**25)
TILE_FLOPS = 2**36
WALK_STEP = 64  # numbers of a row that the walk over the vocabulary loads at a time, at most
EXP_BLOCK_V = 2048  # vocabulary entries of a row that share one maximum in training
EXP_GEMM_H = 2304  # hidden size up to which one GEMM makes the exponentials, on sm_100
MAX_SPLITS = 128  # of the vocabulary, in the pass that finds the statistics
SMALL_TOKENS, SMALL_LOGITS = 1024, 128 * MiB  # whose float32 logits exist: see `is_small`
FREQUENT = 128  # labels whose rows of a two-byte weight gradient are summed in float32 by Triton
ENTRY = 80  # bytes of a token's single entry, with those of its sorted copy


class Limits(NamedTuple):
    """Sizes of chunks, tiles and blocks that suit the GEMMs and caches of a kind of device."""

    least_tokens: int  # in smaller chunks, adding to d_weight costs more than a fourth product
    multiple: int  # of tokens of a chunk
    tile_elements: int  # torch backend: of a tile of logits that stay in the cache
    tile_classes: int
    block_tokens: int  # torch backend: of a block of a tile
    block_multiple: int  # of tokens of a block


CPU = Limits(64, 16, 2**20, 1024, 1024, ROW_MULTIPLE)
DEVICE = Limits(768, 128, 2**26, 8192, 8192, 2 * ROW_MULTIPLE)
ONE_CHUNK, FEW_CHUNKS, CHUNKS, TILES = STRATEGIES = ("one chunk", "few chunks", "chunks", "tiles")


class Sizes(NamedTuple):
    """Sizes and dtypes that decide the memory of one forward and backward pass."""

    n: int  # tokens that are computed
    N: int  # positions, with those that are ignored
    V: int
    H: int
    element: int  # bytes of an element of hidden and weight
    logit: int  # bytes a chunk holds of each logit
    wide_weight: bool = False  # the weight gradient waits for backward in float32
    wide_hidden: bool = True  # so does that of hidden
    hidden: bool = True  # gradients that are wanted
    weight: bool = True
    bias: bool = False
    on_cpu: bool = False  # by the torch backend
    triton: bool = True
    copies: int = 2  # float32 tiles that the torch backend's steps hold at a time
    fp16: bool = False  # float16 has too small a range for the factors of rows
    fixed: int = 0  # bytes that the caller holds as well
    row_major: int = 0  # bytes of row-major copies of inputs, which the Triton backend needs
    aligned: int = 0  # of copies with aligned rows, for its statistics (row-major, too)
    threads: int = 1  # of a CPU
    budget: int = DEVICE_BUDGET  # bytes of a chunk's logits on a GPU: see `device_budget`
    gemm_block: int = 0  # classes of a block where one GEMM makes the exponentials; 0: tiles do
    exp_block: int = EXP_BLOCK_V  # of a block of the kernel that makes them of a tile
    teacher: int | None = None  # H of the teacher of a divergence
    teacher_element: int = 0  # bytes of an element of the teacher's inputs

    def with_teacher(self, teacher: int, element: int) -> Sizes:
        """The call of a divergence from a teacher of that H, and of so many bytes an element."""
        return self._replace(logit=self.acc, teacher=teacher, teacher_element=element)

    def with_copies(self, row_major: int, aligned: int) -> Sizes:
        """The call of inputs of which the Triton backend makes copies."""
        return self._replace(row_major=row_major, aligned=aligned)

    @property
    def limits(self) -> Limits:
        """Limits of the device that computes."""
        return CPU if self.on_cpu else DEVICE

    @property
    def acc(self) -> int:
        """Bytes of an element of logits and sums."""
        return max(self.element, 4)

    @property
    def accumulator(self) -> bool:
        """Whether a float32 sum of the weight gradient would not be the gradient itself."""
        return self.weight and self.element < self.acc and not self.wide_weight

    def frequent(self) -> dict[str, Buffer]:
        """Float32 sums of the most frequent labels' rows, where the gradient has two bytes."""
        if not self.accumulator or self.fp16 or self.teacher is not None:
            return {}
        return {"rows of frequent labels": Buffer((min(FREQUENT, self.V), self.H), 4)}

    def for_frequent(self, rows: int) -> int:
        """Bytes of what finds these labels, and of ``(rows, K)`` numbers of theirs."""
        return 8 * self.V + rows * min(FREQUENT, self.V) * self.element if self.frequent() else 0

    def block(self, T: int) -> int:
        """Classes of a block of ``T`` whose exponentials have statistics of their own."""
        return self.gemm_block or min(self.exp_block, max(power_of_2(T), 16))

    def blocks(self, T: int) -> int:
        """The number of these blocks."""
        return -(-T // self.block(T))

    def products(self, C: int, T: int) -> int:
        """Float32 products that exist at a time of the logits of ``C`` tokens for ``T`` classes."""
        if self.gemm_block:
            return 0
        return min(max(tile_products(self.H), 128 * self.block(T)) + 16 * C, C * multiple_of_16(T))

    def way_of_chunks(self, C: int) -> str:
        """Name of the way by chunks of ``C`` tokens."""
        if self.n <= C:
            return ONE_CHUNK
        few = self.accumulator and not self.on_cpu and self.n <= FEW * C
        return FEW_CHUNKS if few else CHUNKS


class BudgetTooSmall(ValueError):
    """A memory budget is less than the least possible.

    Attributes:
        least: that many bytes.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message, least)
        self.least = least

    def __str__(self) -> str:
        return str(self.args[0])


class Buffer(NamedTuple):
    """Memory that a way allocates once, for all chunks."""

    shape: tuple[int, ...]
    element: int  # bytes

    @property
    def bytes(self) -> int:
        """Bytes in all."""
        return math.prod(self.shape) * self.element


class Plan(NamedTuple):
    """The way one call is computed.

    A way allocates `buffers`, from which their bytes in `held` follow; what else is in `held` are
    the tensors of single steps, at most.
    """

    name: str  # one of STRATEGIES
    tokens: int  # of a chunk, or of a block of a tile; at least 1
    classes: int  # of a tile
    held: dict[str, int]  # bytes by purpose
    buffers: dict[str, Buffer]

    @property
    def bytes(self) -> int:
        """Bytes held beside the inputs and the gradients."""
        return sum(self.held.values())


def choose_plan(
    sizes: Sizes,
    *,
    chunk_tokens: int | None = None,
    memory_budget: int | None = None,
    small: bool = True,
) -> Plan:
    """The fastest way within ``memory_budget`` bytes; without one, chunks as large as are useful.

    ``chunk_tokens`` is obeyed as it is. ``small``: a call that `is_small` has a way of its own.

    Raises:
        ValueError: the budget is less than the least possible, which the message says.
    """
    if memory_budget is None:
        small = small and sizes.triton and not sizes.fp16 and sizes.teacher is None
        if small and chunk_tokens is None and is_small(sizes.N, sizes.V):
            buffers = {
                "logits in float32": Buffer((sizes.N, multiple_of_16(sizes.V)), 4),
                "hidden states of the rows used": Buffer((sizes.N, sizes.H), sizes.element),
            }
            return _plan(sizes, ONE_CHUNK, max(sizes.n, 1), sizes.V, {}, buffers)
        C = chunk_size(sizes) if chunk_tokens is None else chunk_tokens
        return chunked(sizes, C, tile_classes(sizes, None, min(C, sizes.n)))
    return _fitting(sizes, _candidates(sizes, tile_classes(sizes, memory_budget)), memory_budget)


def plan_tiles(
    sizes: Sizes, *, chunk_tokens: int | None = None, memory_budget: int | None = None
) -> Plan:
    """The way by tiles of the vocabulary: of all functions that have a gradient of each token.

    ``chunk_tokens``: of a block.

    Raises:
        ValueError: the budget is less than the least possible.
    """
    if memory_budget is not None:
        return _fitting(
            sizes, _tile_candidates(sizes, tile_classes(sizes, memory_budget)), memory_budget
        )
    n, most = max(sizes.n, 1), sizes.limits.block_tokens
    T = tile_classes(sizes, None, most)
    if sizes.triton:
        most = sizes.budget // (T * (4 + sizes.element))
    tokens = equal_parts(n, most, sizes.limits.block_multiple)
    return by_tiles(sizes, tokens if chunk_tokens is None else min(chunk_tokens, n), T)


def evaluation_tile(n: int, *, on_cpu: bool) -> tuple[int, int]:
    """Tokens and classes of a tile where the torch backend's loss has no gradient and no budget."""
    limits = CPU if on_cpu else DEVICE
    tokens = equal_parts(max(n, 1), limits.block_tokens, limits.block_multiple)
    return tokens, most_classes(limits, tokens)


def is_one_tile(n: int, V: int, logit: int, *, on_cpu: bool) -> bool:
    """Whether a call of the torch backend without a budget is one chunk of one tile.

    Most small calls are, and need no `Sizes` and no plan.
    """
    limits = CPU if on_cpu else DEVICE
    return most_classes(limits, n) >= V and n * V * logit <= CPU_BUDGET


def is_small(n: int, V: int) -> bool:
    """Whether a GPU's kernels compute a call of ``n`` positions with all its logits at hand.

    Its time is the host's, which launches least that way. The logits are in float32, and become
    their gradient in place.
    """
    return 0 < n <= SMALL_TOKENS and 4 * n * multiple_of_16(V) <= SMALL_LOGITS


def most_classes(limits: Limits, tokens: int) -> int:
    """Classes of a tile of the torch backend, so that its logits stay in the cache."""
    return min(max(limits.tile_elements // max(tokens, 1), 256), 8192)


def least_bytes(sizes: Sizes) -> int:
    """The least budget of :func:`choose_plan`."""
    return min(
        make(sizes, tokens[0], T).bytes for make, tokens, T in _candidates(sizes, _LEAST_CLASSES)
    )


# ---- ways within a budget -----------------------------------------------------------------------

# A plan's function, the tokens of a chunk or block that it may have, classes of a tile.
_Candidate = tuple[Callable[[Sizes, int, int], Plan], range, int]


def _fitting(sizes: Sizes, ways: list[_Candidate], budget: int) -> Plan:
    """The first of ``ways`` within a budget, of as many tokens as fit, in parts of equal size."""
    for make, tokens, T in ways:
        if make(sizes, tokens[0], T).bytes <= budget:  # bytes grow with the tokens
            most = bisect.bisect(tokens, budget, key=lambda n: make(sizes, n, T).bytes)
            return make(sizes, equal_parts(max(sizes.n, 1), tokens[most - 1], tokens.step), T)
    tried = (make(sizes, tokens[0], T) for make, tokens, T in ways)
    least = min(tried, key=lambda plan: plan.bytes)
    held = ", ".join(f"{name} {_readable(count)}" for name, count in least.held.items())
    raise BudgetTooSmall(
        f"memory_budget must be at least {least.bytes} bytes for {sizes.N} tokens, V={sizes.V}, "
        f"H={sizes.H}, got {budget}: {held}",
        least.bytes,
    )


def _readable(count: int) -> str:
    """Bytes in a unit in which they are no 0.0."""
    if count < MiB // 10:
        return f"{count / 1024:.1f} KiB" if count >= 1024 else f"{count} bytes"
    return f"{count / MiB:.1f} MiB"


def _candidates(sizes: Sizes, classes: int) -> list[_Candidate]:
    """Ways to try, with tiles of at most so many classes, the fastest first."""
    n, most, step = max(sizes.n, 1), _most_tokens(sizes), sizes.limits.multiple
    # Where tiles are no choice, a small budget makes chunks of very few tokens.
    few = sizes.limits.least_tokens if sizes.teacher is None else step
    ranges = [range(n, n + 1)]
    quarter = equal_parts(n, -(-n // FEW), step)
    if quarter < n and sizes.way_of_chunks(quarter) == FEW_CHUNKS:
        ranges.append(range(quarter, n, step))
        most = min(most, quarter - step)  # more would be few
    if few < n and few <= most:
        ranges.append(range(few, most + 1, step))
    ways: list[_Candidate] = [(chunked, r, T) for r in ranges for T in _halved(classes)]
    if sizes.teacher is not None:
        return ways
    return ways + (_tiled_chunks(sizes) if sizes.triton else _tile_candidates(sizes, classes))


def _tiled_chunks(sizes: Sizes) -> list[_Candidate]:
    """Triton's sums by tiles: chunks of rows, of which only a tile of the classes exists.

    Chunks are the whole, halves or quarters: three chunks leave more multiprocessors idle than two.
    Tiles narrower than `WIDE_TILE` come last, since the host has no launch ready by their end.
    """
    n, step = max(sizes.n, 1), sizes.limits.multiple
    least = -(-n // FEW) if sizes.accumulator else min(n, LEAST_TOKENS)
    wanted = [-(-n // parts) for parts in (1, 2, FEW) if n <= parts * TILED_TOKENS]
    chunks = dict.fromkeys(equal_parts(n, C, step) for C in [*wanted, least] if least <= C)
    widths = [T for T in _halved(sizes.limits.tile_classes) if T >= LEAST_TILE]
    sizes_of_tiles = [(C, T) for C in chunks for T in widths if T >= WIDE_TILE]
    sizes_of_tiles += [(C, T) for T in widths if T < WIDE_TILE for C in chunks]
    ways: list[_Candidate] = [(tiled_chunks, range(C, C + 1, step), T) for C, T in sizes_of_tiles]
    if not sizes.accumulator and least > step:
        ways.append((tiled_chunks, range(step, least, step), LEAST_TILE))
    return ways


def _tile_candidates(sizes: Sizes, classes: int) -> list[_Candidate]:
    """Ways by tiles of at most ``classes``, narrower before blocks would have very few tokens."""
    step = sizes.limits.block_multiple
    most = max(sizes.n, 1) if sizes.triton else min(max(sizes.n, 1), sizes.limits.block_tokens)
    most = -(-most // step) * step
    least = {T: min(most, max(step, min(4 * step, T // 4))) for T in _halved(classes)}
    return [(by_tiles, range(tokens, most + 1, step), T) for T, tokens in least.items()]


def _halved(classes: int) -> list[int]:
    """``classes``, its half and so on, down to the least of a tile."""
    return [classes >> i for i in range((classes // _LEAST_CLASSES).bit_length())]


# ---- sizes --------------------------------------------------------------------------------------


def device_budget(memory: int | None) -> int:
    """Bytes of a chunk's logits on a GPU of ``memory`` bytes (None: not known)."""
    large = memory is not None and memory >= LARGE_DEVICE
    return LARGE_DEVICE_BUDGET if large else DEVICE_BUDGET


def chunk_size(sizes: Sizes) -> int:
    """Tokens per chunk where no budget is given, at least 1.

    The fewest bytes decide where the weight gradient needs a float32 sum: that takes ``4 * V * H``
    bytes, which every chunk moves twice. A single chunk (on a GPU, few chunks) needs none, and so
    is smaller and faster while its logits take no more bytes than those of a usual chunk and that
    sum together.
    """
    n, most = sizes.n, _most_tokens(sizes)
    more = 4 * sizes.H // sizes.logit if sizes.accumulator else 0
    if sizes.on_cpu:
        return max(n, 1) if n <= most + more else min(_parts(sizes, most), most)
    wanted = max(-(-n // FEW), LEAST_TOKENS)
    if n <= wanted <= most + more:
        return max(n, 1)
    wanted = _parts(sizes, wanted)
    return wanted if wanted <= most + more else min(_parts(sizes, most), most)


def _parts(sizes: Sizes, most: int) -> int:
    """Tokens of the fewest equal chunks of at most ``most`` each, rounded up for the GEMMs."""
    return equal_parts(sizes.n, most, sizes.limits.multiple)


def _most_tokens(sizes: Sizes) -> int:
    budget = CPU_BUDGET if sizes.on_cpu else sizes.budget
    step = sizes.limits.multiple
    most = max(budget // (sizes.V * sizes.logit), step)
    if not sizes.on_cpu:
        return min(most // step * step, _DEVICE_TOKENS)
    # Adding a chunk of C tokens to the weight gradient takes about 24 / C of its product's time. So
    # a chunk may hold H / 4 tokens: in float32, logits of a quarter of that gradient's bytes.
    return max(most, sizes.H // 4) if sizes.weight else most


def tile_classes(sizes: Sizes, memory_budget: int | None, C: int = 1) -> int:
    """Classes of a tile, at most. Under a budget they follow from H, the dtype and the budget.

    With a budget of four times the least or more, these are the classes of a tile of every batch,
    and a token has the same bits in each. Nearer to the least, the number of tokens decides whether
    tiles must be narrower (:func:`_tile_candidates`), and the last bits depend on it.
    """
    most = sizes.limits.tile_classes
    if memory_budget is None:
        if sizes.triton:
            return most
        return most_classes(sizes.limits, C)
    tokens = 2048 if sizes.triton else 128
    each = tokens * (4 + sizes.element) + (1 if sizes.triton else 3) * sizes.H * sizes.acc
    while most > _LEAST_CLASSES and most * each > memory_budget // 3:
        most //= 2
    return most


def compared_classes(sizes: Sizes, C: int, T: int) -> int:
    """Classes of which two heads' logits are compared at a time: they stay in a core's cache."""
    return min(max(COMPARED_ELEMENTS_CPU * sizes.threads // C, 64), T) if sizes.on_cpu else T


def equal_parts(n: int, most: int, multiple: int) -> int:
    """The size of the fewest parts of equal size, none larger than ``most``."""
    equal = -(-n // -(-n // most))
    return -(-equal // multiple) * multiple


def power_of_2(n: int) -> int:
    """The least power of 2 that is at least ``n``; Triton's own function is slower."""
    return 1 << (n - 1).bit_length()


def multiple_of_16(n: int) -> int:
    """``n`` rounded up to a multiple of 16: the length of the rows that kernels write."""
    return -(-n // 16) * 16


# ---- bytes --------------------------------------------------------------------------------------


def chunked(sizes: Sizes, C: int, T: int) -> Plan:
    """The way by chunks of ``C`` tokens, on the torch backend by tiles of ``T`` classes."""
    n, V, H, acc = sizes.n, sizes.V, sizes.H, sizes.acc
    T, narrow = min(T, V), sizes.element < acc
    name, C = sizes.way_of_chunks(C), min(C, max(n, 1))
    heads = () if sizes.teacher is None else (2,)
    held: dict[str, int] = {}
    if sizes.triton:
        # Products of a tile of the logits, and of rows of d_hidden, share a buffer.
        width = multiple_of_16(V)
        rows = min(max(TILE_ELEMENTS[0], 128 * H), C * H)
        buffers = {
            "logits of a chunk": Buffer((*heads, C, width), sizes.logit),
            "tile of products": Buffer((max(sizes.products(C, V), rows),), 4),
            "statistics": Buffer((2 * sizes.blocks(V) + 2, C), 4),
            **(sizes.frequent() if name != CHUNKS else {}),
        }
        if sizes.weight and not sizes.fp16:
            buffers["scaled hidden states"] = Buffer((C, H), sizes.element)
        elif sizes.weight:
            held["scaled hidden states"] = C * H * sizes.element
        held["entries of the labels"] = n * ENTRY
        held["columns of frequent labels"] = sizes.for_frequent(C) if name != CHUNKS else 0
    else:
        buffers = {
            "logits of a chunk": Buffer((*heads, V, C), sizes.logit),
            **_torch_tile(sizes, C, T),
        }
        held["steps of a tile"] = (sizes.copies - 1) * C * T * acc
        rows = C * H * acc
        held["hidden states of a chunk"] = rows
        held["d_hidden of a chunk"] = rows if sizes.hidden else 0
        held["rows of the labels"] = rows
        held["scaled hidden states"] = rows if sizes.weight else 0
        # In order, summed by class, and as the gradient has them.
        held["sums of the labels' rows"] = 3 * rows if sizes.weight and narrow else 0
    if name == CHUNKS and sizes.accumulator:
        held["d_weight in float32"] = acc * V * H
    if sizes.teacher is not None:
        held["hidden states of the teacher"] = C * sizes.teacher * acc
        if sizes.triton:
            held["d_hidden of a chunk"] = C * H * acc
        else:
            compared = C * compared_classes(sizes, C, T)
            buffers["tiles compared"] = Buffer((2, compared), acc)
            held["steps of a comparison"] = 2 * compared * acc
    return _plan(sizes, name, C, V if sizes.triton else T, held, buffers)


def tiled_chunks(sizes: Sizes, C: int, T: int) -> Plan:
    """Triton's way by chunks of ``C`` tokens, of whose logits a tile of ``T`` classes exists."""
    n, V, H, acc = sizes.n, sizes.V, sizes.H, sizes.acc
    C, T = min(C, max(n, 1)), min(multiple_of_16(T), V)
    # The frequent labels' classes are a tile, too.
    most = max(T, min(FREQUENT, V)) if sizes.frequent() else T
    buffers = {
        "logits of a tile": Buffer((C, multiple_of_16(most)), sizes.logit),
        "tile of products": Buffer((max(sizes.products(C, most), min(C, 128) * H),), 4),
        "statistics": Buffer((2 * sizes.blocks(most) + 2, C), 4),
        **sizes.frequent(),
    }
    if sizes.hidden:
        buffers["d_hidden of a chunk"] = Buffer((C, H), acc)
    held = {
        "scaled hidden states": C * H * sizes.element if sizes.weight and sizes.fp16 else 0,
        "entries of the labels": n * ENTRY,
        "columns of frequent labels": sizes.for_frequent(H),
        # The pass that finds the log-sum-exps holds these.
        "statistics of the splits": C * (8 * min(-(-V // 64), MAX_SPLITS) + 100),
        "copies with aligned rows": sizes.aligned,
    }
    return _plan(sizes, TILES, C, T, held, buffers)


def tile_products(H: int) -> int:
    """Float32 products of a tile of logits that the Triton backend holds at a time."""
    return min(max(TILE_FLOPS // (2 * H), TILE_ELEMENTS[0]), TILE_ELEMENTS[1])


def by_tiles(sizes: Sizes, R: int, T: int) -> Plan:
    """Tiles of ``R`` tokens and ``T`` classes, and the bytes that they hold."""
    n, H, acc = sizes.n, sizes.H, sizes.acc
    T, narrow = min(T, sizes.V), sizes.element < acc
    buffers: dict[str, Buffer] = {}
    held: dict[str, int] = {}
    if sizes.weight and narrow:
        buffers["d_weight of a tile"] = Buffer((T, H), acc)
    if sizes.triton:
        buffers["tile of products"] = Buffer((R * multiple_of_16(T),), 4)
        buffers["gradient of a tile"] = Buffer((R, multiple_of_16(T)), sizes.element)
        if sizes.hidden and n < sizes.N:
            held["d_hidden of the rows used"] = n * H * acc
        if sizes.weight and sizes.fp16:
            held["scaled hidden states"] = n * H * (acc + sizes.element)
        # Up to five numbers a row and split, before the tiles are made.
        before = 20 * sizes.N * min(-(-sizes.V // 64), MAX_SPLITS) + sizes.aligned
        after = sum(held.values()) + sum(buffer.bytes for buffer in buffers.values())
        held["statistics"] = max(before - after, 0) + 4 * 16 * n
    else:
        filled = -(-R // ROW_MULTIPLE) * ROW_MULTIPLE
        buffers |= _torch_tile(sizes, filled, T)
        held["steps of a tile"] = (sizes.copies - 1) * filled * T * acc
        for name in ("hidden states of a block", "d_hidden of a block", "rows of the labels"):
            held[name] = filled * H * acc
        held["statistics"] = 8 * 16 * sizes.N
    return _plan(sizes, TILES, R, T, held, buffers)


def _torch_tile(sizes: Sizes, C: int, T: int) -> dict[str, Buffer]:
    """Return the buffers in which the torch backend's `Logits` compute every tile."""
    buffers = {"tile of logits": Buffer((T, C), sizes.acc)}
    if sizes.element < sizes.acc:
        buffers["rows of weight"] = Buffer((T, sizes.H), sizes.acc)
    if sizes.teacher is not None and sizes.teacher_element < sizes.acc:
        buffers["rows of the teacher's weight"] = Buffer((T, sizes.teacher), sizes.acc)
    return buffers


def _plan(
    sizes: Sizes,
    name: str,
    tokens: int,
    classes: int,
    held: dict[str, int],
    buffers: dict[str, Buffer],
) -> Plan:
    """A way that holds ``held`` and ``buffers``, and what every way holds."""
    N, H, acc, narrow = sizes.N, sizes.H, sizes.acc, sizes.element < sizes.acc
    wide_hidden = sizes.wide_hidden or not sizes.triton
    waiting, gathered = sizes.weight and sizes.wide_weight, sizes.triton and sizes.n < N
    T = min(classes, sizes.V)
    operands = acc * (tokens * H + T * H + tokens * T)
    held = {name: buffer.bytes for name, buffer in buffers.items()} | held
    held |= {
        "d_hidden in float32": N * H * acc if sizes.hidden and narrow and wide_hidden else 0,
        "d_weight waiting in float32": sizes.V * H * acc if waiting else 0,
        "hidden states gathered": sizes.n * H * sizes.element if gathered else 0,
        "positions": 24 * N,
        "held besides": sizes.fixed,
        "row-major copies": sizes.row_major,
        "products of the library": min(SCRATCH_CPU, operands) if sizes.on_cpu else 0,
    }
    held = {purpose: count for purpose, count in held.items() if count}
    return Plan(name, tokens, classes, held, buffers)
