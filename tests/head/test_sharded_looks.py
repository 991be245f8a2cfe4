"""Reading logits of a head that FSDP2 has sharded again never waits for other ranks."""

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.bounds import SAME_MODEL

from fusedce import replace_loss_head

transformers = pytest.importorskip("transformers")
V, H = 37, 32


def native():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def sharded(own_unit):
    from torch.distributed.fsdp import fully_shard

    model = native()
    if own_unit:
        fully_shard(model.lm_head)
    fully_shard(model)
    return replace_loss_head(model)


def ids():
    return torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(1))


def expected():
    with torch.no_grad():
        return native()(input_ids=ids()).logits


def alone(rank, look):
    """The result or error on rank 0, and its seconds."""
    result = ranks.timed(look) if rank == 0 else None
    dist.barrier()
    return result


def own_unit(rank):
    model = sharded(own_unit=True)
    z = model(input_ids=ids()).logits
    refused = alone(rank, lambda: z.argmax(-1))
    model.lm_head.unshard()
    allowed = alone(rank, lambda: torch.testing.assert_close(z.detach() + 0, expected()))
    model.lm_head.reshard()
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    return refused, allowed, float(loss.detach())


def kept_weight(rank):
    model = sharded(own_unit=True)
    model.lm_head.set_reshard_after_forward(False)
    with torch.no_grad():
        z = model(input_ids=ids()).logits
    return alone(rank, lambda: torch.testing.assert_close(z + 0, expected()))


def root_after_backward(rank):
    model = sharded(own_unit=False)
    out = model(input_ids=ids(), labels=ids())
    before = alone(rank, lambda: torch.testing.assert_close(out.logits.detach() + 0, expected()))
    z = model(input_ids=ids(), labels=ids())
    z.loss.backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    return before, alone(rank, lambda: z.logits.argmax(-1))


def generation(rank):
    model = sharded(own_unit=True).eval()
    with torch.no_grad():
        return model.generate(ids(), max_new_tokens=5, do_sample=False, pad_token_id=0)


CASES = {f.__name__: f for f in (own_unit, kept_weight, root_after_backward, generation)}


@pytest.fixture(scope="module")
def results():
    return ranks.run(CASES)


pytestmark = pytest.mark.slow


def test_a_look_alone_is_refused_at_once(results):
    (error, seconds), *_ = ranks.of(results, "own_unit")[0]
    assert "wait for the others" in error
    assert "set_reshard_after_forward(False)" in error
    assert seconds < ranks.SOON


def test_a_look_alone_after_all_ranks_have_unsharded(results):
    per_rank = ranks.of(results, "own_unit")
    assert per_rank[0][1][0] is None, per_rank[0][1]
    exact = float(native()(input_ids=ids(), labels=ids()).loss.detach())
    assert [r[2] for r in per_rank] == pytest.approx([exact, exact], rel=SAME_MODEL)


def test_a_look_alone_where_the_weight_stays(results):
    assert ranks.of(results, "kept_weight")[0][0] is None


def test_looks_around_backward(results):
    before, after = ranks.of(results, "root_after_backward")[0]
    assert before[0] is None, before
    error, seconds = after
    assert "has changed" in error or "wait for the others" in error
    assert seconds < ranks.SOON


def test_generation(results):
    model = native().eval()
    with torch.no_grad():
        wanted = model.generate(ids(), max_new_tokens=5, do_sample=False, pad_token_id=0)
    for found in ranks.of(results, "generation"):
        assert torch.equal(found, wanted)
