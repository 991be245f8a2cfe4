"""The model of time and memory: its own properties, and agreement with the code it predicts."""

import json
import math
import sys

import model
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.problems import SHAPES as BY_KIND
from model import DEVICES, METHODS, predict

from fusedce.backends import held
from fusedce.backends import plan as backend_plan
from fusedce.backends.gradients import call_of, waiting
from fusedce.contract.problem import Problem, Wanted

SHAPES = BY_KIND["gpu"]
H200 = DEVICES["H200"]
EVERYTHING = [
    (method, device, training)
    for method in METHODS
    for device in DEVICES
    for training in (True, False)
]


def test_terms_add_up():
    for method, device, training in EVERYTHING:
        found = predict(method, 8192, 4096, 128256, DEVICES[device], training=training)
        assert found.seconds == pytest.approx(math.fsum(found.terms.values()))
        assert found.bytes == sum(found.memory.values())
        assert all(seconds > 0 for seconds in found.terms.values()), method
        assert all(count > 0 for count in found.memory.values()), method
        floor = predict("bare GEMMs", 8192, 4096, 128256, DEVICES[device], training=training)
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


@given(
    st.integers(1, 200_000), st.integers(8, 16384), st.integers(2, 300_000),
    st.none() | st.floats(1, 500),
)  # fmt: skip
def test_memory_is_that_of_the_way_the_backend_takes(N, H, V, times):
    budget = None
    if times is not None:
        budget = int(times * backend_plan.least_bytes(model.call(N, H, V, 2, 1))) + 1
    asked = model.call(N, H, V, 2, budget, device=H200)
    way = backend_plan.way_of(asked, memory_budget=budget)
    found = predict("fused_ce", N, H, V, H200, budget=budget)
    assert found.memory == way.held
    assert budget is None or found.bytes <= budget
    assert ("statistics product" in found.terms) == (way.name == held.TILES)
    assert found.seconds >= predict("bare GEMMs", N, H, V, H200).seconds


def test_what_the_backend_asks_its_plan_is_what_is_predicted():
    """The record of a problem, and that of its sizes alone."""
    for N, H, V in ((300, 64, 4000), (8192, 4096, 128256), (4096, 576, 49152)):
        for budget in (None, 2**24, 2**28):
            hidden, weight = (
                torch.empty(n, H, dtype=torch.bfloat16, device="meta") for n in (N, V)
            )
            labels = torch.empty(N, dtype=torch.int64, device="meta")
            problem = Problem(hidden, weight, labels, memory_budget=budget)
            wanted = Wanted(hidden=True, weight=True)
            asked = call_of(problem, wanted, N, waiting(problem), triton=True)
            assert asked._replace(threads=1) == model.call(N, H, V, 2, budget)


def test_four_products_take_a_third_longer_and_hold_a_tenth():
    """Gemma 2 2B, bf16, 8192 tokens, where cuBLAS makes the logits of both."""
    shape = 8192, 2304, 256000
    fast, small = (predict("fused_ce", *shape, DEVICES["A100"], budget=b) for b in (None, 2**30))
    # four products in place of three: 4/3, less what they share
    assert 1.1 * fast.seconds < small.seconds < 1.4 * fast.seconds
    assert small.bytes < fast.bytes / 6


def test_the_range_encloses_the_prediction():
    for method, device, training in EVERYTHING:
        for shape in SHAPES:
            found = predict(method, *shape, DEVICES[device], training=training)
            assert found.low <= found.seconds <= found.high
            assert found.low < found.high or method == "bare GEMMs"


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'eagre'"):
        predict("eagre", 1, 1, 1, H200)


def test_prediction_stands_beside_measurement(tmp_path, monkeypatch, capsys):
    row = {"suite": "time", "name": "fused_ce", "N": 8192, "H": 4096, "V": 128256,
           "dtype": "bfloat16", "mode": "train", "ignored": 0.0, "budget": None}  # fmt: skip
    rows = [
        row | {"seconds": [0.039, 0.040, 0.041]},
        row | {"suite": "memory", "extra_peak_bytes": 3 * 2**30},
        row | {"name": "QuACK", "seconds": [0.035]},  # it has no prediction
    ]
    file = tmp_path / "loss-cuda.json"
    file.write_text(json.dumps({"device": "NVIDIA H200", "versions": {}, "rows": rows}))
    monkeypatch.setattr(sys, "argv", ["model.py", "--measured", str(file)])
    model.main()
    first, beside = capsys.readouterr().out.split("Prediction beside measurement")
    assert "Predicted, not measured" in first
    expected = 1e3 * predict("fused_ce", *SHAPES[0], H200).seconds
    assert f"{expected:.2f}" in beside
    assert "40.00" in beside
    assert "3072" in beside
    assert "QuACK" not in beside
