"""A replaced head whose rows are sharded over ranks by transformers' tensor parallelism."""

import functools
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from torch.distributed import tensor

from fusedce import head_report, replace_loss_head

transformers = pytest.importorskip("transformers", minversion="5.23")  # its tensor parallelism

V = 37  # not a multiple of the ranks


@functools.cache
def folder():
    """A checkpoint of a tiny Llama, kept until the process ends."""
    torch.manual_seed(1)
    kept = tempfile.TemporaryDirectory()
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(kept.name)
    return kept


def batch():
    ids = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def stock():
    return transformers.LlamaForCausalLM.from_pretrained(folder().name)


def sharded(rank):
    """The same model with ``tp_plan="auto"`` over all ranks."""
    world = str(dist.get_world_size())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world}
    config = transformers.distributed.DistributedConfig(tp_size=int(world), tp_plan="auto")
    model = transformers.LlamaForCausalLM.from_pretrained(folder().name, distributed_config=config)
    weight = model.lm_head.weight
    assert isinstance(weight, tensor.DTensor)
    assert weight.placements == (tensor.Shard(0),)
    return replace_loss_head(model)


def from_logits(loss):
    """A loss of the logits, as user code computes it."""

    def of(model):
        logits = model(batch()["input_ids"]).logits[:, :-1]
        return loss(logits.flatten(0, 1), batch()["labels"][:, 1:].flatten())

    return of


LOSSES = {
    "the model's": lambda model: model(**batch()).loss,
    "items of a step": lambda model: model(**batch(), num_items_in_batch=torch.tensor(31)).loss,
    "sum": from_logits(lambda z, y: F.cross_entropy(z, y, reduction="sum") * 0.1),
    "tokens": from_logits(
        lambda z, y: (F.cross_entropy(z, y, reduction="none") * torch.arange(16) / 16).sum()
    ),
    "class weights": from_logits(
        lambda z, y: F.cross_entropy(z, y, torch.arange(1.0, V + 1), label_smoothing=0.1)
    ),
    "capped": from_logits(lambda z, y: F.cross_entropy((z / 3).tanh() * 3, y)),
    "first classes": from_logits(
        lambda z, y: F.cross_entropy(z[:, : V - 2], y.where(y < V - 2, -100))
    ),
}
LOOKS = {  # need real logits, or their gradient
    "another loss beside": from_logits(lambda z, y: F.cross_entropy(z, y) + z.square().mean()),
    "last classes": from_logits(
        lambda z, y: F.cross_entropy(z[:, 2:], torch.where(y < 2, -100, y - 2))
    ),
}


def no_whole_weight(self, **_):
    raise AssertionError("the whole head was gathered")


def equal(name, rank):
    """Loss, evaluation loss and all gradients are those of the model on one rank."""
    whole, parts = stock(), sharded(rank)
    f = (LOSSES | LOOKS)[name]
    expected = f(whole)
    expected.backward()
    with pytest.MonkeyPatch.context() as patch:
        if name in LOSSES:
            patch.setattr(tensor.DTensor, "full_tensor", no_whole_weight)
        loss = f(parts)
        loss.backward()
        evaluated = []
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                evaluated.append(f(parts.eval()) + 0)
    torch.testing.assert_close([loss, *evaluated], [expected] * 3)
    for (key, p), q in zip(whole.named_parameters(), parts.parameters(), strict=True):
        grad = q.grad.full_tensor() if isinstance(q.grad, tensor.DTensor) else q.grad
        torch.testing.assert_close(grad, p.grad, msg=lambda m, key=key: f"{key}: {m}")
    report = head_report(parts)
    assert report.active
    if name in LOSSES:
        assert (report.losses_fused, report.logits_made) == (3, 0)
    return float(loss)


def looks(rank):
    """Logits are those of the stock model; reading them after a step is an error at once."""
    parts = sharded(rank)
    out = parts(**batch())
    torch.testing.assert_close(out.logits + 0, stock()(**batch()).logits)
    out.loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(parts(**batch()).logits + 0, stock()(**batch()).logits)
    late = parts(**batch())
    late.loss.backward()
    torch.optim.SGD(parts.parameters(), lr=0.1).step()
    before = float(late.loss)
    assert "has changed" in ranks.error_of(lambda: late.logits + 0)
    assert float(parts(**batch()).loss) < before
    ids = batch()["input_ids"][:1, :4]
    return parts.generate(ids, max_new_tokens=3, do_sample=False).tolist()


CASES = {name: functools.partial(equal, name) for name in LOSSES | LOOKS} | {"looks": looks}
on_two = ranks.shared(CASES)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_model_on_one_rank(name):
    folder()
    a, b = on_two(name)
    assert a == b
