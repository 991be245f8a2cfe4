"""`bench/seeds.py` in few steps: what it says of the naive mean and of ours holds."""

import json
import sys

import pytest
import seeds
import torch
from support.bounds import SAME_MODEL

SMALL = seeds.SIZES["small"]
LARGE = seeds.SIZES["135m"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The file that two steps of every regime leave, and the rows by regime and way."""
    path = tmp_path_factory.mktemp("seeds") / "seeds.json"
    run(path)
    rows = json.loads(path.read_text())["rows"]
    return path, {(row["suite"], row["name"]): row for row in rows}


def run(path):
    arguments = ["seeds", "--steps", "2", "--seeds", "1", "--out", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        assert seeds.main() == 0


def gap(runs, regime, name, kind="logged"):
    pairs = zip(runs[regime, name][kind], runs[regime, "32x1"][kind], strict=True)
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("regime", seeds.REGIMES)
def test_one_denominator_trains_as_the_whole_batch(measured, regime):
    _, runs = measured
    for kind in ("logged", "true"):
        assert gap(runs, regime, "fused 1x32", kind) < 1e-5
    assert gap(runs, regime, "fused 1x32", "grad_norm") < SAME_MODEL
    assert gap(runs, regime, "32x1", "logged") == 0


def test_the_naive_mean_differs_where_lengths_do(measured):
    _, runs = measured
    assert gap(runs, "equal", "naive 1x32") < 1e-5
    assert gap(runs, "equal", "naive 1x32", "grad_norm") < SAME_MODEL
    assert gap(runs, "natural", "naive 1x32") > 1e-3
    assert gap(runs, "bimodal", "naive 1x32") > 1e-2
    assert gap(runs, "bimodal", "naive 1x32", "grad_norm") > 1e-2
    first, whole = (runs["bimodal", name]["true"][0] for name in ("naive 1x32", "32x1"))
    assert abs(first - whole) < 1e-5  # at the same weights


def test_a_run_goes_on_with_what_is_not_measured(measured, monkeypatch, capsys):
    path, _ = measured
    monkeypatch.setattr(seeds, "train", lambda *_: pytest.fail("measured already"))
    run(path)
    assert "| bimodal   | naive 1x32 |" in capsys.readouterr().out


def test_the_large_size_is_the_published_one():
    with torch.device("meta"):
        parameters = sum(p.numel() for p in LARGE.model().parameters())
    assert round(parameters / 1e6) == 135
    assert len(seeds.sequences(LARGE, "equal", 0)[0]) == 2048


def test_autocast_and_checkpoints_change_no_more_than_rounding():
    """The large size's ways to hold less, on the small model."""
    size = SMALL._replace(dtype=torch.bfloat16, checkpoints=True)
    batches = [seeds.sequences(SMALL, "bimodal", 0)[:8]]
    full, naive, ours = (seeds.train(size, batches, 0, name)["logged"][0] for name in seeds.WAYS)
    assert abs(ours - full) < 1e-3
    assert abs(naive - full) > 5e-3


def test_what_the_page_says_of_the_measured_seeds():
    rows = json.loads((seeds.FOLDER / "seeds-cpu.json").read_text())["rows"]
    logged, regime = {}, ""
    for line in seeds.table(rows).splitlines()[2:]:
        lengths, name, mean = (cell.strip() for cell in line.split("|")[1:4])
        regime = lengths or regime
        logged[regime, name] = float(mean)
    for regime in seeds.REGIMES:
        assert logged[regime, "fused 1x32"] < 1e-6
    assert logged["natural", "naive 1x32"] < logged["natural", "32x1, another seed"]
    assert logged["bimodal", "naive 1x32"] > logged["bimodal", "32x1, another seed"]
