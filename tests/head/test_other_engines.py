"""DeepSpeed's ZeRO trains a replaced head as the untouched model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.bounds import SAME_MODEL, same_model


def train(stage, replaced, unequal):
    script = Path(__file__).parents[1] / "support" / "deepspeed_steps.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", str(script), str(stage), str(int(replaced)), str(int(unequal))]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))


@pytest.mark.parametrize(("stage", "unequal"), [(1, False), (2, False), (3, False), (3, True)])
def test_zero(stage, unequal):
    """Stage 3 gathers the weight for the loss, and no stage makes logits.

    It gathers once for a loss, not for a chunk: a rank with one chunk and a rank with four do not
    wait for each other.
    """
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    native, replaced = train(stage, False, unequal), train(stage, True, unequal)
    assert replaced["losses"] == pytest.approx(native["losses"], rel=SAME_MODEL)
    for expected, got in zip(native["gradients"], replaced["gradients"], strict=True):
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            assert any(gradient), name
            same_model(torch.tensor(got[name]), torch.tensor(gradient))
    assert (replaced["fused"], replaced["made"]) == (3, 0)
