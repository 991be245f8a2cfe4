"""TRL's SFTTrainer with the mixin, and with a replaced head alone."""

import datasets
import pytest
import torch
import trl
from support.bounds import SAME_MODEL
from support.tiny_trainer import V, logs_of, mixtral, word_tokenizer
from support.tiny_trainer import llama as without_padding
from support.unfused import unfused
from support.versions import trl_1_16

from fusedce import FusedTrainerMixin, head_report, replace_loss_head


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(V - 3)


def llama():
    return without_padding(pad_token_id=0)


def text(n, seed):
    ids = torch.randint(3, V, (n,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i - 3}" for i in ids.tolist())


def sft(tokenizer, tmp_path, model, *, mixin=True, size=8, steps=1, **kwargs):
    data = [{"text": text(3 + 5 * (i % 4), i)} for i in range(8)]

    class FusedSFT(FusedTrainerMixin, trl.SFTTrainer):
        pass

    args = trl.SFTConfig(
        **{
            "output_dir": str(tmp_path), "per_device_train_batch_size": size,
            "gradient_accumulation_steps": steps, "max_steps": 2, "learning_rate": 1e-2,
            "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no",
            "disable_tqdm": True, "lr_scheduler_type": "constant", "max_length": 32,
            "dataloader_pin_memory": False, "gradient_checkpointing": False, "bf16": False,
            "shuffle_dataset": False, "loss_type": "nll",
        } | kwargs
    )  # fmt: skip
    trainer = (FusedSFT if mixin else trl.SFTTrainer)(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_sft_logs_the_auxiliary_loss_of_a_router(tokenizer, tmp_path):
    trl_1_16()

    def logged(mixin):
        trainer, _ = sft(tokenizer, tmp_path, mixtral(), mixin=mixin, size=4, steps=2)
        return [log["aux_loss"] for log in trainer.state.log_history if "aux_loss" in log]

    stock = logged(False)
    assert len(stock) == 2
    torch.testing.assert_close(logged(True), stock, rtol=8 * SAME_MODEL, atol=0)


def test_trl_head_is_said_to_be_replaced(tokenizer, tmp_path, caplog):
    sft(tokenizer, tmp_path, llama())
    assert any("replaces the fused head of TRL" in r.getMessage() for r in caplog.records)


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated")
@pytest.mark.parametrize("kwargs", [{"loss_type": "dft"}, {"label_smoothing_factor": 0.2}])
def test_dynamic_fine_tuning_and_label_smoothing_are_trls(tokenizer, tmp_path, kwargs):
    """In one micro-batch and in two: losses, gradients, statistics and evaluation are TRL's."""
    trl_1_16()

    def logs(mixin, steps):
        model = llama()
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
        trainer, _ = sft(
            tokenizer, tmp_path, model, mixin=mixin, size=8 // steps, steps=steps, **kwargs
        )
        trainer.evaluate(trainer.train_dataset)
        return logs_of(trainer), head_report(trainer.accelerator.unwrap_model(trainer.model))

    for steps in (1, 2):
        stock, _ = logs(False, steps)
        ours, report = logs(True, steps)
        assert len(ours) == len(stock) == 4
        for mine, theirs in zip(ours, stock, strict=True):
            mine.pop("train_loss", None), theirs.pop("train_loss", None)
            assert mine == pytest.approx(theirs, rel=1e3 * SAME_MODEL)
        assert report.logits_made == 0
    plain, _ = sft(tokenizer, tmp_path, llama())
    assert abs(plain.state.log_history[0]["loss"] - stock[0]["loss"]) > 0.01


def test_dynamic_fine_tuning_of_a_loss_that_is_not_fused_is_refused(tokenizer, tmp_path):
    """It would be trained without the factor of each token."""
    trl_1_16()
    with pytest.raises(ValueError, match="loss_type='dft' needs a fused loss, but fusedce counts"):
        sft(tokenizer, tmp_path, unfused(llama()), loss_type="dft")


def test_stock_sft_trainer_ignores_a_replaced_head(tokenizer, tmp_path, no_logits):
    """TRL's own head takes the weight and never runs ours: the same loss, and nothing breaks."""
    trl_1_16()
    _, plain = sft(tokenizer, tmp_path, llama(), mixin=False)
    model = replace_loss_head(llama())
    words = "TRL has installed a fused head of its own .*FusedTrainerMixin"
    with pytest.warns(UserWarning, match=words):
        _, replaced = sft(tokenizer, tmp_path, model, mixin=False)
    assert replaced == plain
    assert "TRL has installed a fused head of its own" in str(head_report(model))
