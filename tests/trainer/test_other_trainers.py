"""The mixin beside losses of their own: of users, of TRL's trainers, and of Liger's patches."""

import importlib
import sys
import types

import pytest
import torch.nn.functional as F
from support.bounds import SAME_MODEL
from support.tiny_trainer import (
    Dataset,
    FusedTrainer,
    arguments,
    llama,
    sharpened,
    train,
)
from transformers import Trainer

from fusedce import FusedTrainerMixin

# ---- compute_loss of a user ------------------------------------------------------------------


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


# ---- trainers of TRL -------------------------------------------------------------------------

HOMES = {
    "GKDTrainer": "trl.experimental.gkd",
    "GOLDTrainer": "trl.experimental.gold",
    "DistillationTrainer": "trl",
    "DPOTrainer": "trl",
}


def trainer(name):
    try:
        return getattr(importlib.import_module(HOMES[name]), name)
    except (ImportError, AttributeError) as error:
        pytest.skip(f"this TRL has no {name}: {error}")


@pytest.mark.filterwarnings("ignore")  # TRL's, of experimental trainers
@pytest.mark.parametrize("name", ["GKDTrainer", "GOLDTrainer", "DistillationTrainer", "DPOTrainer"])
def test_a_trainer_of_trl_with_another_loss_is_refused_when_the_class_is_made(name):
    """Behind the mixin it would train cross-entropy, where it distils alone."""
    base = trainer(name)
    with pytest.raises(TypeError, match=rf"{name} has a compute_loss.*leave the mixin out"):
        type("Both", (FusedTrainerMixin, base), {})


# ---- Liger --------------------------------------------------------------------------------------


def ligers(model):
    """A stand-in for Liger's patch: while training, the loss bypasses head and F.cross_entropy."""
    stock = model.forward

    def forward(self, input_ids=None, labels=None, **kwargs):
        if not self.training:
            return stock(input_ids=input_ids, labels=labels, **kwargs)
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = hidden[:, :-1] @ self.lm_head.weight.t()
        loss = F.nll_loss(logits.log_softmax(-1).flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss}

    model.forward = types.MethodType(forward, model)
    return model


def test_a_model_that_liger_has_patched_is_named_at_the_first_step(tmp_path):
    args = arguments(tmp_path, 2, 2, max_steps=5, logging_steps=5)
    made = FusedTrainer(model=ligers(llama()), args=args, train_dataset=Dataset(8))
    with pytest.raises(RuntimeError, match=r"no token was counted.*patched by Liger"):
        made.train()
    assert made.state.global_step == 0


def test_ligers_switch_is_named(tmp_path, monkeypatch):
    stub = types.ModuleType("liger_kernel.transformers")
    stub._apply_liger_kernel_to_instance = lambda model, **_: ligers(model)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stub)
    for name in ("transformers.integrations.liger", "transformers.trainer", "transformers.utils"):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "is_liger_kernel_available", lambda: True, raising=False)
    args = arguments(tmp_path, 2, 2, max_steps=1)
    args.use_liger_kernel = True
    with pytest.raises(ValueError, match=r"use_liger_kernel=True patches .* Liger's fused loss"):
        FusedTrainer(model=llama(), args=args, train_dataset=Dataset(8))
