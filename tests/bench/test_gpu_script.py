"""`bench/gpu.sh`, seen through without a GPU: tiny problems, peers stubbed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusedce.tools.peers import IMPLEMENTATIONS, missing

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu.sh"


def run(*arguments, out, **environment):
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(out)} | environment
    env.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=env, capture_output=True, text=True
    )


def steps(out):
    return [line.split() for line in run("list", out=out).stdout.splitlines()]


def test_every_step_is_listed_short_and_there(tmp_path):
    listed = steps(tmp_path)
    text = SCRIPT.read_text()
    assert [name for name, *_ in listed] == re.findall(r"^step_(\w+)\(\)", text, re.M)
    assert listed[0][0] == "peers"
    assert listed[1][0] == "correct"
    assert all(int(limit) <= 480 for _, limit, *_ in listed)
    assert int(listed[1][1]) <= 120


def test_a_step_that_does_not_exist_is_refused_before_anything_runs(tmp_path):
    done = run("--dry", "peers", "tiem", out=tmp_path)
    assert done.returncode == 2
    assert "no step 'tiem': one of peers correct" in done.stderr
    assert "==" not in done.stdout


def test_the_limit_interrupts_and_what_was_written_stays(tmp_path):
    """A python that never ends, under a limit of a second: the step fails, the script goes on."""
    hangs = tmp_path / "python"
    hangs.write_text('#!/bin/sh\necho "$@" >> "$OUT/called"\nexec sleep 1000\n')
    hangs.chmod(0o755)
    done = run("--dry", "device", "robust", out=tmp_path, PYTHON=str(hangs), LIMIT="1")
    assert done.returncode == 1
    assert "failed: device robust" in done.stdout
    assert len((tmp_path / "called").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute and a half of work, on a machine that may have other work
def test_a_dry_run_of_everything(tmp_path):
    done = run("--dry", out=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    for name, *_ in steps(tmp_path):
        assert f"== {name}: " in done.stdout

    data = json.loads((tmp_path / "loss-cpu.json").read_text())
    suites = {row["suite"] for row in data["rows"]}
    assert suites == {
        "time", "forward", "masked", "accuracy", "frozen", "budget", "scaling",
    }  # fmt: skip
    peers = {r["name"]: r for r in data["rows"] if r["suite"] == "time"}
    for name in ("Liger-Kernel", "Liger-Kernel, CuTe", "cut-cross-entropy, exact", "QuACK"):
        assert peers[name]["seconds"], peers[name]  # through the adapter, to the stub
    newer = {n for n in IMPLEMENTATIONS if n.startswith("F.") and missing(n)}  # than this torch
    assert {row["name"] for row in data["rows"] if row.get("failed")} <= newer
    assert peers["fused_ce"]["extra_peak_bytes"] is not None

    regimes = json.loads((tmp_path / "accumulation-cpu.json").read_text())["regimes"]
    assert len(regimes) == 4
    for found in regimes.values():
        assert found["runs"]["fused 1x32"]["logged_gap"] < 1e-5
    checks = json.loads((tmp_path / "robust-cpu.json").read_text())["checks"]
    assert {c["check"]: c["status"] for c in checks} == {
        "repeat": "holds", "graph": "left out", "stream": "left out", "memory": "left out",
    }  # fmt: skip
    assert "0 errors" in (tmp_path / "racecheck-cpu.txt").read_text()
    assert "SKIPPED" in (tmp_path / "pytest-cpu.txt").read_text()
    assert (tmp_path / "overview-cpu.png").exists()
    assert "Predicted, not measured" in done.stdout

    # Run again, nothing is measured twice.
    before = (tmp_path / "loss-cpu.json").read_text()
    again = run("--dry", "forward", out=tmp_path)
    assert again.returncode == 0
    assert "measured already" in again.stdout
    assert (tmp_path / "loss-cpu.json").read_text() == before
