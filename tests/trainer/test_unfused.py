"""Where the loss is not one fused loss, the mixin counts tokens all the same, and says so."""

import logging

import pytest
import torch
from support.bounds import SAME_MODEL
from support.tiny_trainer import (
    Dataset,
    FusedTrainer,
    arguments,
    llama,
    train,
)
from support.unfused import (
    Attended,
    MeanOfRows,
    Means,
)

from fusedce import head_report, replace_loss_head
from fusedce.head.model_loss import find_label_count

DATA = Dataset(8)


def one_and_many(make, tmp_path, caplog, data=DATA, **kwargs):
    """Losses and norms of one batch of 8, and of 8 micro-batches of one row."""
    outcomes = []
    for size, steps in ((8, 1), (1, 8)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="fusedce.head.model_loss"):
            trainer, losses, seen, _ = train(
                FusedTrainer, make(), arguments(tmp_path, size, steps), train_dataset=data,
                eval_dataset=data, **kwargs,
            )  # fmt: skip
        outcomes.append((losses, seen.norms, trainer))
    warnings = [r.getMessage() for r in caplog.records if "counts the tokens" in r.getMessage()]
    assert len(warnings) == 1  # once
    return *outcomes, warnings[0]


@pytest.mark.parametrize("shift", [0, 1])
def test_a_loss_of_other_code(tmp_path, caplog, shift):
    """Micro-batches train as one batch; loss, gradient and evaluation are the token mean's."""
    one, many, warning = one_and_many(lambda: Means(shift=shift), tmp_path, caplog)
    assert many[0] == pytest.approx(one[0], rel=10 * SAME_MODEL)
    assert many[1] == pytest.approx(one[1], rel=100 * SAME_MODEL)
    batch = torch.utils.data.default_collate(DATA.rows)
    assert many[0][0] == pytest.approx(float(Means(shift=shift)(**batch).loss), rel=SAME_MODEL)
    assert "saves no memory" in warning
    assert "approximate" not in warning
    for size in (1, 3, 8):
        args = arguments(tmp_path, per_device_eval_batch_size=size)
        logs = FusedTrainer(model=Means(shift=shift), args=args, eval_dataset=DATA).evaluate()
        assert logs["eval_loss"] == pytest.approx(many[0][0], rel=SAME_MODEL)


@pytest.mark.parametrize("make", [lambda: Means(terms=3), MeanOfRows])
def test_what_is_no_mean_over_the_labels_alone_is_called_approximate(tmp_path, caplog, make):
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    with caplog.at_level(logging.WARNING, logger="fusedce.head.model_loss"):
        train(FusedTrainer, make(), arguments(tmp_path, **batch), train_dataset=DATA)
    (warning,) = [x for x in map(str, caplog.messages) if "counts the tokens" in x]
    assert "their weights are approximate" in warning


def test_a_fused_loss_is_not_counted_by_labels(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="fusedce.head.model_loss"):
        train(FusedTrainer, llama(), arguments(tmp_path))
    assert "counts the tokens" not in caplog.text


@pytest.mark.parametrize("padding", [3, 9])  # of each of four rows
def test_a_fused_loss_that_leaves_padding_out_by_itself(tmp_path, padding):
    data = Dataset(4)
    for row in data.rows:
        row["attention_mask"] = torch.arange(12) < 12 - padding
        row["labels"] = row["input_ids"].where(row["attention_mask"], -100)
    data.rows[0] = {**Dataset(1, seed=2).rows[0], "attention_mask": torch.ones(12)}
    trainer, losses, *_ = train(FusedTrainer, Attended(), arguments(tmp_path), train_dataset=data)
    batch = torch.utils.data.default_collate(data.rows)
    assert losses[0] == pytest.approx(float(Attended()(**batch).loss), rel=SAME_MODEL)
    assert head_report(trainer.model).logits_made == 0


@pytest.mark.parametrize("padding", [0, 3])
def test_every_batch_takes_as_many_forwards_to_tell_the_shift(padding):
    """Ranks that come together in a forward have batches of their own."""
    ids = torch.arange(24).view(4, 6) % 10
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones(4, 6)}
    batch["attention_mask"][:3, 6 - padding :] = 0
    model, calls = Attended(), []
    replace_loss_head(model)
    model.register_forward_hook(lambda *_: calls.append(1))
    assert find_label_count(model, batch).shift == 1
    assert len(calls) == 2


def test_a_head_that_a_later_run_cannot_fuse_is_counted(tmp_path, caplog):
    """A second run of one trainer finds out again what its model's loss is."""
    trainer, *_ = train(FusedTrainer, llama(), arguments(tmp_path))
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["lm_head"])
    peft.inject_adapter_in_model(config, trainer.model)
    with caplog.at_level(logging.WARNING, logger="fusedce.head.model_loss"):
        trainer.train()
    assert "counts the tokens" in caplog.text
