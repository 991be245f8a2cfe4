"""Encoder-decoders under the mixin: T5's and Whisper's recipe with ``predict_with_generate``."""

import pytest
import torch
from support.bounds import SAME_MODEL
from support.tiny_trainer import V, bart, train
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config
from transformers import T5ForConditionalGeneration as T5

from fusedce import FusedTrainerMixin, head_report, restore_loss_head


class FusedSeq2SeqTrainer(FusedTrainerMixin, Seq2SeqTrainer):
    pass


def t5():
    torch.manual_seed(0)
    model = T5(
        T5Config(
            vocab_size=V, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():  # losses far from each other
        model.lm_head.weight.mul_(3)
    return model


def rows(n=7):
    rng = torch.Generator().manual_seed(2)
    found = []
    for i in range(n):
        labels = torch.randint(3, V, (8,), generator=rng)
        labels[1 + (3 * i) % 8 :] = -100
        found.append({"input_ids": torch.randint(3, V, (6,), generator=rng), "labels": labels})
    return found


def arguments(folder, **kwargs):
    return Seq2SeqTrainingArguments(
        **{
            "output_dir": str(folder), "predict_with_generate": True, "generation_max_length": 9,
            "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "max_steps": 2,
            "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
            "disable_tqdm": True, "max_grad_norm": 0, "dataloader_pin_memory": False,
        } | kwargs
    )  # fmt: skip


def token_mean(model, data):
    total = count = 0
    for row in data:
        n = int(row["labels"].ne(-100).sum())
        with torch.no_grad():
            out = model.eval()(**{name: x[None] for name, x in row.items()})
        total, count = total + n * float(out.loss), count + n
    return total / count


def evaluated(kind, model, folder, size):
    seen = []
    args = arguments(folder, per_device_eval_batch_size=size)
    trainer = kind(
        model=model, args=args, eval_dataset=rows(),
        compute_metrics=lambda p: {"rows": len(seen.append(p.predictions) or p.predictions)},
    )  # fmt: skip
    return trainer.evaluate(), seen[0], trainer


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_generation_and_the_token_mean(make, size, tmp_path):
    """Whatever the batch; what is generated and its metrics are the stock trainer's."""
    exact = token_mean(make(), rows())
    logs, predictions, trainer = evaluated(FusedSeq2SeqTrainer, make(), tmp_path, size)
    assert logs["eval_loss"] == pytest.approx(exact, rel=SAME_MODEL)
    stock, theirs, _ = evaluated(Seq2SeqTrainer, make(), tmp_path, size)
    assert (predictions == theirs).all()
    assert logs["eval_rows"] == stock["eval_rows"] == 7
    if size == 1:  # a mean of the rows' means
        assert abs(stock["eval_loss"] - exact) > 1e-3
    assert head_report(trainer.model).losses_fused == -(-7 // size)


@pytest.mark.parametrize("make", [t5, bart])
def test_accumulated_micro_batches_are_one_batch(make, tmp_path):
    data = rows(8)
    _, one, of_one, _ = train(
        FusedSeq2SeqTrainer, make(), train_dataset=data,
        args=arguments(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=1),
    )  # fmt: skip
    _, four, of_four, _ = train(
        FusedSeq2SeqTrainer, make(), args=arguments(tmp_path), train_dataset=data
    )
    assert four == pytest.approx(one, rel=10 * SAME_MODEL)
    assert of_four.norms == pytest.approx(of_one.norms, rel=100 * SAME_MODEL)


def test_statistics_of_tokens_with_generation(tmp_path):
    class Counting(FusedSeq2SeqTrainer):
        log_token_stats = True

    by_size = [evaluated(Counting, t5(), tmp_path, size)[0] for size in (1, 7)]
    for name in ("eval_entropy", "eval_mean_token_accuracy"):
        assert by_size[0][name] == pytest.approx(by_size[1][name], rel=10 * SAME_MODEL)


def test_evaluation_after_training_counts_rows_of_one_label(tmp_path):
    """A decoder of one position looks like generation, whose head computes logits."""
    model, data = t5(), rows()
    for row, n in zip(data, [1, 6, 1, 4, 1, 5, 2], strict=True):
        row["labels"] = row["labels"].clamp(min=3)[:n]
    args = arguments(tmp_path, predict_with_generate=False, per_device_eval_batch_size=1)
    trainer, *_ = train(FusedSeq2SeqTrainer, model, args, train_dataset=rows(), eval_dataset=data)
    got = trainer.evaluate()["eval_loss"]
    model = trainer.model
    assert got == pytest.approx(token_mean(restore_loss_head(model), data), rel=SAME_MODEL)
