"""The model of time and memory: its own properties, and agreement with the code it predicts."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import model
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lib import gpu_model as prediction
from lib.gpu_model import DEVICES, METHODS, PLANS, SHAPES, fused_ce, predict
from support import ranks
from torch.utils._python_dispatch import TorchDispatchMode

from fusedce.backends import plan as backend_plan
from fusedce.backends.gradients import call_of, waiting
from fusedce.backends.triton import archs
from fusedce.contract.problem import Problem, Wanted
from fusedce.loss.sharded_problem import agree_on_problem

ROOT = Path(__file__).parents[2]
H200 = DEVICES["H200"]
EVERYTHING = [
    (method, device, training)
    for method in [*METHODS, *PLANS]
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


@given(
    st.integers(1, 200_000), st.integers(8, 16384), st.integers(2, 300_000),
    st.none() | st.floats(1, 500),
)  # fmt: skip
def test_memory_is_that_of_the_way_the_backend_takes(N, H, V, times):
    budget = None
    if times is not None:
        budget = int(times * backend_plan.least_bytes(prediction.call(N, H, V, 2, 1))) + 1
    asked = prediction.call(N, H, V, 2, budget, device=H200)
    way = backend_plan.way_of(asked, memory_budget=budget)
    found = fused_ce(N, H, V, H200, memory_budget=budget)
    assert found.memory == way.held
    assert budget is None or found.bytes <= budget
    assert ("statistics product" in found.terms) == (way.name == backend_plan.TILES)
    assert found.seconds >= prediction.bare_gemms(N, H, V, H200).seconds


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
            assert asked == prediction.call(N, H, V, 2, budget)


def test_four_products_take_a_third_longer_and_hold_a_tenth():
    """Gemma 2 2B, bf16, 8192 tokens, where cuBLAS makes the logits of both."""
    shape = 8192, 2304, 256000
    fast, small = (fused_ce(*shape, DEVICES["A100"], memory_budget=b) for b in (None, 2**30))
    # four products in place of three: 4/3, less what they share
    assert 1.1 * fast.seconds < small.seconds < 1.4 * fast.seconds
    assert small.bytes < fast.bytes / 6


def test_one_gemm_is_predicted_where_training_takes_it():
    for device in (H200, DEVICES["A100"]):
        for H in (2304, 2312):
            epilogue = "epilogue" in fused_ce(8192, H, 256000, device).terms
            arch = archs.BY_NAME["sm_90" if device is H200 else "sm_80"]
            assert epilogue == archs.by_one_gemm(arch.two_bytes, H)
            assert device.gemm_block in (0, arch.two_bytes.gemm.BLOCK_V)


@pytest.mark.slow
def test_launches_are_those_that_the_code_makes():
    """The launchers on a stub device of unknown memory, against the prediction's counts."""
    pytest.importorskip("triton", minversion="3.5")  # the stub calls its `compute_cache_key`
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "host.py"), "--json"],
        capture_output=True, text=True, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = [x for x in json.loads(done.stdout) if x["pass"] == "training"]
    assert {"walk_kernel", "exp_tile_kernel"} <= set().union(*(x["launches"] for x in made))
    small = H200._replace(memory=2**30)
    for found in made:
        asked = prediction.call(*found["shape"], device=small)
        way = backend_plan.way_of(asked)
        assert prediction.launches(way, *found["shape"], asked.gemm_block) == found["launches"]


def test_blocks_of_the_forward_kernel_are_those_of_the_architectures():
    rows = {"A100": "sm_80", "H100": "sm_90", "H200": "sm_90", "B200": "sm_100",
            "MI300X": "gfx942", "RTX 4090": "sm_89"}  # fmt: skip
    assert set(rows) == set(DEVICES)
    for name, arch in rows.items():
        walks = archs.BY_NAME[arch].two_bytes
        assert DEVICES[name].gemm_block == (walks.gemm.BLOCK_V if walks.gemm_up_to else 0)
        for H in (896, 1024, 1032, 4096):
            blocks = archs.forward_blocks(walks, H, options=False)
            assert prediction.forward_block(DEVICES[name], H) == blocks[:2], (name, H)


def test_the_range_encloses_the_prediction():
    for method, device, training in EVERYTHING:
        for shape in SHAPES:
            found = predict(method, *shape, DEVICES[device], training=training)
            assert found.low <= found.seconds <= found.high
            assert found.low < found.high or method == "bare GEMMs"


def test_a_known_denominator_saves_the_scaling_pass():
    later = prediction.NOW._replace(known_denominator=False)
    saved = fused_ce(8192, 4096, 128256, H200, assumed=later).seconds
    saved -= fused_ce(8192, 4096, 128256, H200).seconds
    assert saved == pytest.approx(4 * (128256 + 8192) * 4096 / H200.bandwidth)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"method must be one of .*, got 'eagre'"):
        predict("eagre", 1, 1, 1, H200)


def test_the_module_needs_nothing_but_python():
    """It will be asked on machines without torch, too."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.path[:0] = ['.', 'bench']; "
        "import lib.gpu_model"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_vocabulary_over_ranks_costs_its_rows_and_the_exchanges(monkeypatch):
    H, V = model.HEADS["Llama 3 8B"]
    found = [model.tensor_parallel(8192, H, V, R, H200) for R in (2, 4, 8)]
    assert found[0].seconds > found[1].seconds > found[2].seconds
    for R, of_ranks in zip((2, 4, 8), found, strict=True):
        assert of_ranks.seconds > fused_ce(8192, H, V // R, H200).seconds
        assert min(of_ranks.terms.values()) >= 0
        assert of_ranks.terms["d_hidden over ranks, not covered"] == 0
    monkeypatch.setitem(model.NVLINK, "H200", model.NVLINK["H200"] / 10)
    slow = model.tensor_parallel(8192, H, V, 8, H200)
    all_reduce = 2 * 7 / 8 * 4 * 8192 * H / (model._REACHED * model.NVLINK["H200"])
    expected = all_reduce + model._LATENCY - slow.terms["d_weight product"]
    assert slow.terms["d_hidden over ranks, not covered"] == pytest.approx(expected)


class Launches(TorchDispatchMode):
    """Operators that launch or copy something on a device."""

    names = ("ne", "_to_copy", "sum", "arange", "mul", "add", "any", "cat", "stack", "where")

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.seen += [name] if name in self.names else []
        return function(*args, **(kwargs or {}))


def launches_of_agreement(rank):
    problem = Problem(
        torch.randn(12, 8, dtype=torch.bfloat16),
        torch.randn(10, 8, dtype=torch.bfloat16),
        torch.randint(10, (12,)),
        backend="torch",
    )
    with Launches() as launches:
        agree_on_problem(problem, dist.group.WORLD)
    return launches.seen


def test_the_ranks_meet_after_as_many_launches_as_the_model_counts():
    """Two copies to a device, the all-gather and the copy of its table are none on a CPU."""
    (seen,) = ranks.of(ranks.run({"agreement": launches_of_agreement}, 1), "agreement")
    assert len(seen) + 4 == model._AGREEMENT, seen


def test_prediction_stands_beside_measurement(tmp_path):
    row = {"suite": "time", "name": "fused_ce", "N": 8192, "H": 4096, "V": 128256,
           "dtype": "bfloat16", "mode": "train", "ignored": 0.0, "chunk_tokens": None}  # fmt: skip
    rows = [
        row | {"seconds": [0.039, 0.040, 0.041]},
        row | {"suite": "memory", "extra_peak_bytes": 3 * 2**30},
        row | {"name": "QuACK", "seconds": [0.035]},  # it has no prediction
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
