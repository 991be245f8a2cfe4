"""The model of time and memory: what it promises of itself, and what it must agree with."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedce import prediction
from fusedce.backends import plan as backend_plan
from fusedce.prediction import DEVICES, METHODS, PLANS, SHAPES, Plan, fused_ce, predict

ROOT = Path(__file__).parents[2]
H200 = DEVICES["H200"]
# The plans that this table was made for on paper, before the model was code.
PAPER = {
    "now": Plan(),
    "one pass": Plan(budget=2**31, tile_elements=2**25, normalise=False, add_in_place=True,
                     forward_gemm=0.935, forward_instructions=10.5),
    "one GEMM": Plan(budget=2**31, tile_elements=0, normalise=False, add_in_place=True, gemm=0.91,
                     exp_instructions=18.0, forward_gemm=0.97, forward_instructions=7.0),
}  # fmt: skip
TRAINING = {
    (8192, 4096, 128256): (1.13, 1.10, 1.07),
    (32768, 4096, 128256): (1.22, 1.11, 1.08),
    (8192, 2304, 256000): (1.42, 1.13, 1.09),
    (8192, 2048, 128256): (1.23, 1.16, 1.10),
    (4096, 896, 151936): (1.46, 1.27, 1.18),
    (2048, 896, 151936): (1.53, 1.35, 1.25),
}
FORWARD = {
    (8192, 4096, 128256): (1.13, 1.10, 1.05),
    (8192, 2304, 256000): (1.17, 1.13, 1.07),
    (8192, 2048, 128256): (1.18, 1.13, 1.07),
    (2048, 896, 151936): (1.45, 1.33, 1.20),
}
EVERYTHING = [
    (method, device, training)
    for method in [*METHODS, *PLANS]
    for device in DEVICES
    for training in (True, False)
]


@pytest.mark.parametrize("training", [True, False])
def test_the_paper_table_is_reproduced(training):
    for shape, ratios in (TRAINING if training else FORWARD).items():
        floor = prediction.bare_gemms(*shape, H200, training=training).seconds
        for (name, plan), expected in zip(PAPER.items(), ratios, strict=True):
            found = fused_ce(*shape, H200, training=training, plan=plan).seconds / floor
            assert found == pytest.approx(expected, rel=0.04), (shape, name)


def test_terms_add_up():
    for method, device, training in EVERYTHING:
        found = predict(method, 8192, 4096, 128256, DEVICES[device], training=training)
        assert found.seconds == pytest.approx(math.fsum(found.terms.values()))
        assert found.bytes == sum(found.memory.values())
        assert all(seconds > 0 for seconds in found.terms.values()), method
        assert all(count > 0 for count in found.memory.values()), method
        floor = prediction.bare_gemms(8192, 4096, 128256, DEVICES[device], training=training)
        assert found.seconds >= floor.seconds


@given(
    st.sampled_from(EVERYTHING),
    st.integers(64, 65536),
    st.integers(64, 8192),
    st.integers(1024, 262144),
)
def test_more_work_takes_longer(what, N, H, V):
    """Up to whole waves of blocks; not with H, of which more may save an accumulator."""
    method, device, training = what

    def seconds(*shape, device=DEVICES[device]):
        return predict(method, *shape, device, training=training).seconds

    here = seconds(N, H, V)
    assert seconds(2 * N, H, V) >= here
    assert seconds(N, H, 2 * V) >= here
    assert seconds(64 * N, H, 64 * V) > 2 * here
    slower = DEVICES[device]._replace(bandwidth=DEVICES[device].bandwidth / 2)
    assert seconds(N, H, V, device=slower) >= here
    slower = DEVICES[device]._replace(flops=DEVICES[device].flops / 2)
    assert seconds(N, H, V, device=slower) >= here


@given(st.integers(1, 200_000), st.integers(8, 16384), st.integers(2, 300_000))
def test_chunks_are_those_of_the_backend(N, H, V):
    expected = backend_plan.chunk_size(
        N, V, H, logit_bytes=2, accumulator=True, on_cpu=False, chunk_tokens=None
    )
    assert prediction.chunk_tokens(N, H, V, prediction.NOW) == expected


def test_memory_follows_the_chunks():
    """One chunk: no accumulator. Several: one in float32, whatever their number."""
    one = fused_ce(8192, 4096, 128256, H200)
    several = fused_ce(32768, 4096, 128256, H200)
    assert "d_weight in float32" not in one.memory
    assert several.memory["d_weight in float32"] == 4 * 128256 * 4096
    chunk = prediction.chunk_tokens(32768, 4096, 128256)
    assert several.memory["exponentials of a chunk"] == 2 * chunk * 128256
    assert fused_ce(131072, 4096, 128256, H200).bytes == several.bytes


def test_a_known_denominator_saves_the_scaling_pass():
    plan = prediction.NOW._replace(known_denominator=False)
    saved = fused_ce(8192, 4096, 128256, H200, plan=plan).seconds
    saved -= fused_ce(8192, 4096, 128256, H200).seconds
    assert saved == pytest.approx(4 * (128256 + 8192) * 4096 / H200.bandwidth)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'eagre'"):
        predict("eagre", 1, 1, 1, H200)


def test_the_module_needs_nothing_but_python():
    """It will be asked on machines without torch, too."""
    code = "import sys; sys.modules['torch'] = None; import fusedce.prediction"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_prediction_stands_beside_measurement(tmp_path):
    row = {"suite": "time", "name": "fused_ce", "N": 8192, "H": 4096, "V": 128256,
           "dtype": "bfloat16", "mode": "train", "ignored": 0.0, "chunk_tokens": None}  # fmt: skip
    rows = [
        row | {"seconds": [0.039, 0.040, 0.041]},
        row | {"suite": "memory", "extra_peak_bytes": 3 * 2**30},
        row | {"name": "QuACK", "seconds": [0.035]},  # nobody predicts it
    ]
    file = tmp_path / "loss-cuda.json"
    file.write_text(json.dumps({"device": "NVIDIA H200", "versions": {}, "rows": rows}))
    done = subprocess.run(
        [sys.executable, "-m", "bench.model", "--measured", str(file)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Predicted, not measured" in done.stdout
    beside = done.stdout.split("Prediction beside measurement")[1]
    expected = 1e3 * predict("fused_ce", *SHAPES[0], H200).seconds
    assert f"{expected:.2f}" in beside
    assert "40.00" in beside
    assert "3072" in beside
    assert "QuACK" not in beside
