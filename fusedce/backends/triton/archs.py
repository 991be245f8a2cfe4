"""Block sizes of the kernels: frozen data, one row an architecture, no tuning at run time.

To add an architecture, add a row to :data:`ARCHITECTURES`: `bench/compiler_report.py` and the tests
compile every kernel for every row, and find launches that spill. The sizes of a launch depend on
the device, the dtype, the options and the alignment of the weight; the blocks of a row's loss never
on N: it must have the same bits in every batch. The sizes were chosen from the compiler's registers
and spills; those of sm_90 were measured on an H200 (`python bench/gpu.py ways blocks`).
``triton.autotune`` is not used: it chooses anew in every process, by timing, inside the first call
of a user, and its choice would change the last bits of a loss from run to run.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .. import plan
from ..devices import Generation, generation_of, type_of

KiB = 1024
EVERY_H = 2**31
ROW_WARPS = 4  # of kernels that take a row of a chunk
LABEL_LOGIT_BLOCK = (16, 256)  # rows, and columns of H, of the labels' logits
LABEL_GRAD_BLOCK = (4, 1024)  # rows of one label, and columns of H, added at a time
LABEL_GRAD_WARPS = 8


class Blocks(NamedTuple):
    """Blocks of a kernel that walks over the vocabulary."""

    BLOCK_N: int
    BLOCK_V: int
    BLOCK_H: int
    num_warps: int
    num_stages: int
    GROUP_N: int = 16  # row blocks that share a split's weights through L2
    DESCRIPTOR: bool = False  # read weight by TMA where its rows are 16-byte aligned
    MAX_SPLITS: int = 128  # of the vocabulary: enough programs for one row block


class Walks(NamedTuple):
    """Blocks for inputs of one size."""

    forward: Blocks
    forward_with_options: Blocks  # bias, scale, soft-cap
    stats: Blocks  # entropy and argmax need registers as well
    stats_with_options: Blocks  # and the mean of the logits, class weights
    gemm: Blocks | None = None  # the product whose epilogue writes exponentials; None: cuBLAS's
    gemm_with_options: Blocks | None = None  # and argmax
    # Hidden size up to which training uses it. It saves writing and reading float32 tiles, 8 bytes
    # a logit; its main loop is slower than cuBLAS's, which costs time in proportion to H.
    gemm_up_to: int = 0


class Architecture(NamedTuple):
    """Block sizes and limits for a family of devices."""

    name: str
    two_bytes: Walks  # bf16, fp16
    four_bytes: Walks
    shared_limit: int = 0  # bytes a program may use
    generations: tuple[Generation, ...] = ()  # of devices: `backends/devices.py`
    exp_block_v: int = plan.EXP_BLOCK_V  # classes of a row that share one maximum in training
    token_warps: int = 4  # of the kernel that makes a tile's gradient token by token
    divergence_block_v: int = 1024  # two rows at once, and the divergence between them

    @property
    def compiler(self) -> tuple[str, int | str, int] | None:
        """Triton's (backend, arch, warp size)."""
        if self.name.startswith("sm_"):
            return "cuda", int(self.name[3:]), 32
        return ("hip", self.name, 64) if self.name.startswith("gfx") else None

    def walks(self, element_size: int) -> Walks:
        """Blocks for inputs of ``element_size`` bytes."""
        return self.two_bytes if element_size == 2 else self.four_bytes

    def tile_shape(
        self, C: int, V: int, H: int, block: int, processors: int = 1
    ) -> tuple[int, int]:
        """Rows and columns of the products of ``C`` tokens that are held at a time.

        The rows are equal parts of ``C``, multiples of 128: a part of a few rows would take a
        product of its own that leaves most of a GPU idle. The columns are whole blocks.
        """
        count = plan.tile_products(H)
        rows = min(C, plan.equal_parts(C, max(count // block // 128 * 128, 128), 128))
        T = min(max(count // rows // block, 1) * block, V)
        return rows_in_waves(C, T, rows, processors), T

    def rows_of_hidden(self, C: int, H: int, processors: int = 1) -> int:
        """Rows of the products of d_hidden of ``C`` tokens that are held at a time."""
        rows = max(plan.TILE_ELEMENTS[0] // H // 128 * 128, 128)
        return rows_in_waves(C, H, rows, processors)


def rows_in_waves(C: int, columns: int, most: int, processors: int) -> int:
    """The row count in [most / 2, most] that needs the fewest GEMM waves.

    ``C`` rows by ``columns`` are computed in blocks of 128 x 256 (what cuBLAS takes, assumed),
    one a processor at a time.
    """

    def waves(rows: int) -> int:
        parts = [rows] * (C // rows) + ([C % rows] if C % rows else [])
        return sum(-(-(-(-n // 128) * -(-columns // 256)) // processors) for n in parts)

    if most >= C:
        return C
    return min(range(most // 128 * 128, most // 2, -128), key=waves, default=most)


def _same(blocks: Blocks) -> Walks:
    return Walks(blocks, blocks, blocks, blocks)


_AMPERE = Blocks(128, 128, 64, 8, 3)
_HOPPER = Blocks(128, 256, 64, 8, 3, DESCRIPTOR=True)
_HOPPER_SMALL = Blocks(128, 128, 64, 8, 4, DESCRIPTOR=True)
_HOPPER_NARROW = _HOPPER_SMALL._replace(BLOCK_V=64)
_SMALL = Blocks(64, 64, 64, 4, 2)
_SMALL_8_WARPS = _SMALL._replace(num_warps=8)
_SMALL_FP32 = Blocks(64, 64, 32, 4, 2)
# Small blocks, so that small test shapes have several, of odd sizes.
_TINY = Blocks(32, 64, 32, 4, 1, GROUP_N=2, MAX_SPLITS=5)
_TMA = _TINY._replace(DESCRIPTOR=True)

_AMPERE_TWO = _same(_AMPERE)._replace(
    forward=Blocks(256, 128, 32, 8, 3),
    stats_with_options=_AMPERE._replace(BLOCK_V=64),
    gemm=_AMPERE,
    gemm_with_options=_AMPERE._replace(BLOCK_V=64),
)
_FOUR_BYTES = _same(Blocks(128, 64, 32, 8, 3))
_HOPPER_TWO = Walks(
    forward=_HOPPER,
    forward_with_options=_HOPPER,
    stats=_HOPPER_SMALL,
    stats_with_options=_HOPPER_NARROW,
    gemm=_HOPPER,
    gemm_with_options=_HOPPER_SMALL,
    gemm_up_to=EVERY_H,  # measured on an H200
)
# As large as Hopper's: of 256 classes ptxas spills 384 to 744 bytes, run as Triton runs it.
_BLACKWELL = Blocks(256, 128, 64, 8, 3, DESCRIPTOR=True)
_BLACKWELL_TWO = _HOPPER_TWO._replace(
    forward=_BLACKWELL,
    forward_with_options=_HOPPER_SMALL,
    gemm=_BLACKWELL,
    gemm_with_options=_HOPPER_NARROW,
    gemm_up_to=plan.EXP_GEMM_H,  # on paper
)
# With 8 warps, sm_100's compiler spills 80 to 112 bytes of a thread's products.
_BLACKWELL_FOUR = _same(Blocks(128, 64, 32, 16, 3))
# Shared memory of about 100 kB (consumer cards) or 64 kB (AMD), and devices without a row.
_OTHER_TWO = _same(_SMALL)._replace(gemm=_SMALL, gemm_with_options=_SMALL)
_OTHER_FOUR = _same(_SMALL_FP32)
# Cards with 99 KiB and 64 Ki registers: 48 KiB of buffers, wide tiles where the epilogue is short.
_WIDE = Blocks(128, 128, 32, 8, 4)
_ADA_TWO = _OTHER_TWO._replace(
    forward=_WIDE,
    forward_with_options=_WIDE,
    gemm=_WIDE,
    gemm_with_options=_WIDE._replace(BLOCK_V=64),  # 128 spills 264 bytes
)
_ADA_FOUR = _same(Blocks(64, 64, 32, 8, 2))._replace(stats_with_options=_SMALL_FP32)
_ADA = Architecture(
    "sm_86",
    _ADA_TWO,
    _ADA_FOUR,
    shared_limit=99 * KiB,
    divergence_block_v=256,  # with 512, uneven jsd spills
    generations=((8, 6),),
)

ARCHITECTURES = (
    Architecture(
        "sm_80",
        _AMPERE_TWO,
        _FOUR_BYTES,
        shared_limit=163 * KiB,
        generations=((8, 0), (8, 7)),
    ),
    Architecture(
        "sm_90",
        _HOPPER_TWO,
        _FOUR_BYTES,
        shared_limit=227 * KiB,
        generations=((9, 0),),
    ),
    Architecture(
        "sm_100",
        _BLACKWELL_TWO,
        _BLACKWELL_FOUR,
        shared_limit=227 * KiB,
        generations=((10, 0), (10, 3)),
    ),
    _ADA,
    _ADA._replace(name="sm_89", generations=((8, 9),)),
    _ADA._replace(
        name="sm_120",
        # With 4 warps, statistics of two bytes spill up to 32 bytes, tokens' float32 gradients 8.
        two_bytes=_ADA_TWO._replace(
            stats=_SMALL_8_WARPS, stats_with_options=_SMALL_8_WARPS, gemm_up_to=EVERY_H
        ),
        token_warps=8,
        generations=((12, 0), (12, 1)),
    ),
    Architecture(
        "gfx942",
        _OTHER_TWO._replace(forward=Blocks(256, 128, 64, 8, 2)),
        _OTHER_FOUR,
        shared_limit=64 * KiB,
        generations=("gfx90a", "gfx942", "gfx950"),
    ),
    Architecture("other", _OTHER_TWO, _OTHER_FOUR),
    Architecture(
        "interpreter",
        _same(_TMA)._replace(gemm=_TMA, gemm_with_options=_TMA),
        _same(_TINY),
        exp_block_v=256,
        divergence_block_v=128,
    ),
)
BY_NAME = {row.name: row for row in ARCHITECTURES}


@functools.cache
def architecture(device: torch.device) -> Architecture:
    """The row of ``device``."""
    if device.type == "cpu":
        return BY_NAME["interpreter"]
    fitting = (row for row in ARCHITECTURES if generation_of(device) in row.generations)
    return next(fitting, BY_NAME["other"])


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors: how many programs of a persistent kernel run at once."""
    if device.type == "cpu":
        return 3  # of the interpreter: several tiles for each
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, type_of(device).processors))


def vocabulary_splits(V: int, blocks: Blocks) -> tuple[int, int]:
    """``(tiles_per_split, splits)``, from V alone."""
    tiles = -(-V // blocks.BLOCK_V)
    tiles_per_split = -(-tiles // blocks.MAX_SPLITS)
    return tiles_per_split, -(-tiles // tiles_per_split)
