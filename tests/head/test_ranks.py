"""A replaced head under DDP, FSDP1, FSDP2 and HSDP: several gloo processes equal one."""

import functools
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import STATISTIC, same_model
from support.tiny_trainer import V, llama
from support.versions import FSDP2_MEAN, marked

from fusedce import replace_loss_head
from fusedce.head.linear_call import LinearCall


def rows(rank=None):
    """Rows of one length without ignored labels: the mean of two ranks' means is the mean."""
    ids = torch.randint(0, V, (4, 9), generator=torch.Generator().manual_seed(1))
    each = 4 // dist.get_world_size() if rank is not None else 4
    ids = ids if rank is None else ids[each * rank : each * (rank + 1)]
    return {"input_ids": ids, "labels": ids}


def ddp(rank, outside=False, **kwargs):
    wrapped = torch.nn.parallel.DistributedDataParallel(replace_loss_head(llama()), **kwargs)
    return two_steps(wrapped, rank, outside)


def fsdp(rank, units, tied=False, **kwargs):
    from torch.distributed.fsdp import fully_shard

    sharded = llama(tie_word_embeddings=tied)
    if kwargs.pop("before", False):
        replace_loss_head(sharded)
    for layer in sharded.model.layers:
        fully_shard(layer, **kwargs)
    for name in units:
        fully_shard(sharded.get_submodule(name), **kwargs)
    fully_shard(sharded, **kwargs)
    return two_steps(replace_loss_head(sharded), rank)


def fsdp_peft(rank, **settings):
    """The head, with what PEFT has put around it, as a unit of its own."""
    from torch.distributed.fsdp import fully_shard

    sharded = peft_llama(**settings)
    fully_shard(sharded.get_output_embeddings())
    return two_steps(replace_loss_head(fully_shard(sharded)), rank)


def peft_llama(**settings):
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=3, **settings))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return model


def hsdp(rank):
    """Two copies of the model, each sharded over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return fsdp(rank, ["lm_head"], mesh=mesh)


def fsdp1(rank, unit, original_parameters):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    options = {"use_orig_params": original_parameters, "device_id": torch.device("cpu")}
    sharded = replace_loss_head(llama())
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


PEFT = {
    "lora": {"target_modules": ["lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
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
    **{
        f"fsdp, peft, {name}": functools.partial(fsdp_peft, **settings)
        for name, settings in PEFT.items()
    },
    "fsdp, tied": functools.partial(fsdp, units=[], tied=True),
}
REFUSED = {original: functools.partial(fsdp1, unit=True, original_parameters=original)
           for original in (False, True)}  # fmt: skip


def without_logits(case, rank):
    error = AssertionError("logits were computed")
    with mock.patch.object(LinearCall, "materialize", side_effect=error):
        return case(rank)


found_of = {
    world: ranks.shared({x: functools.partial(without_logits, f) for x, f in cases.items()}, world)
    for world, cases in ((2, CASES | REFUSED), (4, {"fsdp, copies": hsdp}))
}


@pytest.mark.parametrize("name", marked([*CASES, "fsdp, copies"], FSDP2_MEAN, "fsdp,"))
def test_equals_one_process(name):
    settings = PEFT.get(name.removeprefix("fsdp, peft, "))
    model = peft_llama(**settings) if settings else llama(tie_word_embeddings="tied" in name)
    expected = two_steps(model, None)
    for losses, parameters in found_of[4 if "copies" in name else 2](name):
        torch.testing.assert_close(losses, expected[0], rtol=STATISTIC, atol=0)
        same = {k: v for k, v in expected[1].items() if k in parameters}
        same_model(parameters, same)


@pytest.mark.parametrize("original", REFUSED)
def test_a_head_that_is_a_unit_of_fsdp1_is_refused_in_words(original):
    for error in found_of[2](original):
        assert "FSDP1 (FullyShardedDataParallel) shards it as a unit" in error


# ---- looks at logits whose head FSDP2 has sharded again -------------------------------------


def fsdp_of(units):
    from torch.distributed.fsdp import fully_shard

    sharded = llama()
    for name in units:
        fully_shard(sharded.get_submodule(name))
    return replace_loss_head(fully_shard(sharded))


def assert_alone(rank, look, words=None):
    """On rank 0 alone, a look is right, or an error of these words at once."""
    if rank == 0:
        error, seconds = ranks.timed(look)
        assert (words or "") in (error or "")
        assert (error is None) == (words is None)
        assert seconds < ranks.SOON
    dist.barrier()


def is_right(z):
    with torch.no_grad():
        expected = llama()(input_ids=rows()["input_ids"]).logits
    torch.testing.assert_close(z.detach() + 0, expected)
    return expected


on_two_ranks = ranks.together()


@pytest.mark.slow
@on_two_ranks
def test_a_look_alone_at_a_head_of_its_own_unit(rank):
    sharded = fsdp_of(["lm_head"])
    with torch.no_grad():
        z = sharded(**rows()).logits
    assert_alone(rank, lambda: is_right(z))
    out = sharded(**rows())
    assert_alone(rank, lambda: is_right(out.logits))
    out.loss.backward()
    assert_alone(rank, lambda: is_right(out.logits))
    sharded = fsdp_of([])
    sharded.set_reshard_after_forward(True)
    z = sharded(**rows()).logits
    assert_alone(rank, lambda: z.argmax(-1), "set_reshard_after_forward(False)")
    sharded.unshard()
    assert_alone(rank, lambda: is_right(z))


@pytest.mark.slow
@on_two_ranks
def test_a_head_of_its_own_unit_runs_with_the_weight_of_now(rank):
    """Averaged weights are swapped in between evaluations, while logits of the last one live on."""
    sharded = fsdp_of(["lm_head"])
    with torch.no_grad():
        before = sharded(**rows())
        sharded.lm_head.weight.to_local().mul_(2)
        after = sharded(**rows())
        assert after.loss != before.loss
        torch.testing.assert_close(after.logits + 0, 2 * is_right(before.logits))


@pytest.mark.slow
@on_two_ranks
def test_a_look_alone_after_backward(rank):
    sharded = fsdp_of([])
    before = sharded(**rows())
    assert_alone(rank, lambda: is_right(before.logits))
    late = sharded(**rows())
    late.loss.backward()
    torch.optim.SGD(sharded.parameters(), 0.0).step()
    assert_alone(rank, lambda: late.logits.argmax(-1), "FSDP2 has sharded the weight")
