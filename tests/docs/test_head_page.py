"""The table on the page of the replaced head is that of the committed results."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_table_is_that_of_the_results(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "bench")
    spec = importlib.util.spec_from_file_location("bench_head", ROOT / "bench" / "head.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    results = json.loads((ROOT / "bench" / "results" / "head-cpu.json").read_text())
    page = (ROOT / "docs" / "head.md").read_text()
    assert f"<!-- head cpu -->\n{bench.table(results['rows'])}\n<!-- end -->" in page
