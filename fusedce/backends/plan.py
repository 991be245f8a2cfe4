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
torch is needed. :mod:`fusedce.backends.held` counts the bytes of each way, those beside the inputs
and the gradients in the inputs' dtype.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator

from fusedce.backends.held import (
    DEVICE_BUDGET,
    Call,
    MiB,
    Way,
    by_tiles,
    chunked,
    compared,
    equal_parts,
)

CPU_BUDGET = 56 * MiB  # of a chunk's logits; 64 MiB with the tiles and GEMM buffers beside it
# Adding a chunk of C tokens moves the weight gradient twice, about 24 / C of its product's time. So
# a chunk may hold H / 4 tokens on a CPU: in float32 logits a quarter of that gradient's bytes.
_TOKENS_BY_H_CPU = 1 / 4
# Bytes of a chunk's logits on a GPU of so many bytes or more.
LARGE_DEVICE_BUDGET, LARGE_DEVICE = 2048 * MiB, 40 * 10**9
# Beside a chunk the Triton backend holds a tile of float32 products of all its tokens. More tokens
# do not make the GEMMs any faster.
_DEVICE_TOKENS = 8192
ROW_MULTIPLE = 64  # blocks of so many tokens give a token the same bits in every batch
_LEAST_CLASSES = 64

_Sizes = tuple[Callable[[int], Way], int, int]  # a way by its tokens, and the fewest and the most


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
        C = chunk_size(call, chunk_tokens)
        return chunked(call, C, tile_classes(call, None, min(C, call.n)))
    return _fitting(call, _ways(call, tile_classes(call, memory_budget)), memory_budget)


def least_bytes(call: Call, *, tiles: bool = False) -> int:
    """The least budget of :func:`way_of`, or of :func:`tiles_of`."""
    ways = (_tilings if tiles else _ways)(call, _LEAST_CLASSES)
    return min(make(least).bytes for make, least, _ in ways)


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
    n, least, most = max(call.n, 1), call.limits.least_tokens, _most_tokens(call)
    yield from _chunkings(lambda C, T: chunked(call, C, T), n, n, classes)
    if least < min(n, most):
        yield from _chunkings(lambda C, T: chunked(call, C, T), least, most, classes)
    yield from _tilings(call, classes)


def _chunkings(
    make: Callable[[int, int], Way], least: int, most: int, classes: int
) -> Iterator[_Sizes]:
    for T in _halved(classes, _LEAST_CLASSES):
        yield functools.partial(lambda T, C: make(C, T), T), least, most


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
    return min(equal_parts(n, most, call.limits.multiple), most)


def _most_tokens(call: Call) -> int:
    budget = CPU_BUDGET if call.on_cpu else call.budget
    most = max(budget // (call.V * call.logit), call.limits.multiple)
    if not call.on_cpu:
        return min(most, _DEVICE_TOKENS)
    return max(most, int(call.H * _TOKENS_BY_H_CPU)) if call.weight else most


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
        return _fitting(call, _tilings(call, tile_classes(call, memory_budget)), memory_budget)
    if call.triton:
        T = tile_classes(call, None)
        most = call.budget // (T * (4 + call.element))
    else:
        most = call.limits.block_tokens
        T = tile_classes(call, None, most)
    if chunk_tokens is not None:
        return by_tiles(call, min(chunk_tokens, n), T)
    return by_tiles(call, equal_parts(n, most, _block_multiple(call)), T)


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
    if memory_budget is None:
        C = min(chunk_size(of_one_head, chunk_tokens), max(call.n, 1))
        return compared(call, C, tile_classes(call, None, C), teacher_H)
    ways = _comparisons(call, tile_classes(call, memory_budget), teacher_H)
    return _fitting(call, ways, memory_budget)


def least_bytes_of_divergence(call: Call, teacher_H: int | None) -> int:
    """The least budget of :func:`way_of_divergence`."""
    return min(
        make(least).bytes for make, least, _ in _comparisons(call, _LEAST_CLASSES, teacher_H)
    )


def _comparisons(call: Call, classes: int, teacher_H: int | None) -> Iterator[_Sizes]:
    """Ways of a divergence by tiles of at most so many classes, the fastest first."""
    n, few, most = max(call.n, 1), call.limits.multiple, _most_tokens(call._replace(logit=call.acc))

    def way(C: int, T: int) -> Way:
        return compared(call, min(C, n), T, teacher_H)

    yield from _chunkings(way, n, n, classes)
    yield from _chunkings(way, few, most, classes)


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


def _block_multiple(call: Call) -> int:
    """The number that divides the tokens of a block."""
    return 128 if call.triton else ROW_MULTIPLE


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
