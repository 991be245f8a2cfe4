"""The cases of a loss sum that `tests/gpu` runs, on a simulated GPU: values, and no hazard."""

import pytest
import torch
from support.compiled import ARCHS, BF16, FP16, FP32
from support.params import slow
from support.sums import ALL_OPTIONS, WAYS, check_sum

from fusedce.backends.triton import launch

POINTWISE = {"bias": True, "softcap": 5.0, "logit_scale": 0.7}
TRAINED = {"label_logit_kernel", "softmax_rows_kernel", "hidden_grad_kernel", "label_grad_kernel"}


@ARCHS
@pytest.mark.parametrize(
    ("way", "dtype", "logits", "options"),
    [
        ("tiles", BF16, "peaked", {}), ("tiles", FP16, "peaked", {}),
        ("one GEMM", BF16, "peaked", {}), ("one GEMM", BF16, "flat", POINTWISE),
        *(
            slow(way, dtype, logits, options)
            for way in WAYS
            for dtype, logits in ((BF16, "flat"), (FP16, "huge"), (FP32, "peaked"))
            for options in (ALL_OPTIONS, {})
        ),
    ],
)  # fmt: skip
def test_training(on, arch, way, dtype, logits, options):
    gpu = on(arch)
    if way == "small":
        gpu.small_calls.close()
    check_sum(way, dtype, "cpu", N=24, H=64, V=515, logits=logits, **options)
    # One GEMM takes no float32, and smoothing with a bias takes gradients by token.
    one_gemm = way == "one GEMM" and dtype != FP32
    exponentials = "walk_kernel" if one_gemm else "exp_tile_kernel"
    if way in ("tiles", "one GEMM") and "label_smoothing" not in options:
        assert {launch.kernel for launch in gpu.launches} >= {*TRAINED, exponentials}


@ARCHS
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("options", [{}, POINTWISE], ids=["plain", "options"])
def test_evaluation(on, arch, dtype, options):
    """Rows of two blocks, H no multiple of a block, V of nothing."""
    gpu = on(arch)
    check_sum(None, dtype, "cpu", N=180, H=200, V=515, need=(), **options)
    assert gpu.ran("walk_kernel") == 1
    text = gpu.texts["walk_kernel"]
    assert ("wgmma.mma_async" in text) == (arch == "sm_90")
    assert ("cp.async.bulk.tensor" in text) == (arch == "sm_90" and launch.TMA)


@pytest.mark.parametrize("need", [(), ("hidden", "weight")], ids=["evaluation", "training"])
def test_without_tma(on, monkeypatch, need):
    gpu = on("sm_90")
    monkeypatch.setattr(launch, "TMA", False)
    check_sum("one GEMM", torch.bfloat16, "cpu", N=24, H=192, V=515, need=need)
    text = gpu.texts["walk_kernel"]
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor" not in text
