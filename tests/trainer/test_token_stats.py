"""Token accuracy, entropy and tokens seen, logged by the stock Trainer where asked for."""

import pytest
import torch
from support.bounds import SAME_MODEL
from support.tiny_trainer import Dataset, arguments, sharpened, train
from transformers import Trainer

from fusedce import FusedTrainerMixin


class Logging(FusedTrainerMixin, Trainer):
    log_token_stats = True


def exact(model, data):
    """Accuracy and entropy over the labels of all rows, from logits."""
    batch = torch.utils.data.default_collate(data.rows)
    with torch.no_grad():
        log_p = model.eval()(**batch).logits[:, :-1].double().log_softmax(-1)
    labels = batch["labels"][:, 1:]
    valid = labels != -100
    entropy = -(log_p.exp() * log_p).sum(-1)[valid].mean()
    return float((log_p.argmax(-1) == labels)[valid].double().mean()), float(entropy)


def half_right(data):
    """Labels that the model finds likeliest, every second time."""
    batch = torch.utils.data.default_collate(data.rows)
    with torch.no_grad():
        likeliest = sharpened().eval()(batch["input_ids"]).logits.argmax(-1)
    for row, best in zip(data.rows, likeliest, strict=True):
        labels = row["labels"]
        labels[1::2] = torch.where(labels[1::2] == -100, -100, best[:-1:2])
    return data


@pytest.mark.parametrize("size", [16, 3])
def test_logged_over_all_tokens(size, tmp_path, request):
    """Sum over sum, of an optimizer step and of an evaluation, whatever the batches."""
    data = half_right(Dataset(15))
    accuracy, entropy = exact(sharpened(), data)
    request.getfixturevalue("no_logits")
    assert 0.2 < accuracy < 0.9  # some are right and some are not
    args = arguments(
        tmp_path, size if size < 16 else 15, 5 if size < 16 else 1, max_steps=2, learning_rate=0.0,
        per_device_eval_batch_size=size, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    _, _, seen, _ = train(Logging, sharpened(), args, train_dataset=data, eval_dataset=data)
    logs = [log for log in seen.logs if "loss" in log]
    (evaluated, _) = [log for log in seen.logs if "eval_loss" in log]
    assert [log["num_tokens"] for log in logs] == [15 * 12, 2 * 15 * 12]
    # accuracies are quotients in float64
    for log, prefix in [(logs[0], ""), (logs[1], ""), (evaluated, "eval_")]:
        assert log[f"{prefix}mean_token_accuracy"] == pytest.approx(accuracy, abs=1e-9)
        assert log[f"{prefix}entropy"] == pytest.approx(entropy, rel=SAME_MODEL)


def test_not_logged_where_not_asked_for(tmp_path):
    class Plain(FusedTrainerMixin, Trainer):
        pass

    _, _, seen, _ = train(Plain, sharpened(), arguments(tmp_path, max_steps=1))
    assert not any("entropy" in log or "num_tokens" in log for log in seen.logs)
