"""Trainer with the mixin, in one process and in two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.bounds import SAME_MODEL

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
from support.tiny_trainer import *

data = Dataset(16)
for i, row in enumerate(data.rows):
    if i % 3 == 0:
        row["labels"] = torch.full_like(row["labels"], -100)
FusedTrainer.log_token_stats = True
STATS = ("mean_token_accuracy", "entropy", "num_tokens")
world = int(__import__("os").environ.get("WORLD_SIZE", 1))
args = arguments({folder!r}, 4 // world, 2, max_steps=2, max_grad_norm=1.0,
                 per_device_eval_batch_size=2)
seen = Seen()
trainer = FusedTrainer(model=sharpened(), args=args, train_dataset=data, eval_dataset=Dataset(5),
                       callbacks=[seen])
trainer.train()
evaluated = trainer.evaluate()
logs = [log for log in seen.logs if "loss" in log]
results = {{
    "loss": [log["loss"] for log in logs],
    "grad_norm": [log["grad_norm"] for log in seen.logs if "grad_norm" in log],
    "eval": evaluated["eval_loss"],
    "stats": [[log.get(k) for k in STATS] for log in logs],
    "eval_stats": [evaluated.get("eval_" + k) for k in STATS[:2]],
}}
if not dist.is_initialized() or dist.get_rank() == 0:
    open({out!r}, "w").write(json.dumps(results))
if dist.is_initialized():  # a rank that leaves while another one talks to it aborts that one
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trainer_results(tmp_path_factory):
    """The same script in one process, and in two that accelerate joins."""
    folder = tmp_path_factory.mktemp("trainer")
    results = {}
    for processes in (1, 2):
        out = folder / f"{processes}.json"
        script = folder / f"train{processes}.py"
        tests = str(Path(__file__).parents[1])
        script.write_text(SCRIPT.format(tests=tests, folder=str(folder), out=str(out)))
        command = [sys.executable, str(script)]
        if processes == 2:
            command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
        assert run.returncode == 0, run.stderr[-3000:]
        results[processes] = json.loads(out.read_text())
    return results


@pytest.mark.slow
def test_mixin_on_two_ranks_equals_one(trainer_results):
    one, two = (trainer_results[n] for n in (1, 2))
    for kind in ("loss", "grad_norm", "eval"):
        assert two[kind] == pytest.approx(one[kind], rel=SAME_MODEL)
    for kind in ("stats", "eval_stats"):
        torch.testing.assert_close(torch.tensor(two[kind]), torch.tensor(one[kind]))
    assert one["stats"][-1][2] == 2 * 8 * 12  # steps, rows, tokens of each
