"""TRL's policy trainers with the mixin, beyond what its own programs ask for."""

import logging

import pytest
import torch
from support.bounds import SAME_MODEL
from support.tiny_trainer import llama, word_tokenizer
from support.versions import trl_1_16
from transformers import LlamaForCausalLM

import fusedce.trainer_rl as policy
from fusedce import head_report, replace_loss_head
from fusedce.trainer_rl import FusedDistillationMixin, FusedPolicyMixin

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

CLOSE = {"rel": 8 * SAME_MODEL, "abs": SAME_MODEL, "nan_ok": True}  # quotients of what is logged
# a step of SGD at a learning rate of 0.5 takes half the error of a gradient below 0.2
OF_PARAMETERS = {"rtol": 8 * SAME_MODEL, "atol": 0.1 * SAME_MODEL}

WORDS = [f"w{i}" for i in range(50)]


@pytest.fixture
def tokenizer():
    return word_tokenizer(len(WORDS))


def saved(tmp_path):
    """A model that knows where it came from: the trainers load the reference from there."""
    llama().save_pretrained(tmp_path / "model")
    return LlamaForCausalLM.from_pretrained(tmp_path / "model")


def text(n, seed):
    return " ".join(WORDS[(7 * seed + 3 * i) % len(WORDS)] for i in range(n))


def settings(tmp_path, **kwargs):
    return {
        "output_dir": str(tmp_path), "use_cpu": True, "logging_steps": 1, "report_to": [],
        "max_steps": 2, "learning_rate": 0.5, "optim": "sgd", "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False, "gradient_checkpointing": False, "lr_scheduler_type": "constant", **kwargs,
    }  # fmt: skip


def answers(base, config, rows, tmp_path, tokenizer, **kwargs):
    config = config(**settings(tmp_path, per_device_train_batch_size=2, **kwargs))
    return base(
        model=saved(tmp_path), ref_model=None, args=config,
        train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip


def dpo(base, *args, **kwargs):
    rows = [
        {"prompt": text(3, i), "chosen": " " + text(2 + i, i + 1), "rejected": " " + text(6 - i, i)}
        for i in range(4)
    ]
    return answers(base, trl.DPOConfig, rows, *args, **kwargs)


def kto(base, *args, **kwargs):
    rows = [
        {"prompt": text(3, i), "completion": " " + text(2 + i, i + 1), "label": i % 2 == 0}
        for i in range(4)
    ]
    return answers(base, trl.KTOConfig, rows, *args, **kwargs)


def grpo(base, tmp_path, tokenizer, config="GRPOConfig", **kwargs):
    def reward(completions, **_):
        return [float(len(set(c.split()))) for c in completions]

    rows = [{"prompt": text(4, i)} for i in range(4)]
    config = getattr(trl, config)(
        **settings(
            tmp_path, per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
            temperature=0.9, beta=0.05, **kwargs,
        )
    )  # fmt: skip
    return base(
        model=saved(tmp_path), reward_funcs=reward, args=config,
        train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip


def rloo(base, tmp_path, tokenizer, **kwargs):
    return grpo(base, tmp_path, tokenizer, "RLOOConfig", **kwargs)


def distillation(base, tmp_path, tokenizer, **kwargs):
    rows = [{"prompt": text(4, i)} for i in range(4)]
    config = trl.DistillationConfig(
        **settings(
            tmp_path, per_device_train_batch_size=2, max_completion_length=6, temperature=0.9,
            **kwargs,
        )
    )  # fmt: skip
    student, teacher = llama(), llama()
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    return base(
        model=student, teacher_model=teacher, args=config,
        train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip


def run(make, base, tmp_path, tokenizer, **kwargs):
    """The logged values without times, and the parameters after training."""
    torch.manual_seed(0)
    trainer = make(base, tmp_path, tokenizer, **kwargs)
    torch.manual_seed(1)
    trainer.train()
    logs = [
        {k: v for k, v in entry.items() if not any(x in k for x in ("time", "second", "runtime"))}
        for entry in trainer.state.log_history
    ]
    return logs, {k: p.detach().clone() for k, p in trainer.model.named_parameters()}


def run_both(make, mixin, theirs, kernel, tmp_path, tokenizer, monkeypatch, **options):
    """Check that logs and parameters are TRL's; return our logs, trainer and calls of `kernel`."""
    trl_1_16()
    base, trainers, calls = getattr(trl, theirs), [], []

    class Ours(mixin, base):
        def train(self, *args, **kwargs):
            trainers.append(self)
            return super().train(*args, **kwargs)

    original = getattr(policy, kernel)
    monkeypatch.setattr(policy, kernel, lambda *a, **k: calls.append(1) or original(*a, **k))
    logging.getLogger("trl").setLevel(logging.ERROR)
    stock_logs, stock = run(make, base, tmp_path, tokenizer, **options)
    assert not calls
    logs, ours = run(make, Ours, tmp_path, tokenizer, **options)
    assert len(logs) == len(stock_logs) >= 2
    for mine, exact in zip(logs, stock_logs, strict=True):
        assert mine.keys() == exact.keys()
        for name, value in exact.items():
            assert mine[name] == pytest.approx(value, **CLOSE), name
    torch.testing.assert_close(ours, stock, **OF_PARAMETERS)
    return logs, trainers[0], len(calls)


@pytest.mark.parametrize(
    ("make", "theirs", "options"),
    [
        (dpo, "DPOTrainer", {"use_weighting": True}),
        (rloo, "RLOOTrainer", {}),
        (grpo, "GRPOTrainer", {"top_entropy_quantile": 0.5}),
    ],
)
def test_logs_and_parameters_are_the_same(make, theirs, options, tmp_path, tokenizer, monkeypatch):
    _, trainer, calls = run_both(
        make, FusedPolicyMixin, theirs, "fused_logprobs", tmp_path, tokenizer, monkeypatch,
        **options,
    )  # fmt: skip
    assert calls >= 4  # policy and reference, two steps
    report = head_report(trainer.model)
    assert report.active
    assert report.losses_fused >= 2
    assert "FusedPolicyMixin computes" in str(report)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_distillation_logs_and_trains_the_same(beta, accumulated, tmp_path, tokenizer, monkeypatch):
    logs, _, calls = run_both(
        distillation, FusedDistillationMixin, "DistillationTrainer", "fused_kl", tmp_path,
        tokenizer, monkeypatch, beta=beta, learning_rate=0.05,
        gradient_accumulation_steps=accumulated,
    )  # fmt: skip
    assert calls == 2 * accumulated
    assert logs[0]["loss"] > 1e-3  # there is something to learn


@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7)])
def test_every_option_of_trls_divergence(num_items):
    trl_1_16()
    from trl.trainer.distillation_trainer import _chunked_divergence_loss as theirs

    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=rng)

    student, teacher, weight, there = draw(2, 5, 8), draw(2, 5, 12), draw(31, 8), draw(31, 12)
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]])
    options = {
        "num_items_in_batch": num_items, "student_lm_head_bias": draw(31),
        "teacher_lm_head_bias": draw(31), "student_logit_scale": 0.7, "teacher_logit_scale": 1.3,
        "student_final_logit_softcapping": 5.0, "teacher_final_logit_softcapping": 8.0,
        "temperature": 1.7,
    }  # fmt: skip
    for beta in (0.0, 0.4, 1.0):
        found = []
        for function in (policy._divergence_loss, theirs):
            leaves = [student.clone().requires_grad_(), weight.clone().requires_grad_()]
            loss, entropy, n = function(leaves[0], teacher, leaves[1], there, mask, beta, **options)
            found.append((loss, entropy, n, *torch.autograd.grad(loss, leaves)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_a_partitioned_head_is_refused():
    weight = torch.empty(0)
    weight.ds_id = 3
    with pytest.raises(RuntimeError, match="ZeRO-3 has partitioned one"):
        policy._divergence_loss(
            torch.ones(1, 2, 3), torch.ones(1, 2, 3), weight, weight, torch.ones(1, 2), 0.5
        )


@pytest.mark.parametrize(
    ("mixin", "name", "value", "words"),
    [
        (FusedDistillationMixin, "_DIVERGENCE", "nothing", "FusedDistillationMixin needs a TRL"),
        (FusedDistillationMixin, "_DISTILLATION", "trl.no", "FusedDistillationMixin needs a TRL"),
        (FusedPolicyMixin, "_CALLER", "nothing", r"needs a TRL whose trainer\.utils has .*nothing"),
    ],
)
def test_another_trl_is_refused(mixin, name, value, words, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(policy, name, value)
    with pytest.raises(RuntimeError, match=words):
        dpo(type("Ours", (mixin, trl.DPOTrainer), {}), tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("make", "theirs", "peft"),
    [
        (dpo, "DPOTrainer", False),
        (dpo, "DPOTrainer", True),
        (kto, "KTOTrainer", False),
        (rloo, "RLOOTrainer", False),
        (grpo, "GRPOTrainer", False),
    ],
)
def test_a_replaced_head_without_the_mixin_is_said_to_be_idle(
    make, theirs, peft, tmp_path, tokenizer, monkeypatch
):
    trl_1_16()

    def base(**kwargs):
        kwargs["model"] = replace_loss_head(kwargs["model"])
        if peft:
            lora = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"])
            kwargs["peft_config"] = lora
        return getattr(trl, theirs)(**kwargs)

    trainer = make(base, tmp_path, tokenizer)
    with pytest.warns(UserWarning, match=f"TRL has installed a fused head .*{theirs}"):
        trainer.train()
    report = head_report(trainer.model)
    assert report.losses_fused == 0
    assert "never the replaced one" in str(report)
