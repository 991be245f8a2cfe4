"""What the mixin finds before the first optimizer step, and the trainers that it stands before."""

import importlib
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_MODEL
from support.tiny_trainer import (
    Dataset,
    FusedTrainer,
    V,
    arguments,
    llama,
    sharpened,
    train,
)
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutput

from fusedce import FusedTrainerMixin, head_report

# ---- before the first optimizer step ----------------------------------------------------------


class OwnMean(FusedTrainer):
    """Divides by the tokens of its own micro-batch, and asks nobody."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        return (loss, None) if return_outputs else loss


@pytest.mark.parametrize("steps", [1, 2])
def test_a_wrong_compute_loss_is_found_before_the_first_step(tmp_path, steps):
    """Trainer's default is a log every 500 steps."""
    args = arguments(tmp_path, 2, steps, logging_steps=500, max_steps=2)
    made = OwnMean(model=llama(), args=args, train_dataset=Dataset())
    before = [p.detach().clone() for p in made.model.parameters()]
    with pytest.raises(RuntimeError, match=r"OwnMean.compute_loss must call super\(\)"):
        made.train()
    assert made.state.global_step == 0
    assert all(map(torch.equal, made.model.parameters(), before))


class Forgetting(FusedTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        return super().compute_loss(model, inputs, return_outputs)


def test_a_compute_loss_that_keeps_the_denominator_to_itself_is_told_so(tmp_path):
    made = Forgetting(model=llama(), args=arguments(tmp_path, 2, 2), train_dataset=Dataset())
    with pytest.raises(RuntimeError, match=r"counted 0 tokens .*and hand on num_items_in_batch"):
        made.train()


class Ignoring(torch.nn.Module):
    """Its cross-entropy ignores the label 0, as padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.lm_head = torch.nn.Embedding(V, 16), torch.nn.Linear(16, V)

    def forward(self, input_ids, labels):
        z = self.lm_head(self.body(input_ids))
        loss = F.cross_entropy(z[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=0)
        return CausalLMOutput(loss=loss, logits=z)


class Padded(Dataset):
    def __getitem__(self, i):
        row = self.rows[i]
        return {"input_ids": row["input_ids"], "labels": row["labels"].clamp(min=0)}


def test_a_model_that_ignores_another_label_is_named(tmp_path):
    args = arguments(tmp_path, 2, 2)
    made = FusedTrainer(model=Ignoring(), args=args, train_dataset=Padded())
    with pytest.raises(ValueError, match=r"Ignoring has ignore_index=0, but a trainer counts"):
        made.train()
    assert made.state.global_step == 0


# ---- Axolotl ------------------------------------------------------------------------------------


class AxolotlTrainer(Trainer):
    """As Axolotl's: counts tokens for its logs, changes inputs, and calls Trainer's."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if getattr(self.args, "orpo_alpha", None):
            raise AssertionError("another loss")
        if model.training:
            self.seen = getattr(self, "seen", 0) + int((inputs["labels"] != -100).sum())
        inputs["use_cache"] = False
        return super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)


AxolotlTrainer.__module__ = "axolotl.core.trainers.base"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_axolotls_trainer_counts_and_fuses(tmp_path, smoothing):
    """Its own ``compute_loss`` runs; loss, gradients and evaluation are those of the mixin."""

    class Both(FusedTrainerMixin, AxolotlTrainer):
        pass

    found = []
    for kind in (FusedTrainer, Both):
        args = arguments(tmp_path, 2, 2, label_smoothing_factor=smoothing)
        trainer, losses, seen, _ = train(kind, sharpened(), args)
        report = head_report(trainer.model)
        assert (report.losses_fused > 0, report.logits_made) == (True, 0)
        evaluated = trainer.evaluate(Dataset(8, seed=2))["eval_loss"]
        found.append([*losses, *seen.norms, evaluated])
    assert found[1] == pytest.approx(found[0], rel=8 * SAME_MODEL)
    assert trainer.seen > 0


def test_an_axolotl_trainer_with_another_loss_is_refused(tmp_path):
    class Distils(AxolotlTrainer):
        compute_loss = Trainer.compute_loss

    Distils.__module__ = "axolotl.integrations.kd.trainer"
    with pytest.raises(TypeError, match=r"Distils has a compute_loss.*leave the mixin out"):
        type("Both", (FusedTrainerMixin, Distils), {})
    kind = type("Both", (FusedTrainerMixin, AxolotlTrainer), {})
    args = arguments(tmp_path)
    args.orpo_alpha = 0.1
    with pytest.raises(ValueError, match="orpo_alpha asks for another loss"):
        kind(model=llama(), args=args, train_dataset=Dataset())


@pytest.mark.slow
def test_axolotls_real_trainer(tmp_path):
    """Runs where Axolotl is installed: it needs other versions than these tests pin."""
    base = pytest.importorskip("axolotl.core.trainers.base")
    of_args = pytest.importorskip("axolotl.core.training_args")
    rows = [{name: x.tolist() for name, x in row.items()} for row in Dataset().rows]
    data = pytest.importorskip("datasets").Dataset.from_list(rows)

    class Both(FusedTrainerMixin, base.AxolotlTrainer):
        pass

    found = []
    for kind in (FusedTrainer, Both):
        settings = arguments(tmp_path, 2, 2).to_dict()
        names = of_args.AxolotlTrainingArguments.__dataclass_fields__
        args = of_args.AxolotlTrainingArguments(
            **{k: v for k, v in settings.items() if k in names and not k.startswith("_")}
        )
        trainer, losses, seen, _ = train(kind, sharpened(), args, train_dataset=data)
        assert head_report(trainer.model).logits_made == 0
        found.append(losses + seen.norms)
    assert found[1] == pytest.approx(found[0], rel=8 * SAME_MODEL)


# ---- Liger's other kernels ----------------------------------------------------------------------

WITHOUT_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": False}


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (None, True),
        ({"rope": False}, True),
        ({"fused_linear_cross_entropy": False}, False),
        (WITHOUT_LOSS, False),
        (WITHOUT_LOSS | {"cross_entropy": True}, True),
    ],
)
def test_ligers_other_kernels_go_with_ours(tmp_path, monkeypatch, config, refused):
    """Its norms, activations and rotations, but not its losses."""
    asked = []
    stub = types.ModuleType("liger_kernel.transformers")
    stub._apply_liger_kernel_to_instance = lambda model, **given: asked.append(given)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stub)
    for name in ("transformers.integrations.liger", "transformers.trainer", "transformers.utils"):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "is_liger_kernel_available", lambda: True, raising=False)
    args = arguments(tmp_path, 2, 2, max_steps=1)
    args.use_liger_kernel, args.liger_kernel_config = True, config
    if refused:
        with pytest.raises(ValueError, match=r"keep Liger's other kernels by liger_kernel_config="):
            FusedTrainer(model=llama(), args=args, train_dataset=Dataset(8))
        return
    trainer, *_ = train(FusedTrainer, llama(), args)
    assert asked == [config]
    assert head_report(trainer.model).logits_made == 0


# ---- ranks that share a batch --------------------------------------------------------------------


class Accelerator:
    """That of a trainer on ranks that all hold the same numbers."""

    def __init__(self, accelerator, n):
        self.accelerator, self.num_processes = accelerator, n

    def reduce(self, x, reduction="sum"):
        assert reduction == "sum"
        return x * self.num_processes

    def __getattr__(self, name):
        return getattr(self.accelerator, name)


@pytest.mark.parametrize(
    ("n", "sizes", "batches", "averaged"),
    [
        (4, {}, 4, 4),
        (4, {"tp": 2}, 2, 2),  # two groups; each holds one batch, and one gradient
        (4, {"cp": 2}, 2, 4),  # a batch's positions are on two ranks, whose gradients are averaged
        (4, {"sp": 2}, 2, 4),
        (8, {"tp": 2, "cp": 2}, 2, 4),
        (8, {"tp": 2, "sp": 2}, 2, 4),
        (8, {"tp": 8}, 1, 1),
    ],
)
def test_ranks_that_share_a_batch_count_it_once(tmp_path, monkeypatch, n, sizes, batches, averaged):
    """The denominator: tokens of all batches, over micro-batches and averaged gradients."""
    monkeypatch.setattr(FusedTrainer, "log_token_stats", True)
    made = FusedTrainer(model=llama(), args=arguments(tmp_path), train_dataset=Dataset())
    made.accelerator = Accelerator(made.accelerator, n)
    for kind in ("tp", "cp", "sp"):
        monkeypatch.setattr(type(made), f"get_{kind}_size", lambda _, k=kind: sizes.get(k, 1))
    data = torch.utils.data.default_collate(Dataset().rows[:4])
    own = int((data["labels"][:, 1:] != -100).sum())
    items = made._get_num_items_in_batch([data, data], torch.device("cpu"))
    assert int(items) == 2 * own * batches
    made.current_gradient_accumulation_steps = 2
    model = made.model.train()
    loss = made.compute_loss(model, data, num_items_in_batch=items)
    total = model(**data).loss.detach() * own
    # Trainer divides by the micro-batches, and the engine averages over ranks.
    assert float(loss.detach()) / 2 / averaged == pytest.approx(
        float(total) / int(items), rel=SAME_MODEL
    )
    seen = made._stats.logged()["num_tokens"]
    assert seen == data["input_ids"].numel() * averaged  # this rank's, in each group
