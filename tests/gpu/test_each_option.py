"""Each option of a loss alone and all together, beside float64."""

import pytest
import torch
from support.sums import ALL_OPTIONS, DTYPES, OPTIONS, check_sum, quick, sized


def names(case):
    return "+".join(case) if isinstance(case, dict) else None


@pytest.mark.parametrize(
    ("dtype", "way", "need", "options"),
    [
        quick(dtype, way, need, options, on_interpreter=False)
        for dtype in DTYPES for way in ("one GEMM", "tiles")
        for need in (("hidden", "weight"), ())
        for options in (*OPTIONS, ALL_OPTIONS)
        if dtype is not torch.float16 or options is ALL_OPTIONS
    ],
    ids=names,
)  # fmt: skip
def test_options_alone_and_all_together(device, dtype, way, need, options):
    H, V = sized((256, 3001), (64, 299))
    check_sum(way, dtype, device, N=sized(200, 40), H=H, V=V, need=need, **options)
