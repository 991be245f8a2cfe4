"""The mixins over trainers with losses of their own, and over models that Liger has patched."""

import importlib
import sys
import types

import pytest
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from support.tiny_trainer import Dataset, FusedTrainer, arguments, llama

from fusedce import FusedTrainerMixin
from fusedce.trainer_rl import FusedPolicyMixin

HOMES = {
    "GKDTrainer": "trl.experimental.gkd",
    "GOLDTrainer": "trl.experimental.gold",
    "ORPOTrainer": "trl.experimental.orpo",
    "CPOTrainer": "trl.experimental.cpo",
    "DistillationTrainer": "trl",
    "DPOTrainer": "trl",
}


def trainer(name):
    pytest.importorskip("trl")
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["ORPOTrainer", "CPOTrainer", "GKDTrainer", "GOLDTrainer", "DistillationTrainer"]
)
def test_the_policy_mixin_says_where_it_would_fuse_nothing(name):
    both = type("Both", (FusedPolicyMixin, trainer(name)), {})
    with pytest.raises(TypeError, match=f"would fuse nothing in {name}.*FusedDistillationMixin"):
        both(model=llama())


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
