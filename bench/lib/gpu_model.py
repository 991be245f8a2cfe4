"""Predict time and memory of the loss on a GPU from bytes, FLOPs, launches and device figures.

A call is a sum of terms: bytes over the memory's bandwidth, FLOPs over the rate of products, and
launches times their cost. Terms do not overlap unless their comment says so. Sizes are N tokens
(all valid), H hidden, V vocabulary; inputs are bf16. No torch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fusedce.backends.held import (
    EXP_BLOCK_V,
    FORWARD_NARROW_H,
    MAX_SPLITS,
    TILES,
    WEIGHT_ROWS,
    Way,
    exp_block,
    rows_of_hidden,
    tile_shape,
)
from fusedce.backends.plan import way_of, way_of_divergence
from fusedce.tools.plan import GiB, call

MiB = 2**20


class Device(NamedTuple):
    """Rates that a program reaches, not those of a datasheet."""

    name: str
    flops: float  # of a large bf16 product, per second
    bandwidth: float  # of a copy, bytes read and written per second
    memory: int  # bytes
    l2: int  # bytes of the last cache
    processors: int  # SMs or CUs
    clock: float  # Hz
    source: str
    gemm_block: int = 0  # classes of a block where one GEMM makes the exponentials; 0: never
    forward_block: tuple[int, int] = (128, 128)  # rows and classes of a forward program's tiles
    narrow: bool = False  # two forward programs share a processor up to FORWARD_NARROW_H


# Rates measured on the H200 over those of its datasheet (989 TFLOP/s dense, 4.8 TB/s), for devices
# without measurements.
_REACHED_FLOPS, _REACHED_BANDWIDTH = 788 / 989, 4.3 / 4.8


def _datasheet(
    name: str, tflops: float, tbytes: float, gib: int, l2: int, processors: int, ghz: float,
    **ours: Any,
) -> Device:  # fmt: skip
    return Device(
        name, tflops * 1e12 * _REACHED_FLOPS, tbytes * 1e12 * _REACHED_BANDWIDTH, gib * GiB,
        l2 * MiB, processors, ghz * 1e9,
        f"datasheet ({tflops:g} TFLOP/s dense, {tbytes:g} TB/s) times what the H200 reaches of its",
        **ours,
    )  # fmt: skip


_HOPPER: Any = {"gemm_block": 256, "forward_block": (128, 256), "narrow": True}


DEVICES = {
    d.name: d
    for d in (
        _datasheet("A100", 312, 2.039, 80, 40, 108, 1.41, forward_block=(256, 128)),
        _datasheet("H100", 989, 3.35, 80, 50, 132, 1.98, **_HOPPER),
        Device("H200", 788e12, 4.3e12, 139 * GiB, 60 * MiB, 132, 1.98e9,
               "measured: bf16 product of 8192 x 8192 x 8192 on random data, device copy",
               **_HOPPER),
        _datasheet("B200", 2250, 8.0, 180, 126, 148, 1.965,
                   gemm_block=256, forward_block=(128, 256)),
        _datasheet("MI300X", 1307, 5.3, 192, 256, 304, 2.1, forward_block=(256, 128)),
        _datasheet("RTX 4090", 165.2, 1.008, 24, 72, 128, 2.52),
    )
}  # fmt: skip

SHAPES = ((8192, 4096, 128256), (32768, 4096, 128256), (8192, 2304, 256000),
          (8192, 2048, 128256), (4096, 896, 151936), (2048, 896, 151936))  # fmt: skip


class Assumptions(NamedTuple):
    """How a training pass is made, and what is assumed of its speed: a row of the table.

    The numbers of ``NOW`` are read off the code and off compiled kernels; those of the others are
    what the code would be. Where a number is an assumption it says so. Sizes of chunks and tiles,
    and what they hold, are those of :mod:`fusedce.backends.plan`.
    """

    one_gemm: bool = False  # the product writes exponentials, no float32 tile is in memory
    normalise: bool = False  # a second pass over the exponentials
    add_in_place: bool = True  # the chunks' weight gradients are added in the product's epilogue
    known_denominator: bool = True  # the gradients are made with their final factor
    single_entries: bool = True  # of labels and of the likeliest others: in float32
    # The rate of our own main loops over the vendor's (assumed). A tile of 128 x 256 reads 11.7
    # bytes a kFLOP from L2, 9.5 TB/s at an H200's rate; the vendor's shares tiles in a cluster.
    own_gemm: float = 0.84
    exp_instructions: float = 18.0  # a logit, of one GEMM's epilogue (assumed from compiled code)
    forward_instructions: float = 10.0  # a logit, of the forward kernel's (likewise)
    tile_bytes: float = 6.0  # a logit that crosses the memory's bus around exp_tile (assumed)


# bf16 without label smoothing, a denominator that is known beforehand, torch from 2.11 on.
NOW = Assumptions()
ONE_GEMM = NOW._replace(one_gemm=True)
# The least certain assumption of each way, and the range in which its number may lie. A tile's
# float32 products stay in L2 until they are read (2 bytes a logit are left), or go to memory.
UNCERTAIN = {"own_gemm": (0.94, 0.80), "tile_bytes": (2.0, 10.0)}
# Bandwidth of a pass over the logits, over that of a copy: the least certain assumption for peers.
_BANDWIDTH = 1.05, 0.9
PLANS = {
    "fused_ce": NOW,
    "fused_ce, one GEMM": ONE_GEMM,
}
_LAUNCH = 3e-6  # seconds between two kernels that follow each other (assumed)
_CALL = 100e-6  # of Python around a call that the device waits for (assumed)
_SORT = 8  # launches of a sort of a chunk's labels (assumed)
_BLOCK_N, _BLOCK_V = 128, 256  # of the products
_TAIL = 0.1  # of a wave of blocks that a product wastes at its end (assumed)
_LANES = 128  # instructions a multiprocessor issues in a cycle, times the lanes of a warp


class Prediction(NamedTuple):
    """Terms that add up to the whole."""

    terms: Mapping[str, float]  # seconds
    memory: Mapping[str, int]  # bytes beyond inputs and gradients, at the peak
    low: float = 0.0  # seconds, where the least certain assumption holds its best number
    high: float = 0.0  # seconds, with its worst one

    @property
    def seconds(self) -> float:
        """The sum of the terms."""
        return math.fsum(self.terms.values())

    @property
    def bytes(self) -> int:
        """The sum of the memory's parts."""
        return sum(self.memory.values())


# ---- what everything is made of ---------------------------------------------------------------


def product(device: Device, M: int, N: int, K: int) -> float:
    """Seconds of an ``(M, K) @ (K, N)`` bf16 product: its FLOPs, and the last wave of blocks.

    Bounded below by reading the operands and writing two bytes an element.
    """
    wave = _BLOCK_N * _BLOCK_V * device.processors  # elements that are computed at a time
    compute = 2.0 * K * (M * N + _TAIL * wave) / device.flops
    return max(compute, _move(device, 2 * (M * K + K * N + M * N)))


def _move(device: Device, count: float) -> float:
    return count / device.bandwidth


def bare_gemms(N: int, H: int, V: int, device: Device, *, training: bool = True) -> Prediction:
    """The products that every implementation needs: one forward, three with gradients."""
    terms = {"logits product": product(device, N, V, H)}
    if training:
        terms["d_hidden product"] = product(device, N, H, V)
        terms["d_weight product"] = product(device, V, H, N)
    return Prediction(terms, {"logits": 2 * N * V})


def eager(N: int, H: int, V: int, device: Device, *, training: bool = True) -> Prediction:
    """``F.cross_entropy(F.linear(hidden, weight).float(), labels)``, kernel by kernel.

    Forward: to float32 (2 + 4 bytes a logit), log-softmax (read twice, written). Backward: zeros
    to scatter into (4), the slope of log-softmax (4 + 4 read twice, 4 written), back to bf16 (6).
    """
    passes = {"to float32": 6, "log-softmax": 12}
    if training:
        passes |= {"scatter": 4, "slope of log-softmax": 20, "to bf16": 6}
    terms = dict(bare_gemms(N, H, V, device, training=training).terms)
    terms |= {name: _move(device, count * N * V) for name, count in passes.items()}
    terms["launches"] = _CALL + 3 * len(passes) * _LAUNCH
    held = {"log-softmax, its gradient, the slope": 12} if training else {"float32, log-softmax": 8}
    return Prediction(terms, {name: count * N * V for name, count in held.items()})


def compiled_eager(N: int, H: int, V: int, device: Device, *, training: bool = True) -> Prediction:
    """:func:`eager` through torch.compile: two reads forward, a read and a write backward.

    The gradient of the logits overwrites them: its memory on a CPU shows that.
    """
    passes = {"log-sum-exp": 4} | ({"slope": 4} if training else {})
    terms = dict(bare_gemms(N, H, V, device, training=training).terms)
    terms |= {name: _move(device, count * N * V) for name, count in passes.items()}
    terms["launches"] = _CALL + 2 * len(passes) * _LAUNCH
    return Prediction(terms, {"logits": 2 * N * V})


# ---- ours -------------------------------------------------------------------------------------


def fused_ce(
    N: int,
    H: int,
    V: int,
    device: Device,
    *,
    training: bool = True,
    assumed: Assumptions = NOW,
    memory_budget: int | None = None,
) -> Prediction:
    """This library's loss: `walk_kernel`, or the way that the backend takes in the budget."""
    if not training:
        return _with_range(lambda assumed: _forward(N, H, V, device, assumed), assumed, "own_gemm")
    asked = call(N, H, V, 2, memory_budget, device=device)
    if asked.gemm_block:
        assumed = assumed._replace(one_gemm=True)
    way = way_of(asked, memory_budget=memory_budget)
    held = dict(way.held)
    if assumed.one_gemm and not asked.gemm_block:
        held.pop("tile of products", None)
    by = _by_tiles if way.name == TILES else _by_chunks
    uncertain = "own_gemm" if assumed.one_gemm or way.name == TILES else "tile_bytes"
    return _with_range(
        lambda assumed: Prediction(by(N, H, V, device, assumed, way), held), assumed, uncertain
    )


def _with_range(
    of: Callable[[Assumptions], Prediction], assumed: Assumptions, uncertain: str
) -> Prediction:
    """The prediction, and its seconds at both ends of what the field ``uncertain`` may be."""
    ends: list[dict[str, Any]] = [{uncertain: x} for x in UNCERTAIN[uncertain]]
    low, high = (of(assumed._replace(**end)).seconds for end in ends)
    return of(assumed)._replace(low=low, high=high)


def launches(way: Way, N: int, H: int, V: int, gemm_block: int = 0) -> dict[str, int]:
    """Number of launches of each kernel, and of products, in a training pass by chunks.

    The names are those of the kernels; a test compares the counts with what the code launches.
    """
    C = min(way.tokens, N)
    sizes = [C] * (N // C) + ([N % C] if N % C else [])
    step = rows_of_hidden(H)
    count = {
        "compact_kernel": 1,
        "label_logit_kernel": len(sizes),
        "softmax_rows_kernel": len(sizes),
        "hidden_grad_kernel": sum(-(-n // min(step, C)) for n in sizes),
        "label_grad_kernel": len(sizes),
    }
    products = count["hidden_grad_kernel"] + len(sizes)
    if gemm_block:
        count["walk_kernel"] = len(sizes)
    else:
        rows, T = tile_shape(C, V, H, exp_block(V))
        count["exp_tile_kernel"] = sum(-(-n // rows) for n in sizes) * -(-V // T)
        products += count["exp_tile_kernel"]
    return count | {"product": products}


def forward_block(device: Device, H: int) -> tuple[int, int]:
    """Rows and classes of the tiles of the forward kernel's programs."""
    return (128, 128) if device.narrow and H <= FORWARD_NARROW_H else device.forward_block


def _by_chunks(
    N: int, H: int, V: int, device: Device, assumed: Assumptions, way: Way
) -> dict[str, float]:
    C = way.tokens
    chunks = -(-N // C)
    terms = {}
    if assumed.one_gemm:
        terms["logits product"] = product(device, N, V, H) / assumed.own_gemm
        terms["epilogue"] = _instructions(device, assumed.exp_instructions * N * V)
    else:
        rows, T = tile_shape(C, V, H, exp_block(V))
        terms["logits product"] = product(device, rows, T, H) * (N * V) / (rows * T)
        terms["exponentials"] = _move(device, assumed.tile_bytes * N * V)
    # The labels' logits; and of each row the statistics read, the hidden state read and scaled.
    terms["rows"] = _move(device, 4 * N * H + N * (8 * -(-V // EXP_BLOCK_V) + 4 * H))
    count = sum(launches(way, N, H, V, int(assumed.one_gemm)).values())
    terms["d_hidden product"] = product(device, N, H, V)
    terms["d_hidden"] = _move(device, 14 * N * H)
    terms["d_weight product"] = product(device, V, H, N)
    if chunks > 1:
        each = 8 if assumed.add_in_place else 16
        terms["d_weight of chunks"] = _move(device, each * chunks * V * H)
        terms["d_weight to bf16"] = _move(device, 6 * V * H)
        count += 0 if assumed.add_in_place else 2 * chunks * -(-V // WEIGHT_ROWS)
    if assumed.normalise:
        terms["normalisation"] = _move(device, 4 * N * V)
    if assumed.single_entries:  # those of the labels, and at most as many others
        each = 6 if chunks == 1 else 10
        terms["single entries of d_weight"] = _move(device, 2 * N * (each * H + 40))
        count += chunks * _SORT
    if not assumed.known_denominator:
        terms["scaling by the denominator"] = _move(device, 4 * (V * H + N * H))
    terms["launches"] = _CALL + count * _LAUNCH
    return terms


def fused_kl(
    N: int,
    H: int,
    V: int,
    device: Device,
    *,
    training: bool = True,
    memory_budget: int | None = None,
) -> Prediction:
    """The forward divergence from a teacher of the same sizes: four products, one kernel."""
    way = way_of_divergence(call(N, H, V, 2, memory_budget), H, memory_budget=memory_budget)
    C = min(way.tokens, N)
    chunks = -(-N // C)
    terms = {"logits products": 2 * product(device, C, V, H) * (N / C)}
    # Both float32 results are written, and read by each of two walks.
    terms["divergence kernel"] = _move(device, (8 + 16 + (2 if training else 0)) * N * V)
    terms["rows"] = _move(device, 8 * N * H)
    launches = 5
    if training:
        terms["d_hidden product"] = product(device, C, H, V) * (N / C)
        terms["d_hidden"] = _move(device, 14 * N * H)
        terms["d_weight product"] = product(device, V, H, C) * (N / C)
        launches += 6
        if chunks > 1:
            terms["d_weight of chunks"] = _move(device, 8 * chunks * V * H)
            terms["d_weight to bf16"] = _move(device, 6 * V * H)
    terms["launches"] = _CALL + chunks * launches * _LAUNCH
    return Prediction(terms, way.held)


def _by_tiles(
    N: int, H: int, V: int, device: Device, assumed: Assumptions, way: Way
) -> dict[str, float]:
    """The statistics' kernel, then three products a tile, of which one is a logits' again."""
    R, T = min(way.tokens, N), way.classes
    tiles, blocks = -(-V // T), -(-N // R)
    count = N * V / (R * T)  # of whole blocks and tiles
    terms = {
        "statistics product": product(device, N, V, H) / assumed.own_gemm,
        "statistics epilogue": _instructions(device, assumed.forward_instructions * N * V),
        "logits product": product(device, R, T, H) * count,
        "gradient of the logits": _move(device, 6 * N * V),
        "d_hidden product": product(device, R, H, T) * count,
        "d_hidden of tiles": _move(device, 8 * tiles * N * H),
        "d_hidden": _move(device, 14 * N * H),
        "d_weight product": product(device, T, H, R) * count,
    }
    if blocks > 1:
        terms["d_weight of blocks"] = _move(device, (8 * blocks + 6) * V * H)
    if assumed.single_entries:
        terms["single entries of d_weight"] = _move(device, 2 * N * (6 * H + 40))
    launches = 4 * tiles * blocks + (tiles if blocks > 1 else 0) + 40 + _SORT
    terms["launches"] = _CALL + launches * _LAUNCH
    return terms


def _forward(N: int, H: int, V: int, device: Device, assumed: Assumptions) -> Prediction:
    """One launch, whose programs run in whole waves; two on a processor hide their epilogues."""
    block_n, block_v = forward_block(device, H)
    tiles = -(-V // block_v)
    each = -(-tiles // MAX_SPLITS)
    splits = -(-tiles // each)
    resident = 2 if device.narrow and H <= FORWARD_NARROW_H else 1
    at_once = device.processors * resident
    waves = -(-(-(-N // block_n) * splits) // at_once)
    logits = waves * at_once * each * block_n * block_v  # of whole waves
    compute = max(2.0 * H * logits / device.flops / assumed.own_gemm, product(device, N, V, H))
    epilogue = _instructions(device, assumed.forward_instructions * logits)
    terms = {"logits product": compute, "launches": _CALL * 0.8 + 2 * _LAUNCH}
    if resident == 1 or epilogue > compute:
        terms["epilogue"] = epilogue if resident == 1 else epilogue - compute
    return Prediction(terms, {"partials": 4 * (2 * splits + 1) * N, "rows": 8 * N})


def _instructions(device: Device, count: float) -> float:
    """Seconds of instructions that no product hides."""
    return count / (_LANES * device.processors * device.clock)


METHODS: dict[str, Callable[..., Prediction]] = {
    "bare GEMMs": bare_gemms,
    "eager": eager,
    "compiled eager": compiled_eager,
    "fused_kl": fused_kl,
}


def predict(
    method: str,
    N: int,
    H: int,
    V: int,
    device: Device,
    *,
    training: bool = True,
    memory_budget: int | None = None,
) -> Prediction:
    """Time and memory of one call of ``method``: a key of ``METHODS`` or of ``PLANS``.

    ``memory_budget``: bytes, of ours.
    """
    if method in PLANS:
        return fused_ce(
            N, H, V, device, training=training, assumed=PLANS[method], memory_budget=memory_budget
        )
    if method not in METHODS:
        raise ValueError(f"method must be one of {[*METHODS, *PLANS]}, got {method!r}")
    options = {"memory_budget": memory_budget} if method == "fused_kl" else {}

    def found(device: Device) -> Prediction:
        return METHODS[method](N, H, V, device, training=training, **options)

    low, high = (
        found(device._replace(bandwidth=device.bandwidth * share)).seconds for share in _BANDWIDTH
    )
    return found(device)._replace(low=low, high=high)
