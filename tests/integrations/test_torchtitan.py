"""torchtitan's loss: on stand-ins for the little that it imports, and with the real Trainer."""

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_MODEL, same_model

from fusedce import head_report

NAME = "fusedce.integrations.torchtitan"


class BaseLoss:
    """As torchtitan's: a sum, divided by the tokens of the step."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        pass

    def __call__(self, pred, labels, global_valid_tokens=None, **_):
        loss = self.fn(pred, labels)
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


class ChunkedLossWrapper(BaseLoss):
    """Instead of chunks it says that it was called."""

    def __init__(self, config, *, compile_config=None):
        self.loss_fn = types.SimpleNamespace(global_vocab_size=None)

    def __call__(self, *args, **_):
        return "chunks", self.loss_fn.global_vocab_size


@pytest.fixture
def loss(monkeypatch):
    """The loss, on stand-ins."""
    names = {
        "spmd_types": {"no_typecheck": contextlib.nullcontext},
        "torchtitan": {}, "torchtitan.components": {},
        "torchtitan.components.loss": {
            "IGNORE_INDEX": -100, "BaseLoss": BaseLoss, "ChunkedLossWrapper": ChunkedLossWrapper,
        },
    }  # fmt: skip
    for name, values in names.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    kind = importlib.import_module(NAME).FusedCELoss
    yield kind(kind.Config(memory_budget=10**6))
    del sys.modules[NAME]


class Capped(torch.nn.Linear):
    """A head that does more than a product."""

    def forward(self, x):
        return 3 * torch.tanh(super().forward(x) / 3)


@pytest.mark.parametrize("kind", [torch.nn.Linear, Capped])
@pytest.mark.parametrize("length", [8, 13])
def test_loss_and_gradients_are_those_of_logits(loss, kind, length):
    torch.manual_seed(0)
    head = kind(16, 50, bias=False)
    hidden = torch.randn(2, length, 16, requires_grad=True)
    labels = torch.randint(50, (2, length)).index_fill(1, torch.tensor([2, 5]), -100)
    n = (labels != -100).sum()
    logits = head(hidden).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), reduction="sum") / n
    gradients = torch.autograd.grad(expected, [hidden, head.weight])
    loss.set_lm_head(head)
    got, metrics = loss(hidden, labels, n, positions=None)
    assert metrics == {}
    same_model(got, expected)
    for one, other in zip(torch.autograd.grad(got, [hidden, head.weight]), gradients, strict=True):
        same_model(one, other)
    with torch.no_grad():
        same_model(loss(hidden, labels)[0], expected * n)
    assert (head_report(head).losses_fused, head_report(head).logits_made) == (2, 0)


class Mesh:
    mesh_dim_names = ("dp_shard", "tp")

    def __getitem__(self, name):
        return types.SimpleNamespace(size=lambda: 2)


def test_a_head_that_tensor_parallelism_splits_keeps_torchtitans_chunks(loss):
    head = torch.nn.Linear(16, 50)
    head.weight.device_mesh = Mesh()
    loss.set_lm_head(head)
    assert loss(torch.randn(1, 8, 16), None) == ("chunks", 50)
    assert not head_report(head).active


# ---- the real package ---------------------------------------------------------------------------


def steps(ranks, **given):
    script = Path(__file__).parents[1] / "support" / "titan_steps.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    run = subprocess.run(
        [*command, "--standalone", str(script), json.dumps(given)],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(next(line for line in run.stdout.splitlines() if line.startswith('{"lo')))


REAL = {
    "fsdp": (2, {"batches": (2, 8), "typechecked": True}, 6),
    "fsdp, resharding": (2, {"fsdp_reshard_after_forward": "always"}, 3),
    "tied": (2, {"tied": True}, 3),
    "pipeline": (2, {"pipeline_parallel_degree": 2, "batches": (4, 4)}, 13),
    "tensor parallel": (2, {"tensor_parallel_degree": 2, "batches": (2, 2), "seq_len": 32}, 0),
    "full_dtensor": (2, {"spmd_backend": "full_dtensor", "seq_len": 32}, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_torchtitan(name):
    """Three steps log what torchtitan's own loss of whole logits logs.

    Runs where torchtitan is installed, with a torch as new as it needs (0.3: 2.15).
    """
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    ranks, given, fused = REAL[name]
    stock, ours = steps(ranks, loss="plain", **given), steps(ranks, loss="fused", **given)
    for mine, theirs in zip(ours["logged"], stock["logged"], strict=True):
        assert mine == pytest.approx(theirs, rel=8 * SAME_MODEL)
    assert (ours["fused"], ours["made"]) == (fused, 0)
