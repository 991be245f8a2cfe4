"""The loss of a Hugging Face model in a loop of one's own: one denominator, on two ranks too."""

import pytest
import torch
from support import ranks
from support.bounds import SAME_MODEL
from support.engines import accelerator
from support.loops import distance
from support.tiny_trainer import V, llama
from transformers import LlamaForCausalLM

import fusedce
from fusedce import LossAccumulator, model_loss, replace_loss_head


def micro_batches(rank):
    rng = torch.Generator().manual_seed(rank)
    ids = [torch.randint(V, (1, n), generator=rng) for n in (5, 17, 3)[: 3 - rank]]
    return [{"input_ids": x, "labels": x} for x in ids]


def exact(world):
    """Gradients of the sum over the count, in eager, and the loss."""
    model, total, n = llama(), 0.0, 0
    for rank in range(world):
        for batch in micro_batches(rank):
            total = total + model(**batch, num_items_in_batch=1).loss
            n += int(fusedce.count_valid(batch["labels"]))
    (total / n).backward()
    return [p.grad for p in model.parameters()], float(total / n), n


def check(model, acc, world):
    eager, loss, n = exact(world)
    for p, grad in zip(model.parameters(), eager, strict=True):
        assert distance(p.grad, grad) <= SAME_MODEL
    metrics = acc.metrics()
    assert metrics["n_tokens"] == n
    assert metrics["loss"] == pytest.approx(loss, rel=SAME_MODEL)


def test_model_loss_is_the_sum_over_the_count():
    model = replace_loss_head(llama())
    acc = LossAccumulator(model)
    for batch in micro_batches(0):
        acc.backward(model_loss(model, batch))
    acc.finish()
    check(model, acc, 1)


@ranks.together()
def test_two_ranks_of_accelerate(rank):
    engine = accelerator(rank)
    model = replace_loss_head(llama())
    model = engine.prepare(model)
    acc = LossAccumulator.from_accelerator(engine, model)
    *others, last = micro_batches(rank)
    for batch in others:
        with engine.no_sync(model):
            acc.backward(model_loss(model, batch))
    acc.backward(model_loss(model, last))
    acc.finish()
    check(model, acc, 2)


def test_a_head_that_is_not_replaced_is_refused():
    with pytest.raises(ValueError, match=r"call fusedce.replace_loss_head\(model\) first"):
        model_loss(llama(), micro_batches(0)[0])
    with pytest.raises(ValueError, match='batch must hold "labels"'):
        model_loss(llama(), {"input_ids": torch.zeros(1, 2)})
    with pytest.raises(TypeError, match="batch must be a mapping"):
        model_loss(llama(), [1])


class Regularised(LlamaForCausalLM):
    """Adds a small term to the loss of its tokens, and may return it."""

    size, name = 0.1, None

    def forward(self, **batch):
        out = super().forward(**batch)
        term = self.size * self.lm_head.weight.square().mean()
        out.loss = out.loss + term
        if self.name is not None:
            out[self.name] = term
        return out


@pytest.mark.parametrize(
    ("name", "words"), [(None, "that it does not return"), ("aux_loss", "aux_loss")]
)
def test_a_term_that_is_no_sum_over_tokens_is_named(name, words):
    model = replace_loss_head(Regularised(llama().config))
    model.name = name
    batch = micro_batches(0)[0]
    with pytest.raises(ValueError, match=f"cross-entropy and .* more .*{words}.*no sum over"):
        model_loss(model, batch)
    model.size = 0.0
    assert model_loss(model, batch).n_valid > 0
