"""How many tokens a chunk takes."""

import pytest

from fusedce.backends import plan
from fusedce.backends.triton import archs


def test_one_chunk_beats_several_beside_an_accumulator_until_it_is_larger():
    common = {"V": 128256, "H": 4096, "accumulator": True, "on_cpu": False, "chunk_tokens": None}
    # One chunk of two-byte exponentials is smaller than several beside a float32 accumulator.
    assert plan.chunk_size(8192, logit_bytes=2, **common) == 8192
    size = plan.chunk_size(32768, logit_bytes=2, **common)
    assert size % 128 == 0
    assert size * 128256 * 2 <= plan.DEVICE_BUDGET
    assert plan.chunk_size(100, logit_bytes=2, **{**common, "chunk_tokens": 7}) == 7


@pytest.mark.parametrize("vocabulary", [512, 2048, 8192, 50257, 256000])
def test_a_chunk_and_its_products_are_bounded(vocabulary):
    """On a GPU; with a small vocabulary, tokens must not make up for it."""
    C = plan.chunk_size(
        10**7, vocabulary, 4096, logit_bytes=2, accumulator=True, on_cpu=False, chunk_tokens=None
    )
    assert C * vocabulary * 2 <= plan.DEVICE_BUDGET
    assert C <= 8192  # more make the products no faster, and every row has buffers of its own
    arch = archs.BY_NAME["sm_90"]
    for H in (64, 1024, 4096, 16384):
        rows, T = arch.tile_shape(C, vocabulary, H, min(vocabulary, arch.exp_block_v))
        assert rows * T * 4 <= (32 if H >= 4096 else 128) * 2**20
