"""Programs nobody here wrote: those that TRL installs, beside the same with ours.

Losses, norms of gradients and what else is logged, and the trained parameters, are the stock
program's; the report says that no logits were made.
"""

import importlib

import datasets
import pytest
import torch
import trl
from support.tiny_trainer import CLOSE, OF_PARAMETERS, logs_of
from support.trl_programs import arguments, write
from support.versions import trl_1_16

import fusedce

pytestmark = pytest.mark.slow

LORA = "--use_peft --lora_r 2 --lora_target_modules q_proj v_proj"
PROGRAMS = {
    "sft": "",
    "sft, packed": "--packing",
    "sft, padding-free": "--padding_free --max_length None",
    "sft, completions": "--completion_only_loss True",
    "sft, LoRA": LORA,
    "sft, LoRA and a trained head": f"{LORA} --lora_modules_to_save lm_head",
    "sft, accumulated": "--gradient_accumulation_steps 2",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model and its tokenizer, in the working directory."""
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def run(name, folder, mixin, monkeypatch):
    """What a program logs without times, the trained parameters, and the head's report."""
    trainers, stock = [], trl.SFTTrainer

    class Seen(*([mixin] if mixin else []), stock):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    Seen.__name__ = stock.__name__
    script = importlib.import_module("trl.scripts.sft")
    torch.manual_seed(0)
    given = arguments(name, folder, PROGRAMS[name])
    parsed = script.make_parser().parse_args_and_config(given)
    with monkeypatch.context() as patched:
        patched.setattr(trl, stock.__name__, Seen)
        script.main(*parsed[:4])
    (trainer,) = trainers
    trainer.evaluate(trainer.train_dataset)
    model = trainer.accelerator.unwrap_model(trainer.model)
    return logs_of(trainer), dict(model.named_parameters()), fusedce.head_report(model)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_trl(name, folder, monkeypatch):
    trl_1_16()
    stock_logs, stock, _ = run(name, folder, None, monkeypatch)
    logs, ours, report = run(name, folder, fusedce.FusedTrainerMixin, monkeypatch)
    assert len(logs) == len(stock_logs) >= 3  # two steps and the summary
    for mine, exact in zip(logs, stock_logs, strict=True):
        assert mine.keys() == exact.keys()
        # The run's loss: over its tokens here, over its steps there.
        mine.pop("train_loss", None), exact.pop("train_loss", None)
        for key in mine:
            value = exact[key]
            assert mine[key] == pytest.approx(value, **CLOSE), key
    assert stock_logs[0]["grad_norm"] > 1e-3
    torch.testing.assert_close(ours, stock, **OF_PARAMETERS)
    assert report.active
    assert report.losses_fused >= 2
    assert report.logits_made == 0, report
