"""Loss and gradients by each way of the Triton backend, beside float64."""

import pytest
import torch
from support.sums import DTYPES, EACH_DTYPE, LOGITS, WAYS, check_sum, quick, sized


@pytest.mark.parametrize(
    ("dtype", "way", "logits"),
    [
        quick(dtype, way, logits, on_interpreter=dtype is torch.bfloat16 and logits == "peaked")
        for dtype in DTYPES for way in WAYS for logits in LOGITS
    ],
)  # fmt: skip
def test_each_way_trains_as_float64(device, dtype, way, logits):
    H, V = sized((256, 5008), (64, 304))
    check_sum(way, dtype, device, N=sized(300, 40), H=H, V=V, logits=logits)


@EACH_DTYPE
@pytest.mark.parametrize("way", ["one GEMM", "tiles"])
def test_a_vocabulary_of_odd_size(device, dtype, way):
    check_sum(way, dtype, device, N=sized(300, 40), H=64, V=sized(5003, 299))


@pytest.mark.gpu
@EACH_DTYPE
@pytest.mark.parametrize("H", [2304, 2560, 4096])
def test_sizes_that_choose_a_way_by_themselves(device, dtype, H):
    check_sum(None, dtype, device, N=300, H=H, V=5003, logits="peaked")
