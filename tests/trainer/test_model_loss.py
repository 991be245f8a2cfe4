"""The loss of a Hugging Face model in a loop of one's own: one denominator, on two ranks too."""

import re

import pytest
import torch
import torch.nn.functional as F
from support import ranks
from support.bounds import SAME_MODEL
from support.engines import accelerator
from support.loops import distance
from support.tiny_trainer import Dataset, V, llama
from support.unfused import Documents, MaskedMean, Means, TwoLosses, classifier, dora
from support.versions import FSDP2_MEAN
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

import fusedce
from fusedce import (
    LossAccumulator,
    head_report,
    model_loss,
    replace_loss_head,
    restore_loss_head,
    shift_labels,
)


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


def test_a_wrong_batch_is_refused():
    with pytest.raises(ValueError, match="names them otherwise, give LossAccumulator"):
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


# ---- models whose loss is not one fused cross-entropy -----------------------------------------

ROWS = Dataset(8).rows
WHOLE = torch.utils.data.default_collate(ROWS)
SINGLE = [{name: x[None] for name, x in row.items()} for row in ROWS]


def stepped(model, batches):
    """Gradients and metrics of one step of these micro-batches."""
    acc = LossAccumulator(model)
    for batch in batches:
        acc.backward(model_loss(model, batch))
    acc.finish()
    return [p.grad for p in model.parameters() if p.requires_grad], acc.metrics()


def warned(caplog):
    return [r.getMessage() for r in caplog.records if "counts the tokens" in r.getMessage()]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: replace_loss_head(Means(shift=0)), "_log_softmax.default at .*py"),
        (lambda: replace_loss_head(Means(shift=1)), "_log_softmax.default at .*py"),
        (lambda: replace_loss_head(dora()), r"aten.* at .*\.py"),
        (llama, r"call fusedce.replace_loss_head\(model\) before DDP"),
    ],
)
def test_a_loss_that_is_not_fused_is_counted(make, why, caplog):
    """One step of single rows is one of the whole batch; one warning, and the report says why."""
    model = make()
    grads, metrics = stepped(model, SINGLE)
    (warning,) = warned(caplog)
    assert "saves no memory" in warning
    assert "approximate" not in warning
    assert re.search(why, warning)
    assert re.search(why, str(head_report(model)))
    assert model.training
    one = make()
    loss = one(**WHOLE).loss
    loss.backward()
    assert metrics["loss"] == pytest.approx(float(loss), rel=10 * SAME_MODEL)
    for p, grad in zip([p for p in one.parameters() if p.requires_grad], grads, strict=True):
        assert distance(grad, p.grad) <= 10 * SAME_MODEL


def test_a_model_that_has_no_output_head_is_counted(caplog):
    model = classifier()
    data = Documents()
    stepped(model, [{name: x[None] for name, x in row.items()} for row in data.rows])
    (warning,) = warned(caplog)
    assert "no output embeddings" in warning
    assert "no output embeddings" in str(head_report(model))
    assert "labels" not in str(head_report(restore_loss_head(model)))


@pytest.mark.parametrize("make", [Means, MaskedMean])
def test_a_batch_without_labels_adds_nothing(make):
    """Neither to the loss nor, where its own mean is 0/0, to gradients."""
    empty = {**SINGLE[0], "labels": torch.full_like(SINGLE[0]["labels"], -100)}
    grads, metrics = stepped(make(), [SINGLE[1], empty])
    exact, without = stepped(make(), SINGLE[1:2])
    assert metrics["loss"] == without["loss"]
    for grad, other in zip(grads, exact, strict=True):
        assert torch.equal(grad, other)


def test_labels_that_are_ignored_by_another_number_are_not_counted():
    """The mean of a loss that reads ``labels >= 0`` is not one over all that are not -100."""

    class OfPositive(MaskedMean):
        def forward(self, input_ids, labels=None):
            return super().forward(input_ids, labels.masked_fill(labels < 0, -100))

    model, ids = OfPositive(), WHOLE["input_ids"]
    model_loss(model, {"input_ids": ids, "labels": ids})  # of which all count
    padded = ids.clone()
    padded[:, 2:] = -1
    with pytest.raises(ValueError, match="must be -100 where they do not count, got -1"):
        model_loss(model, {"input_ids": ids, "labels": padded})


def test_a_loss_that_takes_no_label_of_minus_100_is_refused():
    class Ignores(Means):
        def forward(self, input_ids, labels):
            logits = self.lm_head(self.body(input_ids)).mT
            return (F.cross_entropy(logits, labels, ignore_index=-1),)

    with pytest.raises(ValueError, match="Ignores takes no label of -100"):
        model_loss(Ignores(), {"input_ids": WHOLE["input_ids"], "labels": WHOLE["input_ids"]})


def test_labels_by_another_name_are_counted_anew():
    model, ids = llama(), WHOLE["input_ids"]
    shifted = {"input_ids": ids, "labels": ids, "shift_labels": shift_labels(ids)}
    for batch in (shifted, {"input_ids": ids, "labels": ids}):
        assert int(model_loss(model, batch).n_valid) == ids.numel() - len(ids)


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_the_first_call_runs_the_model_as_often_for_every_length(n):
    """Where FSDP shards it, each forward pass has collectives, and ranks have other lengths."""
    model, passes = llama(), []
    model.register_forward_hook(lambda *_: passes.append(n))
    ids = torch.arange(n)[None]
    out = model_loss(model, {"input_ids": ids, "labels": ids})
    assert len(passes) == 7  # in training, in evaluation, four of other labels, and the loss
    assert out.n_valid == n - 1


def test_a_batch_of_one_position_tells_nothing_about_the_others(caplog):
    """Without gradients it looks like generation, whose head computes logits."""
    model, (batch, *_) = replace_loss_head(llama()), micro_batches(0)
    with torch.no_grad():
        assert int(model_loss(model, {name: x[:, :1] for name, x in batch.items()}).n_valid) == 0
    model_loss(model, batch).loss_sum.backward()
    assert head_report(model).losses_fused
    assert "counted by" not in caplog.text
    assert not head_report(model).notes


def test_a_loss_that_is_a_sum_is_refused():
    with pytest.raises(ValueError, match="is a sum over its labels"):
        model_loss(Means(reduction="sum"), WHOLE)


def test_a_model_that_returns_a_tuple_returns_its_loss_first():
    batch = micro_batches(0)[1]
    out = model_loss(replace_loss_head(llama()), {**batch, "return_dict": False})
    assert float(out.mean()) == pytest.approx(float(llama()(**batch).loss), rel=SAME_MODEL)


@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.parametrize("order", ["logits, loss", "loss alone"])
def test_a_model_that_returns_its_loss_last_or_alone(order, replaced):
    """As nanoGPT's: ``fusedce audit`` says to write ``model_loss`` for such a model."""

    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = replace_loss_head(llama()) if replaced else llama()

        def forward(self, **batch):
            out = self.inner(**batch)
            return out.loss if order == "loss alone" else (out.logits, out.loss)

    batch = micro_batches(0)[0]
    found = model_loss(Returning(), batch)
    assert found.n_valid == 4
    torch.testing.assert_close(found.mean(), llama()(**batch).loss, rtol=SAME_MODEL, atol=0)


def test_modules_in_evaluation_stay_so():
    model = Means()
    model.body.eval()
    model_loss(model, WHOLE)
    assert model.training
    assert not model.body.training


def test_two_ranks_count_alike():
    def both(rank):
        accelerator(rank)
        model = nn.parallel.DistributedDataParallel(Means())
        grads, metrics = stepped(model, SINGLE[rank::2])
        return grads, metrics["loss"], str(head_report(model.module))

    one, loss = stepped(Means(), SINGLE)
    for grads, of_rank, report in ranks.shared({"both": both})("both"):
        assert of_rank == pytest.approx(loss["loss"], rel=10 * SAME_MODEL)
        assert "counts the tokens" in report
        for mine, exact in zip(grads, one, strict=True):
            assert distance(mine, exact) <= 10 * SAME_MODEL


LOSSES = {"main": 1, "next2": 0.3}


def test_several_fused_losses_are_approximate_and_the_exact_way_is_named(caplog):
    model = replace_loss_head(TwoLosses())
    out = model_loss(model, WHOLE)
    assert float(out.mean()) == pytest.approx(float(TwoLosses()(**WHOLE).loss), rel=SAME_MODEL)
    (warning,) = warned(caplog)
    assert "2 fused losses" in warning
    assert "their weights are approximate" in warning
    assert "model_loss(model, batch, losses=" in warning


def test_a_second_loss_in_training_alone_is_seen(caplog):
    """As models that predict further tokens while they train have it; evaluation has one loss."""

    class InTraining(TwoLosses):
        def forward(self, input_ids, labels=None):
            if self.training:
                return super().forward(input_ids, labels)
            logits = self.lm_head(self.body(input_ids))
            return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

    model = replace_loss_head(InTraining())
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        calls.clear()
        out = model_loss(model, WHOLE)
        assert float(out.mean()) == pytest.approx(float(TwoLosses()(**WHOLE).loss), rel=SAME_MODEL)
    assert len(calls) == 1  # what the first call found out is known
    (warning,) = warned(caplog)
    assert "2 fused losses" in warning


def test_weights_of_both_signs_are_compared_by_the_size_of_their_terms():
    """Losses that nearly cancel have a rounding of their own size, in the model's own order."""

    class Difference(Means):
        def forward(self, input_ids, labels=None):
            logits = self.scale * self.lm_head(self.body(input_ids))[:, :-1].flatten(0, 1)
            a, b, c = (F.cross_entropy(logits, labels[:, 1:].flatten()) for _ in range(3))
            return {"loss": 0.7 * b - 1.7 * c + a, "other order": (a + 0.7 * b) - 1.7 * c}

    weights, orders_differ = {"a": 1, "b": 0.7, "c": -1.7}, 0
    for scale in torch.linspace(0.5, 1.5, 8).tolist():
        model = replace_loss_head(Difference())
        model.scale = scale
        assert model_loss(model, WHOLE, losses=weights).keys() == {*weights}
        loss, other = model(**WHOLE).values()
        orders_differ += float(loss) != float(other)
    assert orders_differ


def test_several_losses_by_name_are_each_divided_by_their_own_tokens():
    """Equal to the weighted sum of the token means of all rows, in the whole batch."""
    model = replace_loss_head(TwoLosses())
    acc = LossAccumulator(model, losses=LOSSES)
    counts = {
        name: [fusedce.count_valid(b["labels"], offset=n) for b in SINGLE]
        for n, name in enumerate(LOSSES, 1)
    }
    with acc.window(**counts):
        for batch in SINGLE:
            acc.backward(**model_loss(model, batch, losses=LOSSES))
    one = TwoLosses()
    loss = one(**WHOLE).loss
    loss.backward()
    metrics = acc.metrics()
    assert metrics["loss"] == pytest.approx(float(loss), rel=10 * SAME_MODEL)
    assert metrics["next2/n_tokens"] == sum(map(int, counts["next2"]))
    for p, exact in zip(model.parameters(), one.parameters(), strict=True):
        assert distance(p.grad, exact.grad) <= 10 * SAME_MODEL
    assert head_report(model).logits_made == 0


class OnlyTheLoss(TwoLosses):
    def forward(self, **batch):
        return {"loss": super().forward(**batch).loss}


def of_a_sharded_model(rank):
    model = replace_loss_head(OnlyTheLoss())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    acc = LossAccumulator(model, losses=LOSSES)
    mine = SINGLE[rank::2]
    main, ahead = ([fusedce.count_valid(b["labels"], offset=n) for b in mine] for n in (1, 2))
    with acc.window(main=main, next2=ahead):
        for batch in mine:
            acc.backward(**model_loss(model, batch, losses=LOSSES))
    return [p.grad.full_tensor() for p in model.parameters()]


@FSDP2_MEAN
def test_several_losses_of_a_model_that_fsdp_shards_and_that_returns_its_loss_alone():
    """FSDP2 gathers the weights of the root when a gradient reaches what the model returned."""
    one = TwoLosses()
    one(**WHOLE).loss.backward()
    for grads in ranks.shared({"sharded": of_a_sharded_model})("sharded"):
        for mine, exact in zip(grads, one.parameters(), strict=True):
            assert distance(mine, exact.grad) <= 10 * SAME_MODEL


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (
            {"main": 1, "next2": 0.5},
            "would be .*, but it is .*: it has other weights",
        ),
        ({"main": 1}, "2 fused losses were seen, and losses= names 1"),
        ({"main": 1, "next2": 0.3, "next3": 1}, "2 fused losses were seen, and losses= names 3"),
    ],
)
def test_losses_that_are_not_the_models_are_refused(losses, words):
    with pytest.raises(ValueError, match=words):
        model_loss(replace_loss_head(TwoLosses()), WHOLE, losses=losses)
