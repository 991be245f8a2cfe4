"""`fusedce plan`: memory and time of a model's loss, from its sizes alone."""

import subprocess
import sys

import pytest
import torch
from support.command_line import answer, call

import fusedce


def test_a_plan_from_sizes_needs_no_torch():
    code = (
        "import sys; from fusedce.cli import main; main(['plan', '64,1000'], "
        "standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_a_plan_reads_a_configuration(llama):
    found = answer("plan", str(llama), "--tokens", "4096", "--device", "A100")
    assert (found["model"]["H"], found["model"]["V"]) == (2048, 128256)
    assert found["logits_bytes"] == 2 * 4096 * 128256
    eager, compiled, ours = found["methods"]
    assert eager["bytes"] == 12 * 4096 * 128256
    assert ours["bytes"] < 1.2 * compiled["bytes"] < eager["bytes"]
    assert found["least_budget"] < found["recommended_budget"] <= ours["bytes"]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "fp32"), ("cpu", "bf16"), ("H100", "fp32"), ("RTX 4090", "fp16")],
)
def test_a_plan_for_every_device_and_dtype(device, dtype):
    found = answer("plan", "2304,256000", "--device", device, "--dtype", dtype)
    eager, _, ours = found["methods"]
    assert 0 < ours["bytes"] < eager["bytes"]
    assert found["least_budget"] <= found["recommended_budget"] < eager["bytes"]


def test_the_planned_chunk_is_the_one_the_backend_takes(monkeypatch):
    """This holds on a CPU, where the chunk can be watched."""
    from fusedce.backends.torch import training
    from fusedce.tools import plan

    sizes = []

    def watched(*args, **kwargs):
        sizes.append(original(*args, **kwargs))
        return sizes[-1]

    original = training.way_of
    monkeypatch.setattr(training, "way_of", watched)
    N, H, V = 3000, 8, 30000
    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    fusedce.fused_ce(hidden, weight, torch.randint(V, (N,))).mean().backward()
    assert [way.tokens for way in sizes] == [plan.chunk(N, H, V, 4, None)]
    assert sizes[0].tokens < N


def test_the_frontier_runs_from_the_least_budget_to_one_chunk():
    found = answer("plan", "4096,128256", "--tokens", "32768")
    points = found["frontier"]
    assert points[0]["budget"] == found["least_budget"]
    assert list(dict.fromkeys(p["way"] for p in points)) == ["tiles", "chunks", "one chunk"]
    assert all(p["bytes"] <= p["budget"] for p in points)
    assert [p["products"] for p in points] == [4 if p["way"] == "tiles" else 3 for p in points]
    text = call("plan", "4096,128256").output
    assert "Each memory_budget (beside inputs and gradients) and what it gives:" in text


@pytest.mark.parametrize("device", ["cpu", "H200", "A100"])
def test_the_recommended_budget_buys_the_chunks_taken_without_one(device):
    from fusedce.tools import plan

    found = answer("plan", "4096,128256", "--tokens", "32768", "--device", device)
    known = plan.DEVICES.get(device)
    taken = plan.ours(32768, 4096, 128256, 2, known, found["recommended_budget"])
    assert taken.name != "tiles"
    assert taken.tokens >= 0.95 * found["chunk_tokens"]  # budgets are met in steps of rows
    fewer = plan.ours(32768, 4096, 128256, 2, known, int(0.7 * found["recommended_budget"]))
    assert (fewer.name, fewer.tokens) < (taken.name, taken.tokens) or fewer.name == "tiles"


def test_text_is_plain(llama):
    done = call("plan", str(llama))
    assert done.exit_code == 0
    assert "\x1b" not in done.output
    assert "Counted from sizes, not measured" in done.output
    assert " ms" not in done.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["0,5"], "H,V"),
        (["5,0"], "H,V"),
        (["64,1000", "--tokens", "99999999999999999999"], "tokens"),
        ([""], "''"),
    ],
)
def test_sizes_that_no_plan_has(arguments, named):
    done = call("plan", *arguments)
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.exception
    assert named in done.stderr
