"""Pictures are drawn from the committed results; a suite that is missing leaves one out."""

import json
from pathlib import Path

import pytest
import report
from lib import pictures
from lib.tables import markdown
from PIL import Image

RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.fixture(scope="module")
def losses():
    return report.with_ratios(json.loads((RESULTS / "loss-cpu.json").read_text())["rows"])


@pytest.fixture(scope="module")
def gaps():
    return json.loads((RESULTS / "accumulation-cpu.json").read_text())


def test_time_against_memory_is_drawn_where_budgets_were_measured(losses, tmp_path):
    (path,) = pictures.budget(losses, "a device", tmp_path, "cpu")
    assert path.name == "budget-cpu.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert pictures.budget([r for r in losses if r["suite"] == "time"], "", tmp_path, "x") == []


def test_the_overview_needs_a_time_and_a_peak_of_one_problem(losses, gaps, tmp_path):
    wide, narrow = pictures.overview(losses, gaps, "a device", tmp_path, "cpu")
    assert wide.stat().st_size > 10_000
    across, down = Image.open(narrow).size
    assert across < 0.6 * down  # one panel below the other
    timed = [r for r in losses if r["suite"] == "time"]
    with pytest.raises(ValueError, match="no problem has a time and a peak"):
        pictures.overview(timed, gaps, "a device", tmp_path, "cpu")


def test_a_gpu_s_peers_are_drawn(tmp_path):
    rows = json.loads((RESULTS / "gpu-h200.json").read_text())["rows"]
    assert pictures.gpu(rows, "a card", tmp_path / "g.png").stat().st_size > 10_000


def test_memory_and_weights_are_drawn(tmp_path):
    measured = json.loads((RESULTS / "gpu-h200.json").read_text())["rows"]
    data = json.loads((RESULTS / "memory.json").read_text())
    assert pictures.memory(data, measured, tmp_path / "m.png").stat().st_size > 10_000
    found = json.loads((RESULTS / "weights.json").read_text())["weights"]
    assert pictures.weights(found, tmp_path / "w.png").stat().st_size > 5_000
    assert {w for _, w in found["LossAccumulator"]} == {1.0}
    assert max(w for _, w in found["mean of means"]) > 10


def test_stacks_are_drawn_by_the_distance_of_their_gradients(tmp_path):
    rows = json.loads((RESULTS / "stacks.json").read_text())["rows"]
    assert pictures.stacks(rows, tmp_path / "s.png").stat().st_size > 10_000
    assert pictures.gradient_error(4.0, 0.0) == 3.0
    assert pictures.gradient_error(1.0, 0.5**0.5) == pytest.approx(1.0)


def test_accumulation_is_drawn_regime_by_regime(gaps, tmp_path):
    assert pictures.accumulation(gaps, tmp_path / "a.png").exists()
    one = gaps | {"regimes": dict(list(gaps["regimes"].items())[:1])}
    assert pictures.accumulation(one, tmp_path / "b.png").exists()


def test_a_value_is_said_once_where_all_before_it_repeat_too():
    rows = [dict(zip("abc", values, strict=True)) for values in ("xy1", "xy1", "xz1", "wz1")]
    cells = [line.split("|")[1:4] for line in markdown(rows, once=("a", "b")).splitlines()[2:]]
    assert ["".join(c.strip() or "." for c in row) for row in cells] == [
        "xy1", "..1", ".z1", "wz1"
    ]  # fmt: skip


def test_results_name_no_folder_of_the_machine_that_measured():
    for file in RESULTS.glob("*.json"):
        assert 'File \\"/' not in file.read_text(), file
