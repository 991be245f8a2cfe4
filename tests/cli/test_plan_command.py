"""`fusedce plan`: memory of a model's loss, from its sizes alone."""

import itertools
import json

import pytest
import torch
from support.command_line import answer, call

import fusedce


def test_a_plan_reads_a_configuration(tmp_path):
    config = {"model_type": "llama", "hidden_size": 2048, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer("plan", str(tmp_path), "--tokens", "4096", "--device", "A100")
    assert (found["model"]["H"], found["model"]["V"]) == (2048, 128256)
    assert found["logits_bytes"] == 2 * 4096 * 128256
    eager, compiled, ours = (sum(held.values()) for held in found["methods"].values())
    assert eager == 12 * 4096 * 128256 - 2 * (4096 + 128256) * 2048  # less the gradients
    assert ours < 1.2 * compiled < eager


def test_the_planned_chunk_is_the_one_the_backend_takes(monkeypatch):
    """This holds on a CPU, where the chunk can be watched."""
    from fusedce.backends.torch import sum_grads

    sizes = []

    def watched(*args, **kwargs):
        sizes.append(original(*args, **kwargs))
        return sizes[-1]

    original = sum_grads.choose_plan
    monkeypatch.setattr(sum_grads, "choose_plan", watched)
    N, H, V = 3000, 8, 30000
    hidden, weight = torch.randn(N, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    fusedce.fused_ce(hidden, weight, torch.randint(V, (N,))).mean().backward()
    found = answer("plan", f"{H},{V}", "--tokens", f"{N}", "--device", "cpu", "--dtype", "fp32")
    assert [way.tokens for way in sizes] == [found["chunk_tokens"]]
    assert sizes[0].tokens < N


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", "fp32"), ("cpu", "bf16"), ("H200", "fp32"), ("A100", "bf16"), ("RTX 4090", "fp16")],
)
def test_a_plan_needs_less_than_eager_and_fits_a_terminal(device, dtype):
    options = ("--tokens", "32768", "--device", device, "--dtype", dtype)
    found = answer("plan", "4096,128256", *options)
    assert found["least_budget"] < found["recommended_budget"]
    eager, _, ours = (sum(held.values()) for held in found["methods"].values())
    assert found["recommended_budget"] <= ours < eager
    lines = call("plan", "4096,128256", *options).output.splitlines()
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("4096x128256", "", "10.0 GiB less than eager, 1.3 GiB less than compiled eager"),
        ("4096x128256", "--tokens 32768", "5.2 GiB less than compiled eager"),
        ("4096x128256", "", "memory_budget=44 * 2**20 for less, at a fourth product."),
        ("64x1000", "--device cpu --tokens 1000", "memory_budget=1 * 2**20 for less, in smaller"),
        ("64x1000", "--device cpu --tokens 16", "more than compiled eager."),
    ],
)
def test_a_plan_ends_with_what_is_saved_and_what_less_costs(model, options, said):
    found = answer("plan", model, *options.split())
    text = call("plan", model, *options.split()).output
    assert said in " ".join(text.split("fused_ce holds")[1].split())
    ours = sum(found["methods"]["fused_ce"].values())
    assert ("for less" in text) == (-(-found["least_budget"] // 2**20) * 2**20 < ours)


@pytest.mark.parametrize("device", ["cpu", "H200"])
def test_a_larger_budget_takes_no_more_work(device):
    found = answer("plan", "2048,128256", "--device", device)
    steps = found["by_budget"]
    assert 0 <= steps[0]["budget"] - found["least_budget"] < 2**20
    assert steps[-1]["budget"] == found["recommended_budget"]
    assert (steps[0]["products"], steps[-1]["products"]) == (4, 3)
    for less, more in itertools.pairwise(steps):
        assert less["budget"] < more["budget"] <= 2 * less["budget"]
        assert less["products"] >= more["products"]
        assert less["products"] > more["products"] or less["tokens"] <= more["tokens"]


@pytest.mark.parametrize("device", ["cpu", "H200", "A100"])
def test_the_recommended_budget_buys_the_chunks_taken_without_one(device):
    from fusedce.backends.plan import choose_plan
    from fusedce.tools import plan

    found = answer("plan", "4096,128256", "--tokens", "32768", "--device", device)
    asked = plan.call(32768, 4096, 128256, 2, plan.DEVICES.get(device))
    taken = choose_plan(asked, memory_budget=found["recommended_budget"])
    assert taken.name != "tiles"
    assert taken.tokens >= 0.95 * found["chunk_tokens"]  # budgets are met in steps of rows
    fewer = choose_plan(asked, memory_budget=int(0.7 * found["recommended_budget"]))
    assert (fewer.name, fewer.tokens) < (taken.name, taken.tokens) or fewer.name == "tiles"
