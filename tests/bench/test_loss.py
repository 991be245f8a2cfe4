"""`bench/loss.py` measures any size, and leaves out what it holds already."""

import json
import sys

import loss
import pytest
from lib import losses


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["loss.py", *map(str, arguments)])
    assert loss.main() == 0


@pytest.mark.slow
def test_a_shape_is_measured_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(losses, "ON_CPU", ("fused_ce", "eager", "cut-cross-entropy"))
    given = ("--suite", "time", "budget", "--shape", "64,16,500", "--out", tmp_path / "x.json")
    run(monkeypatch, *given)
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert {(row["N"], row["H"], row["V"]) for row in rows} == {(64, 16, 500)}
    assert next(iter(rows))["name"] == "bare GEMMs"
    for row in rows:
        if row["name"] == "cut-cross-entropy":  # a peer that is not installed is a row
            assert row["failed"].startswith("ModuleNotFoundError")
            continue
        assert len(row["seconds"]) == len(row["rounds"]) == 3
        assert (row["suite"] == "budget") == ("extra_peak_bytes" in row)
        if row["name"] in ("fused_ce", "eager"):
            assert set(row["errors"]) == {"loss", "d_hidden", "d_weight"}
    run(monkeypatch, *given, "--resume")
    assert capsys.readouterr().out.count("measured already") == 6
