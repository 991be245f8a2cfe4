"""`bench/gpu.sh` runs to its end without a GPU: tiny problems, peers stubbed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    done = run("--dry", "variants", "robust", out=tmp_path, PYTHON=str(hangs), LIMIT="1")
    assert done.returncode == 1
    assert "failed: variants robust" in done.stdout
    assert len((tmp_path / "called").read_text().splitlines()) == 2


def test_a_rented_half_hour_is_enough_for_the_least(tmp_path):
    (names,) = re.findall(r"^LEAST=\((.*)\)$", SCRIPT.read_text(), re.M)
    limits = {name: int(limit) for name, limit, *_ in steps(tmp_path)}
    assert sum(limits[name] for name in names.split()) <= 28 * 60
    assert {"correct", "variants", "time", "report"} <= set(names.split())


def test_results_of_an_earlier_machine_are_copied_in_and_replace_nothing(tmp_path):
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    earlier.mkdir()
    out.mkdir()
    (earlier / "loss-cpu.json").write_text("earlier")
    (earlier / "robust-cpu.json").write_text("earlier")
    (out / "robust-cpu.json").write_text("here")
    quiet = tmp_path / "python"
    quiet.write_text("#!/bin/sh\n")
    quiet.chmod(0o755)
    run("--dry", "robust", out=out, EARLIER=str(earlier), PYTHON=str(quiet))
    assert (out / "loss-cpu.json").read_text() == "earlier"
    assert (out / "robust-cpu.json").read_text() == "here"


def rows_of(file):
    """The rows of the file by problem and name; none while there is no file."""
    found = json.loads(file.read_text())["rows"] if file.exists() else []
    return {(r["suite"], r["mode"], r["ignored"], r["name"]): r for r in found}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_step_that_is_killed_loses_no_row(tmp_path):
    """Killed once the second of twelve rounds has begun, then run again."""
    env = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "ROUNDS": "12"}
    command = ["bash", str(SCRIPT), "--dry", "forward"]
    file = tmp_path / "loss-cpu.json"
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as step:  # fmt: skip
        while not any(len(r.get("rounds", ())) > 1 for r in rows_of(file).values()):
            assert step.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        os.killpg(step.pid, signal.SIGKILL)
    before = rows_of(file)
    assert all(r["unfinished"] for r in before.values())
    done = run("--dry", "forward", out=tmp_path, ROUNDS="12")
    assert done.returncode == 0, done.stdout + done.stderr
    after = rows_of(file)
    assert set(before) <= set(after)
    for key, row in after.items():
        assert "unfinished" not in row
        assert len(row["rounds"]) == 12
        kept = before.get(key, {}).get("seconds", [])
        assert set(kept) <= set(row["seconds"])  # none was measured anew
    assert any(r.get("rounds") for r in before.values())


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
        "time", "forward", "masked", "budget", "options", "divergences", "ways", "blocks",
    }  # fmt: skip
    peers = {r["name"]: r for r in data["rows"] if r["suite"] == "time"}
    for name in ("Liger-Kernel", "Liger-Kernel, CuTe", "cut-cross-entropy, exact", "QuACK"):
        assert peers[name]["seconds"], peers[name]  # through the adapter, to the stub
    newer = {"F.linear_cross_entropy", "F.linear_cross_entropy, 4096"}  # than some torch
    assert {row["name"] for row in data["rows"] if row.get("failed")} <= newer
    assert peers["fused_ce"]["extra_peak_bytes"] is not None

    regimes = json.loads((tmp_path / "accumulation-cpu.json").read_text())["regimes"]
    assert len(regimes) == 4
    for found in regimes.values():
        assert found["runs"]["fused 1x32"]["logged_gap"] < 1e-5  # a mean of means is 1e-2 off
    checks = json.loads((tmp_path / "robust-cpu.json").read_text())["checks"]
    assert {c["check"]: c["status"] for c in checks} == {
        "repeat": "holds", "graph": "left out", "stream": "left out", "memory": "left out",
        "kernels": "left out",
    }  # fmt: skip
    assert "0 errors" in (tmp_path / "racecheck-cpu.txt").read_text()
    assert "SKIPPED" in (tmp_path / "pytest-cpu.txt").read_text()
    assert (tmp_path / "overview-cpu.png").exists()

    # Run again, nothing is measured twice.
    before = (tmp_path / "loss-cpu.json").read_text()
    again = run("--dry", "forward", out=tmp_path)
    assert again.returncode == 0
    assert "measured already" in again.stdout
    assert (tmp_path / "loss-cpu.json").read_text() == before
