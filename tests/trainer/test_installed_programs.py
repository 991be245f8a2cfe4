"""Programs nobody here wrote: those that TRL installs, beside the same with ours.

Losses, norms of gradients and what else is logged, and the trained parameters, are the stock
program's; the report says that no logits were made.
"""

import importlib
import json

import datasets
import pytest
import torch
import trl
from support.tiny_trainer import CLOSE, OF_PARAMETERS, V, llama, logs_of, word_tokenizer
from support.versions import trl_1_16
from transformers import LlamaForCausalLM

import fusedce
from fusedce.trainer_rl import FusedPolicyMixin

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
    "dpo": "",
    "dpo, APO": "--loss_type apo_zero",
    "dpo, LoRA and a trained head": f"{LORA} --lora_modules_to_save lm_head",
    "kto": "",
    "dpo, weighted": "--use_weighting True",
    "grpo": "",
    "grpo, uncertain tokens": "--top_entropy_quantile 0.5",
    "grpo, GSPO": "--loss_type grpo --importance_sampling_level sequence",
    "grpo, CISPO": "--loss_type cispo --epsilon_high 2.0",
    "rloo": "",
}
OF_GRPO = (
    "--reward_funcs trainer_rewards.different_words --num_generations 4 --beta 0.05 "
    "--max_completion_length 6 --per_device_train_batch_size 4 --temperature 0.9"
)


def words(n, seed):
    return " ".join(f"w{(7 * seed + 3 * i) % (V - 3)}" for i in range(n))


def rows(name):
    """What each program reads, of answers of different lengths."""
    for i in range(8):
        prompt, good, bad = words(3, i), " " + words(2 + i, i + 1), " " + words(9 - i, i)
        if name.startswith("sft"):
            pair = {"prompt": prompt, "completion": good}
            yield pair if "completions" in name else {"text": words(3 + 4 * (i % 4), i)}
        elif name.startswith("dpo"):
            yield {"prompt": prompt, "chosen": good, "rejected": bad}
        elif name.startswith("kto"):
            yield {"prompt": prompt, "completion": good, "label": i % 2 == 0}
        else:
            yield {"prompt": prompt}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model, its tokenizer and a reward, in the working directory."""
    llama(pad_token_id=0).save_pretrained(tmp_path / "model")
    word_tokenizer(V - 3).save_pretrained(tmp_path / "model")
    reward = "def different_words(completions, **_):\n"
    reward += "    return [float(len(set(c.split()))) for c in completions]\n"
    (tmp_path / "trainer_rewards.py").write_text(reward)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def run(name, folder, mixin, monkeypatch, *, replaced=False):
    """What a program logs without times, the trained parameters, and the head's report."""
    program = name.split(",")[0]
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows(name))))
    trainers = []
    stock = getattr(trl, f"{program.upper()}Trainer")

    class Seen(*([mixin] if mixin else []), stock):
        def __init__(self, *args, **kwargs):
            if replaced:
                model = LlamaForCausalLM.from_pretrained(kwargs["model"])
                kwargs["model"] = fusedce.replace_loss_head(model)
            super().__init__(*args, **kwargs)
            trainers.append(self)

    Seen.__name__ = stock.__name__
    arguments = (
        f"--model_name_or_path {folder}/model --dataset_name {folder}/data "
        f"--output_dir {folder}/out --dtype float32 --max_steps 2 --per_device_train_batch_size 2 "
        "--learning_rate 0.3 --optim sgd --lr_scheduler_type constant --logging_steps 1 "
        "--report_to none --use_cpu --bf16 False --gradient_checkpointing False "
        "--disable_tqdm True --save_strategy no --max_grad_norm 0 "
        f"{OF_GRPO if program in ('grpo', 'rloo') else ''} {PROGRAMS[name]}"
    )
    script = importlib.import_module(f"trl.scripts.{program}")
    torch.manual_seed(0)
    parsed = script.make_parser().parse_args_and_config(arguments.split())
    with monkeypatch.context() as patched:
        patched.setattr(trl, stock.__name__, Seen)
        script.main(*parsed[:4])
    (trainer,) = trainers
    if program == "sft":
        trainer.evaluate(trainer.train_dataset)
    model = trainer.accelerator.unwrap_model(trainer.model)
    return logs_of(trainer), dict(model.named_parameters()), fusedce.head_report(model)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_trl(name, folder, monkeypatch):
    trl_1_16()
    mixin = fusedce.FusedTrainerMixin if name.startswith("sft") else FusedPolicyMixin
    stock_logs, stock, _ = run(name, folder, None, monkeypatch)
    logs, ours, report = run(name, folder, mixin, monkeypatch)
    assert len(logs) == len(stock_logs) >= 3  # two steps and the summary
    for mine, exact in zip(logs, stock_logs, strict=True):
        assert mine.keys() == exact.keys()
        if name.startswith("sft"):  # the run's loss: over its tokens here, over its steps there
            mine.pop("train_loss", None), exact.pop("train_loss", None)
        for key in mine:
            value = exact[key]
            assert mine[key] == pytest.approx(value, **CLOSE), key
    assert stock_logs[0]["grad_norm"] > 1e-3
    torch.testing.assert_close(ours, stock, **OF_PARAMETERS)
    assert report.active
    assert report.losses_fused >= 2
    if not name.startswith("sft"):
        assert "FusedPolicyMixin computes" in str(report)
    assert report.logits_made == 0 or name.startswith(("grpo", "rloo")), report  # samples


@pytest.mark.parametrize("name", ["dpo", "dpo, LoRA and a trained head", "kto", "rloo", "grpo"])
def test_a_replaced_head_without_the_mixin_is_said_to_be_idle(name, folder, monkeypatch):
    trl_1_16()
    with pytest.warns(UserWarning, match="TRL has installed a fused head .*Trainer"):
        *_, report = run(name, folder, None, monkeypatch, replaced=True)
    assert report.losses_fused == 0
    assert "never the replaced one" in str(report)
