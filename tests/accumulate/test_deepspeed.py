"""Under the real DeepSpeed, ZeRO 0 to 3: exact, and refused where its engine never steps."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import parallel
from support.bounds import SAME_SUMS, STATISTIC
from support.loops import a_loss, distance, new_weight

from fusedce import LossAccumulator


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_windows_under_deepspeed(stage):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    script = Path(__file__).parents[1] / "support" / "deepspeed_windows.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, "--standalone", str(script), str(stage)],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    _, parameters, (loss, tokens) = parallel.single_process(2)
    for p, exact in zip(found["parameters"], parameters, strict=True):
        assert distance(torch.tensor(p), exact) <= SAME_SUMS
    assert found["metrics"]["n_tokens"] == tokens
    assert found["metrics"]["loss"] == pytest.approx(loss, rel=STATISTIC)
    assert "streaming is not possible here: DeepSpeed keeps gradients" in found["streaming"]
    assert "steps after every 3 micro-batches" in found["short"]
    assert "engine.step() was called 0 times in a window of 3" in found["once"]


def engine(**changes):
    """A stand-in that counts as DeepSpeed does."""
    made = SimpleNamespace(
        gradient_accumulation_steps=lambda: 2, micro_steps=0, seq_data_parallel_group=None,
        optimizer=SimpleNamespace(loss_scale=4.0),
    )  # fmt: skip
    made.backward = lambda loss: (loss * 4 / 2).backward()
    vars(made).update(changes)
    return made


def window(acc, of, steps, weight, n=2):
    with acc.window([3] * n):
        for i in range(n):
            acc.backward(a_loss(3, weight))
            of.micro_steps += i < steps
    of.micro_steps += steps > n


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_step_follows_each_micro_batch(steps):
    """The last one comes inside the block, after it, or never: then the next window says so."""
    of, weight = engine(), new_weight()
    acc = LossAccumulator.from_deepspeed(of)
    window(acc, of, steps, weight)
    if steps == 1:
        with pytest.raises(RuntimeError, match="declares 2 and begins after 1"):
            window(acc, of, 2, weight)


@pytest.mark.parametrize(
    "changes",
    [{"_is_gradient_accumulation_boundary": True}, {"managed_gradient_accumulation": bool}],
)
def test_a_loop_that_sets_the_boundary_itself_is_free(changes):
    of = engine(**changes)
    window(LossAccumulator.from_deepspeed(of), of, 0, new_weight(), n=3)


def test_an_engine_is_needed():
    with pytest.raises(TypeError, match=r"engine must be what deepspeed.initialize returns first"):
        LossAccumulator.from_deepspeed(torch.nn.Linear(2, 2))
