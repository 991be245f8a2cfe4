"""Versions, and marks for tests that fail with some, for reasons outside of this project."""

import pytest
import torch
import triton

TORCH, TRITON = (tuple(int(x) for x in made.__version__.split(".")[:2]) for made in (torch, triton))

# fully_shard(Linear), one backward on two ranks: twice the mean of their gradients in torch 2.8,
# the mean from 2.11 on.
FSDP2_MEAN = pytest.mark.skipif(
    TORCH < (2, 9), reason="over gloo, FSDP2 of torch 2.8 adds gradients where it should average"
)

PIPELINES_OVER_GLOO = pytest.mark.skipif(
    TORCH == (2, 9), reason="over gloo, torch 2.9 aborts in any schedule of a pipeline"
)


def trl_1_16():
    """Skip a comparison with TRL's trainers before 1.16, which compute it in another way."""
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("TRL before 1.16 computes this in another way")


def marked(names, mark, where):
    """Parameters, with ``mark`` on those whose name contains ``where``."""
    return [pytest.param(name, marks=mark) if where in name else name for name in names]


# Over gloo, two stages a rank in a V: torch 2.8's and 2.11's own schedules wait for each other for
# ever.
V_SCHEDULES_HANG = TORCH < (2, 12)

# Dynamo before 2.11 fails inside of itself where a compiled function has a collective of a group.
COMPILES_COLLECTIVES = TORCH >= (2, 11)
