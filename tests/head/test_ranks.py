"""A replaced head under DDP, FSDP1, FSDP2 and HSDP: several gloo processes equal one."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import STATISTIC, same_model
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
