"""The mixin beside a user's own ``compute_loss``, and in the wrong place among the bases."""

import pytest
import torch
from support.bounds import SAME_MODEL, STATISTIC

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from support.tiny_trainer import (
    Dataset,
    FusedTrainer,
    arguments,
    llama,
    sharpened,
    train,
    true_mean,
)
from transformers import Trainer

from fusedce import FusedTrainerMixin


class Tripled(Trainer):
    """A loss of a user, behind the mixin."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = 3 * model(**inputs).loss
        return (loss, None) if return_outputs else loss


def test_a_users_own_compute_loss_behind_the_mixin_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"Tripled.*compute_loss.*would never run"):

        class Both(FusedTrainerMixin, Tripled):
            pass


def test_a_users_own_compute_loss_before_the_mixin_runs(tmp_path):
    class Doubled(FusedTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            return 2 * super().compute_loss(model, inputs, **kwargs)

    norms = []
    for kind in (FusedTrainer, Doubled):
        args = arguments(tmp_path, 4, 2, max_steps=1)
        norms.append(train(kind, sharpened(), args)[2].norms[0])
    assert norms[1] == pytest.approx(2 * norms[0], rel=SAME_MODEL)


def test_a_users_own_compute_loss_that_calls_nothing_of_ours_is_refused_when_it_trains(tmp_path):
    class Own(FusedTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).logits.square().mean()

    with pytest.raises(RuntimeError, match=r"Own.compute_loss.*super\(\).compute_loss"):
        train(Own, llama(), arguments(tmp_path, max_steps=2))


def test_the_wrong_order_of_bases_raises_when_the_class_is_made():
    with pytest.raises(TypeError, match=r"class Wrong\(FusedTrainerMixin, Trainer\)"):

        class Wrong(Trainer, FusedTrainerMixin):
            pass


def test_trls_trainer_is_no_user(tmp_path):
    trl = pytest.importorskip("trl")

    class Sft(FusedTrainerMixin, trl.SFTTrainer):
        pass

    assert issubclass(Sft, trl.SFTTrainer)


def test_evaluation_with_a_users_loss_before_the_mixin(tmp_path):
    class Same(FusedTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    exact = true_mean(sharpened(), Dataset(11))
    args = arguments(tmp_path, per_device_eval_batch_size=3)
    metrics = Same(model=sharpened(), args=args, eval_dataset=Dataset(11)).evaluate()
    assert metrics["eval_loss"] == pytest.approx(exact, rel=STATISTIC)
    assert isinstance(torch.tensor(metrics["eval_loss"]), torch.Tensor)
