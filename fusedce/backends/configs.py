"""Block sizes of the kernels: frozen data, one row per architecture, no tuning at run time.

A configuration depends on the device and the dtype alone, never on N: a row's loss must have the
same bits in every batch. Compiled, not yet measured: see `bench/LOG.md` for what was tried.
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
    GROUP_N: int = 16


# Keyed by (architecture family, bytes of an input element).
FORWARD = {
    ("sm_80", 2): ForwardConfig(128, 128, 64, 8, 3),
    ("sm_80", 4): ForwardConfig(128, 64, 32, 8, 3),
    ("sm_90", 2): ForwardConfig(128, 128, 64, 8, 4),
    ("sm_90", 4): ForwardConfig(128, 64, 32, 8, 3),
    ("sm_100", 2): ForwardConfig(128, 128, 64, 8, 4),
    ("sm_100", 4): ForwardConfig(128, 64, 32, 8, 3),
    # Shared memory of about 100 kB (consumer cards) or 64 kB (AMD), and whatever else comes.
    ("other", 2): ForwardConfig(64, 64, 64, 4, 2),
    ("other", 4): ForwardConfig(64, 64, 32, 4, 2),
    # Small blocks, so that small test shapes have several, of odd sizes.
    ("interpreter", 2): ForwardConfig(32, 64, 32, 4, 1, GROUP_N=2),
    ("interpreter", 4): ForwardConfig(32, 64, 32, 4, 1, GROUP_N=2),
}

MAX_SPLITS = 128  # of the vocabulary: enough programs for one row block, partials in 12 B * N each
GRAD_ROWS_BLOCK_V = 4096
GRAD_ROWS_WARPS = 8
COMPACT_BLOCK_N = 1024
SCALE_BLOCK = 8192


def architecture(device: torch.device) -> str:
    """Family of ``device`` in :data:`FORWARD`."""
    if device.type == "cpu":
        return "interpreter"
    if device.type == "cuda" and torch.version.hip is None:
        return {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get(
            torch.cuda.get_device_capability(device), "other"
        )
    return "other"


def vocabulary_splits(V: int, BLOCK_V: int) -> tuple[int, int]:
    """``(tiles_per_split, splits)``, from V alone."""
    tiles = -(-V // BLOCK_V)
    tiles_per_split = -(-tiles // MAX_SPLITS)
    return tiles_per_split, -(-tiles // tiles_per_split)
