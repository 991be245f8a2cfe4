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


@pytest.mark.slow
def test_every_picture_of_the_losses(losses, tmp_path):
    drawn = pictures.of_losses(losses, "a device", tmp_path, "cpu")
    names = {path.name for path in drawn}
    assert names == {f"{n}-cpu.png" for n in ("memory", "time", "budget")}
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
    without = [r for r in losses if r["suite"] != "budget"]
    assert len(pictures.of_losses(without, "a device", tmp_path, "cpu")) == 2
    assert pictures.of_losses([], "a device", tmp_path, "cpu") == []


def test_the_overview_needs_a_time_and_a_peak_of_one_problem(losses, gaps, tmp_path):
    wide, narrow = pictures.overview(losses, gaps, "a device", tmp_path, "cpu")
    assert wide.stat().st_size > 10_000
    across, down = Image.open(narrow).size
    assert across < 0.6 * down  # one panel below the other
    timed = [r for r in losses if r["suite"] == "time"]
    with pytest.raises(ValueError, match="no problem has a time and a peak"):
        pictures.overview(timed, gaps, "a device", tmp_path, "cpu")
    both = [r | {"extra_peak_bytes": 2**20} for r in timed]  # as on a GPU
    assert all(p.exists() for p in pictures.overview(both, gaps, "a device", tmp_path, "cuda"))


def test_accumulation_is_drawn_regime_by_regime(gaps, tmp_path):
    assert pictures.accumulation(gaps, tmp_path / "a.png").exists()
    one = gaps | {"regimes": dict(list(gaps["regimes"].items())[:1])}
    assert pictures.accumulation(one, tmp_path / "b.png").exists()


def test_the_tables_of_the_committed_results(losses):
    for suite in ("time", "memory", "masked", "budget", "forward", "options", "divergences"):
        assert report.table(suite, losses).count("\n") > 3
    lines = report.beside(losses).splitlines()[2:]
    named = [line.split("|")[1].strip() for line in lines]
    shapes = {(r["N"], r["H"], r["V"]) for r in losses if r["suite"] == "time"}
    assert len([x for x in named if x]) == len(set(named) - {""}) == len(shapes)  # each said once


def test_a_value_is_said_once_where_all_before_it_repeat_too():
    rows = [dict(zip("abc", values, strict=True)) for values in ("xy1", "xy1", "xz1", "wz1")]
    cells = [line.split("|")[1:4] for line in markdown(rows, once=("a", "b")).splitlines()[2:]]
    assert ["".join(c.strip() or "." for c in row) for row in cells] == [
        "xy1", "..1", ".z1", "wz1"
    ]  # fmt: skip


def test_how_time_grows_is_a_slope_of_logarithms():
    assert report.exponent([(1, 3), (2, 12), (4, 48)]) == pytest.approx(2)
    rows = [
        {"suite": "scaling", "name": name, "N": n, "V": 8, "median": None, "seconds": [float(n)]}
        for name in ("bare GEMMs", "fused_ce") for n in (1, 2, 4)
    ]  # fmt: skip
    assert report.exponents(rows).splitlines() == [
        "- bare GEMMs: time grows as N^1.00", "- fused_ce: time grows as N^1.00",
    ]  # fmt: skip
