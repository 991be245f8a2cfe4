"""Each example runs, and shows what its first lines say to look at."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ranks
from support.bounds import SAME_MODEL, STATISTIC

import fusedce

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPTS = sorted(p.stem for p in EXAMPLES.glob("*.py"))
RUN = dict.fromkeys(
    ("ddp", "fsdp2", "pipeline", "tensor_parallel"), "torchrun --nproc-per-node 2"
) | {
    "accelerate_loop": "accelerate launch --cpu --num_processes 2",
    "own_loop": "accelerate launch --cpu --num_processes 2",
    "fsdp2_tensor_parallel": "torchrun --nproc-per-node 4",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_says_how_to_run_it_and_what_to_look_at(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.startswith('"""')
    first = text.split('"""')[1]
    assert f"\n    {RUN.get(name, 'python')} examples/{name}.py" in first
    assert "\nLook at: " in first


@pytest.mark.slow
def test_fine_tuning_with_lora(tmp_path):
    """Both splits log the same; a resumed run goes on, and its adapter is the one on disk."""
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    script = example("finetune_lora")
    model, data = script.tiny_model(str(tmp_path / "model")), script.texts(None)

    def fine_tuned(out, **options):
        trainer = script.fine_tune(model, data, str(tmp_path / out), **options)
        return trainer, [x["loss"] for x in trainer.state.log_history if "loss" in x]

    _, one = fine_tuned("out", steps=3)
    _, eight = fine_tuned("8", steps=3, micro_batch=8)
    assert one == pytest.approx(eight, rel=SAME_MODEL)
    assert one[-1] < one[0]
    trainer, resumed = fine_tuned("out", steps=5, resume=True)
    assert resumed[:3] == one
    assert len(resumed) == 5
    trained = trainer.evaluate()["eval_loss"]
    plain = script.AutoModelForCausalLM.from_pretrained(model)
    again = script.PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    trainer.model.load_state_dict(again.state_dict())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trained, rel=SAME_MODEL)
    assert trained < one[0]


@pytest.mark.slow
def test_lightning_trains_like_the_plain_loop():
    pytest.importorskip("lightning", reason="lightning is not installed")
    history, plain = example("lightning_module").train(), example("plain").train()
    assert [m["n_tokens"] for m in history] == [m["n_tokens"] for m in plain]
    for a, b in zip(history, plain, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=SAME_MODEL)


def test_every_token_of_a_long_document_is_scored_once():
    long = example("long_document")
    model = fusedce.replace_loss_head(long.LlamaForCausalLM(long.CONFIG))
    document = torch.randint(long.CONFIG.vocab_size, (300,))
    for stride in (long.CONTEXT, 50, 7):
        metrics = long.perplexity(model, document, stride=stride)
        assert metrics["n_tokens"] == len(document) - (
            1 if stride < long.CONTEXT else -(-len(document) // long.CONTEXT)
        )
    short = long.perplexity(model, document[:20], stride=50)
    assert short["n_tokens"] == 19


def test_a_vocabulary_in_parts_has_the_whole_loss():
    found = ranks.run({"parts": lambda rank: example("tensor_parallel").one_loss()})
    whole = example("tensor_parallel").whole()
    for parts in ranks.of(found, "parts"):
        assert parts == pytest.approx(whole, rel=SAME_MODEL)


@pytest.mark.slow
def test_fsdp2_around_a_sharded_head_trains_like_one_process():
    script = example("fsdp2_tensor_parallel")
    (one,) = ranks.of(ranks.run({"one": lambda rank: script.train(1, 1)}, 1), "one")
    for four in ranks.of(ranks.run({"four": lambda rank: script.train(2, 2)}, 4), "four"):
        for a, b in zip(four, one, strict=True):
            assert a["n_tokens"] == b["n_tokens"]
            assert a["loss"] == pytest.approx(b["loss"], rel=8 * SAME_MODEL)


def test_dpo_prefers_what_was_chosen():
    """The loss starts at log 2, where policy and reference agree, for any micro-batches."""
    dpo = example("dpo")
    history = dpo.train(steps=3)
    assert history[0] == pytest.approx(math.log(2), rel=STATISTIC)
    assert history[2] < history[1] < history[0]
    dpo.MICRO_BATCHES = (8,)
    assert dpo.train(steps=3) == pytest.approx(history, rel=8 * SAME_MODEL)


def test_kto_rewards_good_answers():
    losses, margins = zip(*example("kto").train(steps=3), strict=True)
    assert losses[0] == pytest.approx(0.5, rel=STATISTIC)
    assert losses[2] < losses[1] < losses[0]
    assert abs(margins[0]) < SAME_MODEL < margins[1] < margins[2]


@pytest.mark.parametrize("stored", [True, False])
def test_a_student_comes_near_its_teacher(stored):
    first, second = example("distillation").train(epochs=2, stored=stored)
    assert 0 < 3 * second < first


@pytest.mark.slow
def test_the_demo_runs_and_estimates(tmp_path):
    """A demo of few sequences shows the same as the full one."""
    script = [sys.executable, EXAMPLES / "demo.py", "--quick", "--out", tmp_path]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["problem"] is None
    assert found["cost"]["extra_bytes"]["fused_ce"] < found["cost"]["extra_bytes"]["eager"] / 2
    assert (tmp_path / "demo.png").exists()
    assert "s in all, from one step timed here" in done.stdout


def test_the_demo_fails_where_the_accumulator_leaves_the_batch():
    demo = example("demo")
    runs = {name: [demo.StepLoss(2.0, 2.0)] for name in (demo.FULL, demo.NAIVE, demo.WINDOW)}
    assert "too similar" in demo.problem(runs)
    runs[demo.NAIVE] = [demo.StepLoss(2.1, 2.0)]
    assert demo.problem(runs) is None
    for wrong in (2.001, math.nan):
        assert "left the full batch" in demo.problem(
            runs | {demo.WINDOW: [demo.StepLoss(2, wrong)]}
        )
