"""Engines train a replaced head as the untouched model: Lightning's Fabric, DeepSpeed's ZeRO."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.bounds import SAME_MODEL, same_model
from support.heads import ce, plain_model, tokens

from fusedce import head_report, replace_loss_head


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


def three_steps(model, precision, loss_inside):
    """Fabric puts hooks on whatever a model returns."""
    fabric_of = pytest.importorskip("lightning_fabric", reason="Lightning is not installed")
    fabric = fabric_of.Fabric(accelerator="cpu", devices=1, precision=precision)
    x, y = tokens(3, 7), tokens(3, 7, seed=1)

    class WithLoss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            z = self.model(x)
            return {"loss": ce(z, y), "logits": z}

    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    run, optimizer = fabric.setup(WithLoss() if loss_inside else model, optimizer)
    losses, gradients = [], []
    for _ in range(3):
        out = run(x, y) if loss_inside else run(x)
        loss = out["loss"] if loss_inside else ce(out, y)
        fabric.backward(loss)
        gradients.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, gradients


@pytest.mark.parametrize("loss_inside", [False, True], ids=["loss outside", "loss inside"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_trains_without_logits(precision, loss_inside):
    expected = three_steps(plain_model(), precision, loss_inside)
    model = replace_loss_head(plain_model())
    got = three_steps(model, precision, loss_inside)
    report = head_report(model)
    assert (report.losses_fused, report.logits_made) == (3, 0), str(report)
    near = {"rtol": 1e-5, "atol": 1e-6} if precision == "32-true" else {"rtol": 0.05, "atol": 1e-3}
    torch.testing.assert_close(got, expected, **near)
