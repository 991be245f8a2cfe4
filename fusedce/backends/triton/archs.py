"""Block sizes of the kernels: frozen data, one row per architecture, no tuning at run time.

A configuration depends on the device, the dtype and the options alone, never on N: a row's loss
must have the same bits in every batch. Chosen from what the compiler makes of them
(`bench/compiler_report.py`), not yet measured: see `bench/LOG.md`. `fusedce.backends.triton.tuning`
measures the candidates, on demand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ForwardConfig(NamedTuple):
    """Blocks of ``forward_kernel``."""

    BLOCK_N: int
    BLOCK_V: int
    BLOCK_H: int
    num_warps: int
    num_stages: int
    GROUP_N: int = 16  # row blocks that share a split's weights through L2
    DESCRIPTOR: bool = False  # read weight by TMA where its rows are 16-byte aligned
    FLATTEN: bool = False  # one pipeline over all tiles of a split: the next one loads meanwhile
    MAX_SPLITS: int = 128  # of the vocabulary: enough programs for one row block


_HOPPER = ForwardConfig(128, 256, 64, 8, 3, DESCRIPTOR=True)
_HOPPER_SMALL = ForwardConfig(128, 128, 64, 8, 4, DESCRIPTOR=True)

# Keyed by (architecture family, bytes of an input element).
FORWARD = {
    ("sm_80", 2): ForwardConfig(128, 128, 64, 8, 3),
    ("sm_80", 4): ForwardConfig(128, 64, 32, 8, 3),
    ("sm_90", 2): _HOPPER,
    ("sm_90", 4): ForwardConfig(128, 64, 32, 8, 3),
    ("sm_100", 2): _HOPPER,
    ("sm_100", 4): ForwardConfig(128, 64, 32, 8, 3),
    # Shared memory of about 100 kB (consumer cards) or 64 kB (AMD), and whatever else comes.
    ("other", 2): ForwardConfig(64, 64, 64, 4, 2),
    ("other", 4): ForwardConfig(64, 64, 32, 4, 2),
    # Small blocks, so that small test shapes have several, of odd sizes.
    ("interpreter", 2): ForwardConfig(32, 64, 32, 4, 1, GROUP_N=2, DESCRIPTOR=True, MAX_SPLITS=5),
    ("interpreter", 4): ForwardConfig(32, 64, 32, 4, 1, GROUP_N=2, MAX_SPLITS=5),
}
# Where bias, scale or soft-cap would spill the registers of the one above.
FORWARD_WITH_OPTIONS = {("sm_90", 2): _HOPPER_SMALL, ("sm_100", 2): _HOPPER_SMALL}

# Entropy, argmax and the mean of the logits need registers as well.
STATS = {("sm_90", 2): _HOPPER_SMALL, ("sm_100", 2): _HOPPER_SMALL}
_HOPPER_NARROW = ForwardConfig(128, 64, 64, 8, 4, DESCRIPTOR=True)
STATS_WITH_OPTIONS = {
    ("sm_80", 2): ForwardConfig(128, 64, 64, 8, 3),
    ("sm_90", 2): _HOPPER_NARROW,
    ("sm_100", 2): _HOPPER_NARROW,
}

# What tuning tries besides the default, by family; two-byte inputs.
CANDIDATES = {
    "sm_80": (
        ForwardConfig(128, 128, 32, 8, 4),
        ForwardConfig(128, 128, 64, 8, 3, GROUP_N=8),
        ForwardConfig(64, 128, 64, 4, 3),
    ),
    "sm_90": (
        _HOPPER._replace(GROUP_N=8),
        _HOPPER._replace(num_stages=4),
        _HOPPER._replace(DESCRIPTOR=False),
        ForwardConfig(256, 128, 64, 8, 4, GROUP_N=8, DESCRIPTOR=True),
        _HOPPER_SMALL,
        _HOPPER_SMALL._replace(FLATTEN=True),
        # Two programs fit on a multiprocessor: one's epilogue beside the other's products.
        ForwardConfig(128, 128, 64, 4, 3, DESCRIPTOR=True),
        ForwardConfig(128, 128, 64, 4, 3, DESCRIPTOR=True, FLATTEN=True),
    ),
    "sm_100": (
        _HOPPER._replace(num_stages=4),
        ForwardConfig(256, 128, 64, 8, 3, GROUP_N=8, DESCRIPTOR=True),
        _HOPPER_SMALL,
        ForwardConfig(128, 128, 64, 4, 3, DESCRIPTOR=True),
    ),
    "other": (ForwardConfig(64, 128, 32, 4, 2), ForwardConfig(128, 64, 32, 4, 2)),
}

TILE_ELEMENTS = 2**24  # float32 logits at a time: 64 MiB (more where a chunk exceeds 8192 tokens)
EXP_BLOCK_V = 2048
EXP_WARPS = 4
COMPACT_BLOCK_N = 1024
SCALE_BLOCK = 8192
MERGE_BLOCK_N = 128


def architecture(device: torch.device) -> str:
    """Family of ``device`` in :data:`FORWARD`."""
    if device.type == "cpu":
        return "interpreter"
    if device.type == "cuda" and torch.version.hip is None:
        return {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get(
            torch.cuda.get_device_capability(device), "other"
        )
    return "other"


def forward(family: str, element_size: int, *, options: bool) -> ForwardConfig:
    """The default; ``options``: whether bias, scale or soft-cap are in use."""
    default = FORWARD[family, element_size]
    return FORWARD_WITH_OPTIONS.get((family, element_size), default) if options else default


def stats(family: str, element_size: int, *, options: bool) -> ForwardConfig:
    """Blocks of ``stats_kernel``; ``options`` as in :func:`forward`, or class weights."""
    table = STATS_WITH_OPTIONS if options else STATS
    return table.get((family, element_size), FORWARD[family, element_size])


def exp_block(device: torch.device) -> int:
    """Vocabulary entries of a row that share one maximum in the training pass."""
    return 256 if device.type == "cpu" else EXP_BLOCK_V


def vocabulary_splits(V: int, config: ForwardConfig) -> tuple[int, int]:
    """``(tiles_per_split, splits)``, from V alone."""
    tiles = -(-V // config.BLOCK_V)
    tiles_per_split = -(-tiles // config.MAX_SPLITS)
    return tiles_per_split, -(-tiles // tiles_per_split)
