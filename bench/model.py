"""Predicted time and memory of the loss on a GPU, term by term, beside what was measured.

    python bench/model.py                                     # the shapes that are measured
    python bench/model.py --shape 8192,4096,128256 --device H200      # every term of one of them
    python bench/model.py --measured bench/results/loss-cuda.json     # measured beside it

A call is a sum of terms: bytes over the memory's bandwidth, FLOPs over the rate of products, and
launches times their cost. Terms do not overlap unless their comment says so. Sizes are N tokens
(all valid), H hidden, V vocabulary; inputs are bf16, the denominator is known beforehand. The range
in brackets holds where every uncertain assumption is at its best, and at its worst.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lib.problems import SHAPES
from lib.tables import markdown

from fusedce.backends.held import EXP_BLOCK_V, TILES, Way, exp_block
from fusedce.backends.plan import way_of, way_of_divergence
from fusedce.backends.triton import archs
from fusedce.tools.plan import GiB, call

MiB = 2**20
Terms = dict[str, float]  # seconds


class Device(NamedTuple):
    """Rates that a program reaches, not those of a datasheet."""

    name: str
    arch: str  # its row of `archs.py`
    flops: float  # of a large bf16 product, per second
    bandwidth: float  # of a copy, bytes read and written per second
    memory: int  # bytes
    processors: int  # SMs or CUs
    clock: float  # Hz
    source: str

    @property
    def row(self) -> archs.Architecture:
        """Its block sizes."""
        return archs.BY_NAME[self.arch]

    @property
    def gemm_block(self) -> int:
        """Classes of a block where one GEMM makes the exponentials; 0: never."""
        walks = self.row.two_bytes
        return walks.gemm.BLOCK_V if walks.gemm is not None and walks.gemm_up_to else 0


# Rates measured on the H200 over those of its datasheet (989 TFLOP/s dense, 4.8 TB/s), for devices
# without measurements.
_REACHED_FLOPS, _REACHED_BANDWIDTH = 788 / 989, 4.3 / 4.8


def _datasheet(
    name: str, arch: str, tflops: float, tbytes: float, gib: int, processors: int, ghz: float
) -> Device:
    return Device(
        name, arch, tflops * 1e12 * _REACHED_FLOPS, tbytes * 1e12 * _REACHED_BANDWIDTH, gib * GiB,
        processors, ghz * 1e9,
        f"datasheet ({tflops:g} TFLOP/s dense, {tbytes:g} TB/s) times what the H200 reaches of its",
    )  # fmt: skip


DEVICES = {
    d.name: d
    for d in (
        _datasheet("A100", "sm_80", 312, 2.039, 80, 108, 1.41),
        _datasheet("H100", "sm_90", 989, 3.35, 80, 132, 1.98),
        Device("H200", "sm_90", 788e12, 4.3e12, 139 * GiB, 132, 1.98e9,
               "measured: bf16 product of 8192 x 8192 x 8192 on random data, device copy"),
        _datasheet("B200", "sm_100", 2250, 8.0, 180, 148, 1.965),
        _datasheet("MI300X", "gfx942", 1307, 5.3, 192, 304, 2.1),
        _datasheet("RTX 4090", "sm_89", 165.2, 1.008, 24, 128, 2.52),
    )
}  # fmt: skip


class Assumptions(NamedTuple):
    """The numbers that are least certain."""

    # The rate of our own main loops over the vendor's. A tile of 128 x 256 reads 11.7 bytes a kFLOP
    # from L2, 9.5 TB/s at an H200's rate; the vendor's shares tiles in a cluster.
    own_gemm: float = 0.84
    # Bytes a logit that cross the memory's bus around exp_tile: a tile's float32 products stay in
    # L2 until they are read (2 bytes are left), or go to memory.
    tile_bytes: float = 6.0
    bandwidth: float = 1.0  # of a pass over the logits, over that of a copy


LIKELY, BEST, WORST = Assumptions(), Assumptions(0.94, 2.0, 1.05), Assumptions(0.80, 10.0, 0.9)
# What else is assumed, the first two read off compiled kernels.
_EXP_INSTRUCTIONS = 18.0  # a logit, of one GEMM's epilogue
_FORWARD_INSTRUCTIONS = 10.0  # a logit, of the forward kernel's
_LAUNCH = 3e-6  # seconds between two kernels that follow each other
_CALL = 100e-6  # of Python around a call that the device waits for
_SORT = 8  # launches of a sort of a chunk's labels
_BLOCK_N, _BLOCK_V = 128, 256  # of the vendor's products
_TAIL = 0.1  # of a wave of blocks that a product wastes at its end
_LANES = 128  # instructions a multiprocessor issues in a cycle, times the lanes of a warp


class Asked(NamedTuple):
    """One call, and what is assumed of the device."""

    N: int
    H: int
    V: int
    device: Device
    training: bool = True
    budget: int | None = None  # bytes, of ours
    assumed: Assumptions = LIKELY

    def product(self, M: int, N: int, K: int) -> float:
        """Seconds of an ``(M, K) @ (K, N)`` bf16 product: its FLOPs, and the last wave of blocks.

        Bounded below by reading the operands and writing two bytes an element.
        """
        wave = _BLOCK_N * _BLOCK_V * self.device.processors  # elements computed at a time
        compute = 2.0 * K * (M * N + _TAIL * wave) / self.device.flops
        return max(compute, self.move(2 * (M * K + K * N + M * N)))

    def move(self, count: float) -> float:
        """Seconds of bytes that cross the memory's bus."""
        return count / (self.device.bandwidth * self.assumed.bandwidth)

    def instructions(self, count: float) -> float:
        """Seconds of instructions that no product hides."""
        return count / (_LANES * self.device.processors * self.device.clock)


class Prediction(NamedTuple):
    """Terms that add up to the whole."""

    terms: Mapping[str, float]  # seconds
    memory: Mapping[str, int]  # bytes beyond inputs and gradients, at the peak
    low: float = 0.0  # seconds, with the best assumptions
    high: float = 0.0  # seconds, with the worst ones

    @property
    def seconds(self) -> float:
        """The sum of the terms."""
        return math.fsum(self.terms.values())

    @property
    def bytes(self) -> int:
        """The sum of the memory's parts."""
        return sum(self.memory.values())


def bare_gemms(a: Asked) -> Prediction:
    """The products that every implementation needs: one forward, three with gradients."""
    terms = {"logits product": a.product(a.N, a.V, a.H)}
    if a.training:
        terms["d_hidden product"] = a.product(a.N, a.H, a.V)
        terms["d_weight product"] = a.product(a.V, a.H, a.N)
    return Prediction(terms, {"logits": 2 * a.N * a.V})


def _with_passes(a: Asked, passes: dict[str, int], each: int, held: dict[str, int]) -> Prediction:
    """The bare products, and passes that move so many bytes a logit in ``each`` launches."""
    terms = dict(bare_gemms(a).terms)
    terms |= {name: a.move(count * a.N * a.V) for name, count in passes.items()}
    terms["launches"] = _CALL + each * len(passes) * _LAUNCH
    return Prediction(terms, {name: count * a.N * a.V for name, count in held.items()})


def eager(a: Asked) -> Prediction:
    """``F.cross_entropy(F.linear(hidden, weight).float(), labels)``, kernel by kernel.

    Forward: to float32 (2 + 4 bytes a logit), log-softmax (read twice, written). Backward: zeros
    to scatter into (4), the slope of log-softmax (4 + 4 read twice, 4 written), back to bf16 (6).
    """
    passes, held = {"to float32": 6, "log-softmax": 12}, {"float32, log-softmax": 8}
    if a.training:
        passes |= {"scatter": 4, "slope of log-softmax": 20, "to bf16": 6}
        held = {"log-softmax, its gradient, the slope": 12}
    return _with_passes(a, passes, 3, held)


def compiled_eager(a: Asked) -> Prediction:
    """:func:`eager` through torch.compile: two reads forward, a read and a write backward.

    The gradient of the logits overwrites them: its memory on a CPU shows that.
    """
    passes = {"log-sum-exp": 4} | ({"slope": 4} if a.training else {})
    return _with_passes(a, passes, 2, {"logits": 2})


def fused_ce(a: Asked) -> Prediction:
    """This library's loss, by the way that the backend takes in the budget."""
    if not a.training:
        return _forward(a)
    way = way_of(call(a.N, a.H, a.V, 2, a.budget, device=a.device), memory_budget=a.budget)
    return Prediction((_by_tiles if way.name == TILES else _by_chunks)(a, way), way.held)


def _by_chunks(a: Asked, way: Way) -> Terms:
    N, H, V, row, processors = a.N, a.H, a.V, a.device.row, a.device.processors
    C = min(way.tokens, N)
    chunks = -(-N // C)
    if archs.by_one_gemm(row.two_bytes, H):
        tiles = 1
        terms = {
            "logits product": a.product(N, V, H) / a.assumed.own_gemm,
            "epilogue": a.instructions(_EXP_INSTRUCTIONS * N * V),
        }
    else:
        rows, T = row.tile_shape(C, V, H, exp_block(V), processors)
        tiles = -(-C // rows) * -(-V // T)
        terms = {
            "logits product": a.product(rows, T, H) * (N * V) / (rows * T),
            "exponentials": a.move(a.assumed.tile_bytes * N * V),
        }
    # The labels' logits; and of each row the statistics read, the hidden state read and scaled.
    terms["rows"] = a.move(4 * N * H + N * (8 * -(-V // EXP_BLOCK_V) + 4 * H))
    terms["d_hidden product"] = a.product(N, H, V)
    terms["d_hidden"] = a.move(14 * N * H)
    terms["d_weight product"] = a.product(V, H, N)
    if chunks > 1:  # added up in the product's epilogue
        terms["d_weight of chunks"] = a.move((8 * chunks + 6) * V * H)
    terms["labels' entries of d_weight"] = a.move(N * ((6 if chunks == 1 else 10) * H + 40))
    of_hidden = -(-C // row.rows_of_hidden(C, H, processors))
    terms["launches"] = _CALL + chunks * (2 * tiles + 2 * of_hidden + 4 + _SORT) * _LAUNCH
    return terms


def _by_tiles(a: Asked, way: Way) -> Terms:
    """The statistics' kernel, then three products a tile, of which one is a logits' again."""
    N, H, V = a.N, a.H, a.V
    R, T = min(way.tokens, N), way.classes
    tiles, blocks = -(-V // T), -(-N // R)
    count = N * V / (R * T)  # of whole blocks and tiles
    launches = 4 * tiles * blocks + (tiles if blocks > 1 else 0) + 40 + _SORT
    terms = {
        "statistics product": a.product(N, V, H) / a.assumed.own_gemm,
        "statistics epilogue": a.instructions(_FORWARD_INSTRUCTIONS * N * V),
        "logits product": a.product(R, T, H) * count,
        "gradient of the logits": a.move(6 * N * V),
        "d_hidden product": a.product(R, H, T) * count,
        "d_hidden": a.move((8 * tiles + 14) * N * H),
        "d_weight product": a.product(T, H, R) * count,
        "labels' entries of d_weight": a.move(N * (6 * H + 40)),
        "launches": _CALL + launches * _LAUNCH,
    }
    if blocks > 1:
        terms["d_weight of blocks"] = a.move((8 * blocks + 6) * V * H)
    return terms


def _forward(a: Asked) -> Prediction:
    """One launch, whose programs run in whole waves; two on a processor hide their epilogues."""
    walks = a.device.row.two_bytes
    blocks = archs.forward_blocks(walks, a.H, options=False)
    each, splits = archs.vocabulary_splits(a.V, blocks)
    resident = 2 if blocks is walks.forward_narrow else 1
    at_once = a.device.processors * resident
    waves = -(-(-(-a.N // blocks.BLOCK_N) * splits) // at_once)
    logits = waves * at_once * each * blocks.BLOCK_N * blocks.BLOCK_V  # of whole waves
    compute = 2.0 * a.H * logits / a.device.flops / a.assumed.own_gemm
    compute = max(compute, a.product(a.N, a.V, a.H))
    epilogue = a.instructions(_FORWARD_INSTRUCTIONS * logits)
    terms = {
        "logits product": compute,
        "epilogue": epilogue if resident == 1 else max(epilogue - compute, 0.0),
        "launches": _CALL * 0.8 + 2 * _LAUNCH,
    }
    return Prediction(terms, {"partials": 4 * (2 * splits + 1) * a.N, "rows": 8 * a.N})


def fused_kl(a: Asked) -> Prediction:
    """The forward divergence from a teacher of the same sizes: four products, one kernel."""
    N, H, V = a.N, a.H, a.V
    way = way_of_divergence(call(N, H, V, 2, a.budget), H, memory_budget=a.budget)
    C = min(way.tokens, N)
    chunks = -(-N // C)
    terms = {
        "logits products": 2 * a.product(C, V, H) * (N / C),
        # Both float32 results are written, and read by each of two walks.
        "divergence kernel": a.move((26 if a.training else 24) * N * V),
        "rows": a.move(8 * N * H),
        "launches": _CALL + chunks * (11 if a.training else 5) * _LAUNCH,
    }
    if a.training:
        terms["d_hidden product"] = a.product(C, H, V) * (N / C)
        terms["d_hidden"] = a.move(14 * N * H)
        terms["d_weight product"] = a.product(V, H, C) * (N / C)
        if chunks > 1:
            terms["d_weight of chunks"] = a.move((8 * chunks + 6) * V * H)
    return Prediction(terms, way.held)


METHODS: dict[str, Callable[[Asked], Prediction]] = {
    "bare GEMMs": bare_gemms,
    "eager": eager,
    "compiled eager": compiled_eager,
    "fused_kl": fused_kl,
    "fused_ce": fused_ce,
}


def predict(
    method: str, N: int, H: int, V: int, device: Device, *,
    training: bool = True, budget: int | None = None,
) -> Prediction:  # fmt: skip
    """Time and memory of one call of ``method``, a key of ``METHODS``."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {[*METHODS]}, got {method!r}")
    asked = Asked(N, H, V, device, training, budget)
    low, high = (METHODS[method](asked._replace(assumed=x)).seconds for x in (BEST, WORST))
    return METHODS[method](asked)._replace(low=low, high=high)


# ---- tables ---------------------------------------------------------------------------------


def terms_of(
    shape: tuple[int, int, int], device: Device, *, training: bool
) -> list[dict[str, str]]:
    """One row for each term of each method, and for each part of its memory."""
    floor = predict("bare GEMMs", *shape, device, training=training).seconds
    rows = []
    for method in METHODS:
        found = predict(method, *shape, device, training=training)
        for name, seconds in [*found.terms.items(), ("sum", found.seconds)]:
            ratio = f"{seconds / floor:.3f}"
            rows.append(_row(method, name, f"{1e3 * seconds:.3f}", ratio, ""))
        for name, count in [*found.memory.items(), ("memory", found.bytes)]:
            rows.append(_row(method, name, "", "", f"{count / MiB:.0f}"))
    return rows


def _row(*cells: str) -> dict[str, str]:
    return dict(zip(("method", "term", "ms", "/ bare GEMMs", "MiB"), cells, strict=True))


def overview(device: Device, *, training: bool) -> list[dict[str, str]]:
    """The measured shapes: milliseconds of the floor, and every method over it."""
    rows = []
    for shape in SHAPES["gpu"]:
        by = {name: predict(name, *shape, device, training=training) for name in METHODS}
        floor = by.pop("bare GEMMs").seconds
        row = {"N, H, V": ", ".join(map(str, shape)), "bare GEMMs, ms": f"{1e3 * floor:.1f}"}
        for name, found in by.items():
            ratios = (x / floor for x in (found.seconds, found.low, found.high))
            row[f"{name} / bare"] = "{:.2f} ({:.2f} to {:.2f})".format(*ratios)
            row[f"{name}, MiB"] = f"{found.bytes / MiB:.0f}"
        rows.append(row)
    return rows


def beside(data: Mapping[str, Any], device: Device) -> list[dict[str, str]]:
    """Rows of `bench/loss.py` with the prediction of each beside the measurement."""
    rows = []
    for row in data["rows"]:
        seconds, peak = sorted(row.get("seconds") or []), row.get("extra_peak_bytes")
        if row["name"] not in METHODS or row["mode"] == "frozen" or row["dtype"] != "bfloat16":
            continue
        if row["ignored"] or row.get("budget") or not (seconds or peak):
            continue
        shape = row["N"], row["H"], row["V"]
        found = predict(row["name"], *shape, device, training=row["mode"] == "train")
        median = seconds[len(seconds) // 2] if seconds else None
        rows.append({
            "suite": row["suite"],
            "N, H, V": ", ".join(map(str, shape)),
            "": row["name"],
            "predicted ms": f"{1e3 * found.seconds:.2f}",
            "range": f"{1e3 * found.low:.2f} to {1e3 * found.high:.2f}",
            "measured ms": f"{1e3 * median:.2f}" if median else "",
            "measured / predicted": f"{median / found.seconds:.2f}" if median else "",
            "predicted MiB": f"{found.bytes / MiB:.0f}",
            "measured MiB": "" if peak is None else f"{peak / MiB:.0f}",
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="N,H,V: every term of this one")
    parser.add_argument("--device", choices=list(DEVICES), default="H200")
    parser.add_argument("--forward", action="store_true", help="predict a call without gradients")
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="results of GPUs")
    args = parser.parse_args()
    device, training = DEVICES[args.device], not args.forward
    print(f"Predicted, not measured. {device.name}: {device.flops / 1e12:.0f} TFLOP/s, "
          f"{device.bandwidth / 1e12:.2f} TB/s; {device.source}.\n")  # fmt: skip
    if args.shape:
        N, H, V = (int(x) for x in args.shape.split(","))
        print(markdown(terms_of((N, H, V), device, training=training)))
        return
    print(markdown(overview(device, training=training)))
    for file in args.measured:
        data = json.loads(file.read_text())
        # A driver's name holds ours, as in "NVIDIA H200".
        of = next((d for d in DEVICES.values() if d.name in data["device"]), None)
        if of is not None:
            print(f"\nPrediction beside measurement, {data['device']}, {file.name}:\n")
            print(markdown(beside(data, of)))


if __name__ == "__main__":
    main()
