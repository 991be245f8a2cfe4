"""`bench/gpu.py` runs to its end without a GPU: tiny problems, interpreted, peers stubbed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "stubs"


def run(*arguments, out):
    env = os.environ | {"OUT": str(out), "PYTHONPATH": str(STUBS), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "bench/gpu.py", *arguments],
        cwd=ROOT, env=env, capture_output=True, text=True,
    )  # fmt: skip


def rows(out):
    return json.loads((out / "gpu.json").read_text())["rows"]


def test_the_script_finds_the_package_of_its_checkout():
    """On a machine that has torch and triton, and nothing of ours installed."""
    code = (
        "import sys; sys.path.insert(0, 'bench'); import lib, importlib.util; "
        "print(importlib.util.find_spec('fusedce').origin)"
    )
    done = subprocess.run(  # without what is installed here
        [sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("fusedce/__init__.py"), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_dry_run_of_every_suite_and_the_tables_of_it(tmp_path):
    every = ("training", "peers", "ways", "blocks", "model", "options", "divergences", "classes",
             "small")  # fmt: skip
    done = run("--dry", *every, out=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = rows(tmp_path)
    assert {row["suite"] for row in found} == set(every)
    failed = {row["name"] for row in found if "failed" in row}  # peers are stubs
    # Inductor does not quote the paths that it gives to the C++ compiler.
    assert failed <= ({"compiled eager"} if " " in sys.prefix else set())
    peers = {row["name"] for row in found if row["suite"] == "peers"}
    assert {"Liger-Kernel", "QuACK", "cut-cross-entropy, exact", "compiled eager"} <= peers
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- gpu {x} -->\n<!-- end -->\n" for x in ("versions", "ways")))
    assert (
        run("table", str(tmp_path / "gpu.json"), "--page", str(page), out=tmp_path).returncode == 0
    )
    assert "| one GEMM" in page.read_text()
