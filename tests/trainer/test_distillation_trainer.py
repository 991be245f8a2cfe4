"""TRL's distillation trainer with the mixin, and other versions of TRL."""

import logging
from types import SimpleNamespace

import datasets
import pytest
import torch
import trl
from support.tiny_trainer import CLOSE, OF_PARAMETERS, llama, logs_of, word_tokenizer
from support.versions import trl_1_16

import fusedce.trainer_rl as policy
from fusedce.trainer_rl import FusedDistillationMixin, FusedPolicyMixin

pytestmark = pytest.mark.slow

WORDS = [f"w{i}" for i in range(50)]


def text(n, seed):
    return " ".join(WORDS[(7 * seed + 3 * i) % len(WORDS)] for i in range(n))


def run(base, tmp_path, **options):
    """The logged values without times, and the parameters after training."""
    rows = [{"prompt": text(4, i)} for i in range(4)]
    config = trl.DistillationConfig(
        output_dir=str(tmp_path), use_cpu=True, logging_steps=1, report_to=[], max_steps=2,
        learning_rate=0.05, optim="sgd", save_strategy="no", disable_tqdm=True, bf16=False,
        gradient_checkpointing=False, lr_scheduler_type="constant", max_completion_length=6,
        per_device_train_batch_size=2, temperature=0.9, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    student, teacher = llama(), llama()
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    trainer = base(
        model=student, teacher_model=teacher, args=config,
        train_dataset=datasets.Dataset.from_list(rows), processing_class=word_tokenizer(len(WORDS)),
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.train()
    return logs_of(trainer), {k: p.detach().clone() for k, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_distillation_logs_and_trains_the_same(beta, accumulated, tmp_path, monkeypatch):
    trl_1_16()

    class Ours(FusedDistillationMixin, trl.DistillationTrainer):
        pass

    calls, original = [], policy.fused_kl
    monkeypatch.setattr(policy, "fused_kl", lambda *a, **k: calls.append(1) or original(*a, **k))
    logging.getLogger("trl").setLevel(logging.ERROR)
    options = {"beta": beta, "gradient_accumulation_steps": accumulated}
    stock_logs, stock = run(trl.DistillationTrainer, tmp_path, **options)
    assert not calls
    logs, ours = run(Ours, tmp_path, **options)
    assert len(calls) == 2 * accumulated
    assert len(logs) == len(stock_logs) >= 2
    for mine, exact in zip(logs, stock_logs, strict=True):
        assert mine == pytest.approx(exact, **CLOSE)
    assert logs[0]["loss"] > 1e-3  # there is something to learn
    torch.testing.assert_close(ours, stock, **OF_PARAMETERS)


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
        (FusedPolicyMixin, "_CALLER", "nothing", r"needs a TRL whose .* have .*nothing"),
    ],
)
def test_another_trl_is_refused(mixin, name, value, words, monkeypatch):
    class Trainer(mixin, SimpleNamespace):
        """A trainer behind the mixin, of whatever TRL."""

    monkeypatch.setattr(policy, name, value)
    with pytest.raises(RuntimeError, match=words):
        Trainer()
