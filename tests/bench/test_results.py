"""Results on disk, numbers made of them, tables, and the marked places of a page."""

import json

import pytest
import report
from lib import pictures, results, tables

ROW = {"suite": "time", "N": 8, "H": 4, "V": 16, "dtype": "bfloat16", "mode": "train",
       "ignored": 0.0, "budget": None, "flops": 6.0 * 8 * 4 * 16}  # fmt: skip
HERE = {"device": "a device", "versions": {"torch": "2", "triton": "3"}}


@pytest.fixture(autouse=True)
def one_place(monkeypatch):
    monkeypatch.setattr(results, "device_name", lambda device: HERE["device"])
    monkeypatch.setattr(results, "versions", lambda: dict(HERE["versions"]))
    monkeypatch.setattr(results, "source", lambda: "abc")


def rows(N=8, **more):
    return [ROW | {"N": N, "name": name} | more for name in ("bare GEMMs", "fused_ce")]


def test_every_problem_is_on_disk_at_once_and_is_not_measured_again(tmp_path):
    file = tmp_path / "loss.json"
    kept = results.Results(file, "cuda")
    kept.put(rows(8))
    assert len(json.loads(file.read_text())["rows"]) == 2
    kept.put(rows(16))
    again = results.Results(file, "cuda")
    assert again.has(results.problem(ROW))
    assert not again.has(results.problem(ROW | {"N": 32}))
    again.put(rows(8, seconds=[1.0]))  # replaced, not added
    assert sorted(r["N"] for r in json.loads(file.read_text())["rows"]) == [8, 8, 16, 16]
    assert list(tmp_path.iterdir()) == [file]


def test_other_code_is_measured_again(tmp_path, monkeypatch):
    file = tmp_path / "loss.json"
    results.Results(file, "cuda").put(rows())
    monkeypatch.setattr(results, "source", lambda: "other")
    assert not results.Results(file, "cuda").has(results.problem(ROW))


@pytest.mark.parametrize(
    "other", [{"device": "another"}, {"versions": {"torch": "2", "triton": "4"}}]
)
def test_rows_of_another_place_are_not_mixed_in(tmp_path, capsys, other):
    file = tmp_path / "loss.json"
    file.write_text(json.dumps(HERE | other | {"rows": rows()}))
    assert results.Results(file, "cuda").data["rows"] == []
    assert "begun anew" in capsys.readouterr().out


def test_source_follows_the_code(tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    for folder in ("fusedce", "kernels"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kernels" / "a.py").write_text("x = 1")
    first = results.source()
    assert first == results.source()
    (tmp_path / "kernels" / "a.py").write_text("x = 2")
    assert results.source() != first


def test_a_marked_place_is_rewritten_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- end -->\nb\n<!-- y -->\nkept\n<!-- end -->\n")
    tables.put(page, "x", r"new \1")
    expected = "a\n<!-- x -->\nnew \\1\n<!-- end -->\nb\n<!-- y -->\nkept\n<!-- end -->\n"
    assert page.read_text() == expected
    assert tables.marked(page, "y")
    assert not tables.marked(page, "z")
    with pytest.raises(ValueError, match="has no place '<!-- z -->'"):
        tables.put(page, "z", "new")


def test_ratios_are_to_the_products_of_the_same_problem():
    measured = [r | {"seconds": [s]} for r, s in zip(rows(8) + rows(16), (1, 3, 2, 8), strict=True)]
    assert [r["ratio"] for r in report.with_ratios(measured)] == [1, 3, 1, 4]
    failed = [*measured[:1], measured[1] | {"seconds": [], "failed": "out of memory: x"}]
    assert "out of memory: x" in report.table("time", failed)


def test_who_is_not_installed_is_named_below_the_table():
    absent = ROW | {"name": "QuACK", "failed": "ModuleNotFoundError: No module named 'quack'"}
    body = report.table("time", [r | {"seconds": [1.0]} for r in rows()] + [absent])
    assert body.endswith("Not installed: QuACK.")
    assert "No module" not in body


def test_a_value_is_said_once_where_all_before_it_repeat_too():
    rows = [dict(zip("abc", values, strict=True)) for values in ("xy1", "xy1", "xz1", "wz1")]
    lines = tables.markdown(rows, once=("a", "b")).splitlines()[2:]
    cells = [line.split("|")[1:4] for line in lines]
    assert ["".join(c.strip() or "." for c in row) for row in cells] == [
        "xy1", "..1", ".z1", "wz1"
    ]  # fmt: skip


def test_the_error_of_a_gradient_is_its_length_and_its_direction():
    assert pictures.gradient_error(4.0, 0.0) == 3.0
    assert pictures.gradient_error(1.0, 0.5**0.5) == pytest.approx(1.0)


def test_results_name_no_folder_of_the_machine_that_measured():
    for file in (results.ROOT / "bench" / "results").glob("*.json"):
        assert 'File \\"/' not in file.read_text(), file
