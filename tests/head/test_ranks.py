"""A replaced head under DDP, FSDP1, FSDP2, HSDP and Trainer: several gloo processes equal one."""

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import SAME_MODEL, STATISTIC, same_model
from support.versions import FSDP2_MEAN, marked

from fusedce import replace_loss_head
from fusedce.head.product import Product

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

V = 37


def model(tied=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, use_cache=False,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows(rank=None):
    """Rows of one length without ignored labels: the mean of two ranks' means is the mean."""
    ids = torch.randint(0, V, (4, 9), generator=torch.Generator().manual_seed(1))
    each = 4 // dist.get_world_size() if rank is not None else 4
    ids = ids if rank is None else ids[each * rank : each * (rank + 1)]
    return {"input_ids": ids, "labels": ids}


def ddp(rank, outside=False, **kwargs):
    wrapped = torch.nn.parallel.DistributedDataParallel(replace_loss_head(model()), **kwargs)
    return two_steps(wrapped, rank, outside)


def fsdp(rank, units, tied=False, **kwargs):
    from torch.distributed.fsdp import fully_shard

    sharded = model(tied)
    if kwargs.pop("before", False):
        replace_loss_head(sharded)
    for layer in sharded.model.layers:
        fully_shard(layer, **kwargs)
    for name in units:
        fully_shard(sharded.get_submodule(name), **kwargs)
    fully_shard(sharded, **kwargs)
    return two_steps(replace_loss_head(sharded), rank)


def hsdp(rank):
    """Two copies of the model, each sharded over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return fsdp(rank, ["lm_head"], mesh=mesh)


def fsdp1(rank, unit, original_parameters):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    options = {"use_orig_params": original_parameters, "device_id": torch.device("cpu")}
    sharded = replace_loss_head(model())
    for i, layer in enumerate(sharded.model.layers):
        sharded.model.layers[i] = FSDP(layer, **options)
    if unit:
        sharded.lm_head = FSDP(sharded.lm_head, **options)
    sharded = FSDP(sharded, **options)
    if unit:
        return ranks.error_of(lambda: two_steps(sharded, rank))
    return two_steps(sharded, rank)[0], {}  # its parameters are in parts of other shapes


def two_steps(wrapped, rank, outside=False):
    """Losses and evaluation losses of two steps of SGD, and the parameters after them."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        wrapped.train()
        if outside:
            logits = wrapped(input_ids=rows(rank)["input_ids"]).logits
            labels = rows(rank)["labels"][:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
            without = F.cross_entropy(logits.detach()[:, :-1].flatten(0, 1), labels)
            assert torch.equal(without, loss)
            assert not without.requires_grad
        else:
            loss = wrapped(**rows(rank)).loss
        loss.backward()
        optimizer.step()
        wrapped.eval()
        with torch.no_grad():
            evaluated = wrapped(**rows(rank)).loss
        losses += [loss.detach(), evaluated]
    losses = torch.stack(losses)
    if rank is not None:
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    parameters = {}
    for name, p in wrapped.named_parameters():
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        parameters[name.removeprefix("module.")] = p.detach().clone()
    return losses, parameters


CASES = {
    "ddp": ddp,
    "ddp, unused": functools.partial(ddp, find_unused_parameters=True),
    "ddp, static": functools.partial(ddp, static_graph=True),
    "ddp, loss outside": functools.partial(ddp, outside=True),
    "ddp, unused, loss outside": functools.partial(ddp, outside=True, find_unused_parameters=True),
    "ddp, static, loss outside": functools.partial(ddp, outside=True, static_graph=True),
    "fsdp1": functools.partial(fsdp1, unit=False, original_parameters=False),
    "fsdp1, original parameters": functools.partial(fsdp1, unit=False, original_parameters=True),
    "fsdp, root": functools.partial(fsdp, units=[]),
    "fsdp, unit": functools.partial(fsdp, units=["lm_head"]),
    "fsdp, unit, replaced before": functools.partial(fsdp, units=["lm_head"], before=True),
    "fsdp, root, resharding": functools.partial(fsdp, units=[], reshard_after_forward=True),
    "fsdp, unit, resharding": functools.partial(
        fsdp, units=["lm_head"], reshard_after_forward=True
    ),
    "fsdp, tied": functools.partial(fsdp, units=[], tied=True),
}
REFUSED = {original: functools.partial(fsdp1, unit=True, original_parameters=original)
           for original in (False, True)}  # fmt: skip


def without_logits(case, rank):
    with mock.patch.object(Product, "logits", side_effect=AssertionError("logits were computed")):
        return case(rank)


@functools.cache
def results(world):
    cases = CASES | REFUSED if world == 2 else {"hsdp": hsdp}
    return ranks.run(
        {k: functools.partial(without_logits, case) for k, case in cases.items()}, world
    )


@pytest.mark.parametrize("name", marked([*CASES, "hsdp"], FSDP2_MEAN, "fsdp,"))
def test_equals_one_process(name):
    expected = two_steps(model("tied" in name), None)
    for losses, parameters in ranks.of(results(4 if name == "hsdp" else 2), name):
        torch.testing.assert_close(losses, expected[0], rtol=STATISTIC, atol=0)
        same = {k: v for k, v in expected[1].items() if k in parameters}
        same_model(parameters, same)


@pytest.mark.parametrize("original", REFUSED)
def test_a_head_that_is_a_unit_of_fsdp1_is_refused_in_words(original):
    for error in ranks.of(results(2), original):
        assert "FSDP1 (FullyShardedDataParallel) shards it as a unit" in error


# ---- Trainer under accelerate ---------------------------------------------------------------

SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
from support.tiny_trainer import *
from fusedce import replace_loss_head

data = Dataset(16)
for i, row in enumerate(data.rows):
    if i % 3 == 0:
        row["labels"] = torch.full_like(row["labels"], -100)
FusedTrainer.log_token_stats = True
STATS = ("mean_token_accuracy", "entropy", "num_tokens")
world = int(__import__("os").environ.get("WORLD_SIZE", 1))
results = {{}}
for name, kind, steps in (("stock", Trainer, 2), ("fused", FusedTrainer, 2)):
    args = arguments({folder!r}, 4 // world, steps, max_steps=2, max_grad_norm=1.0,
                     per_device_eval_batch_size=2)
    model = sharpened()
    if kind is Trainer:
        replace_loss_head(model)
    seen = Seen()
    trainer = kind(model=model, args=args, train_dataset=data, eval_dataset=Dataset(5),
                   callbacks=[seen])
    trainer.train()
    results[name] = {{
        "loss": [log["loss"] for log in seen.logs if "loss" in log],
        "grad_norm": [log["grad_norm"] for log in seen.logs if "grad_norm" in log],
        "eval": (evaluated := trainer.evaluate())["eval_loss"],
        "stats": [[log.get(k) for k in STATS] for log in seen.logs if "loss" in log],
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
    import json

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
        env = copy.copy(os.environ) | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
        assert run.returncode == 0, run.stderr[-3000:]
        results[processes] = json.loads(out.read_text())
    return results


@pytest.mark.slow
def test_mixin_on_two_ranks_equals_one(trainer_results):
    one, two = (trainer_results[n]["fused"] for n in (1, 2))
    assert two["loss"] == pytest.approx(one["loss"], rel=SAME_MODEL)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=SAME_MODEL)
    assert two["eval"] == pytest.approx(one["eval"], rel=SAME_MODEL)
    for kind in ("stats", "eval_stats"):
        torch.testing.assert_close(torch.tensor(two[kind]), torch.tensor(one[kind]))
    assert one["stats"][-1][2] == 2 * 8 * 12  # steps, rows, tokens of each


@pytest.mark.slow
def test_stock_evaluation_on_two_ranks_does_not(trainer_results):
    one, two = (trainer_results[n]["stock"] for n in (1, 2))
    assert two["loss"] == pytest.approx(one["loss"], rel=SAME_MODEL)  # mended upstream
    assert abs(two["eval"] - trainer_results[1]["fused"]["eval"]) > 1e-3
