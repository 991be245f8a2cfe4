"""How many tokens' logits to hold at a time."""

from __future__ import annotations

_MiB = 2**20
CPU_BUDGET = 56 * _MiB  # 64 MiB with the tiles and GEMM buffers beside it
DEVICE_BUDGET = 1024 * _MiB
# Beside a chunk the Triton backend holds a tile of float32 products of all its tokens, at least
# 2048 classes wide: 64 MiB for so many. More tokens do not make the GEMMs any faster.
_DEVICE_TOKENS = 8192


def chunk_size(
    n: int,  # valid tokens
    V: int,
    H: int,
    *,
    logit_bytes: int,
    accumulator: bool,
    on_cpu: bool,
    chunk_tokens: int | None,
) -> int:
    """Tokens per chunk, at least 1; ``chunk_tokens`` is obeyed as it is.

    The extra memory is ``C * V * logit_bytes`` for a chunk of ``C`` tokens and, with more than
    one chunk, ``4 * V * H`` for a float32 accumulator of the weight gradient wherever that is not
    the gradient itself (``accumulator``). A single chunk saves the accumulator and its traffic,
    so it is both smaller and faster while ``n <= C + 4 * H / logit_bytes``. Beyond that, chunks
    of equal size, rounded up to what suits the GEMMs.
    """
    if chunk_tokens is not None:
        return chunk_tokens
    budget, multiple = (CPU_BUDGET, 16) if on_cpu else (DEVICE_BUDGET, 128)
    most = max(budget // (V * logit_bytes), multiple)
    if not on_cpu:
        most = min(most, _DEVICE_TOKENS)
    if n <= most + (4 * H // logit_bytes if accumulator else 0):
        return max(n, 1)
    chunks = -(-n // most)
    equal = -(-n // chunks)
    return min(-(-equal // multiple) * multiple, most)
