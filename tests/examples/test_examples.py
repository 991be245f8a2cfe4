"""Each example runs as it is and shows what its first lines say; all engines train one model."""

import functools
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import ranks
from support.bounds import SAME_MODEL, SAME_SUMS, STATISTIC
from support.engines import accelerator
from support.loops import distance
from support.versions import FSDP2_MEAN, PIPELINES_OVER_GLOO, marked
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import fusedce

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name):
    """The example alone: it can import no other file of its folder."""
    spec = importlib.util.spec_from_file_location(f"script_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_alike(history, exact, rel=SAME_MODEL):
    """Two runs log the same losses of the same tokens, step by step."""
    assert [m["n_tokens"] for m in history] == [m["n_tokens"] for m in exact]
    assert [m["loss"] for m in history] == pytest.approx([m["loss"] for m in exact], rel=rel)


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
    seen = [x["num_tokens"] for x in trainer.state.log_history if "num_tokens" in x]
    assert seen == sorted(set(seen))  # a resumed run counts on
    trained = trainer.evaluate()["eval_loss"]
    plain = script.AutoModelForCausalLM.from_pretrained(model)
    again = script.PeftModel.from_pretrained(plain, str(tmp_path / "out"))
    trainer.model.load_state_dict(again.state_dict())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trained, rel=SAME_MODEL)
    assert trained < one[0]


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


@ranks.together()
def test_a_vocabulary_in_parts_has_the_whole_loss(rank):
    script = example("tensor_parallel")
    assert script.one_loss() == pytest.approx(script.whole(), rel=SAME_MODEL)


@pytest.mark.slow
def test_fsdp2_around_a_sharded_head_trains_like_one_process():
    script = example("fsdp2_tensor_parallel")
    (one,) = ranks.shared({"one": lambda rank: script.train(1, 1)}, 1)("one")
    for four in ranks.shared({"four": lambda rank: script.train(2, 2)}, 4)("four"):
        assert_alike(four, one, 8 * SAME_MODEL)


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
def test_the_demo_runs(tmp_path):
    """A demo of few sequences shows the same as the full one."""
    script = [sys.executable, EXAMPLES / "demo.py", "--quick", "--out", tmp_path]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "demo.json").read_text())
    assert found["problem"] is None
    assert (tmp_path / "demo.png").exists()
    assert "OK: with LossAccumulator" in done.stdout


# ---- engines: the same model on the same data ---------------------------------------------------


class Writer:
    """The values that a tracker receives."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, name, value, step):
        assert isinstance(value, (int, float))
        self.scalars.setdefault(name, []).append((step, value))


@functools.cache
def plain():
    writer = Writer()
    return example("plain").train(writer=writer), writer.scalars


def test_plain_loop_learns_and_tracks():
    history, scalars = plain()
    assert len(history) == 2 * 3  # 4, 4 and 2 micro-batches in each epoch
    assert history[-1]["loss"] < 0.9 * history[0]["loss"]
    assert set(scalars) == {
        *(f"train/{x}" for x in ("loss", "perplexity", "n_tokens", "n_windows")),
        "eval/loss",
    }
    assert scalars["train/loss"] == [(i + 1, m["loss"]) for i, m in enumerate(history)]


def of_accelerate(name, rank):
    return getattr(example("accelerate_loop"), name)(
        accelerator(rank, gradient_accumulation_steps=2)
    )


ENGINES = {
    "ddp": lambda rank: example("ddp").train(),
    "fsdp2": lambda rank: example("fsdp2").train(),
    "accelerate, streaming": functools.partial(of_accelerate, "streaming"),
    "accelerate, declared": functools.partial(of_accelerate, "declared"),
}
engines = ranks.shared(ENGINES)


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(ENGINES, FSDP2_MEAN, "fsdp2"))
def test_engines_train_alike(name):
    """Two ranks log what one process logs, step by step: clipping and optimizer included."""
    for history in engines(name):
        assert_alike(history, plain()[0])


def test_epoch_end():
    finished = example("epoch_end").train()
    carried = example("epoch_end").train(carry_over=True)
    assert len(finished) == 3 * 3  # 4, 4 and 2 micro-batches in each epoch
    assert len(carried) == 30 // 4 + 1
    total = [sum(m["n_tokens"] for m in history) for history in (finished, carried)]
    assert total[0] == total[1]  # no token is lost or trained twice
    assert finished[2]["n_tokens"] < carried[2]["n_tokens"]
    assert carried[-1]["loss"] < carried[0]["loss"]


def test_multi_token_prediction():
    """Beside one batch of each step in float64, whose two means are added."""
    script = example("mtp")
    history = script.train()
    torch.manual_seed(0)
    model = script.Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, found in enumerate(history):
        window = script.batches()[4 * (step % 2) :][:4]
        outs = [model(ids) for ids in window]
        main, next2 = (sum(out[name] for out in outs) for name in ("main", "next2"))
        assert found["main/n_tokens"] == main.n_valid
        assert found["next2/n_tokens"] == next2.n_valid == main.n_valid - 2 * len(window)
        loss = main.mean() + 0.3 * next2.mean()
        assert found["loss"] == pytest.approx(loss.item(), rel=SAME_MODEL)
        assert found["main/loss"] == pytest.approx(main.mean().item(), rel=SAME_MODEL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert history[-1]["loss"] < history[0]["loss"]


def test_policy_gradient():
    rewards, history = example("policy_gradient").train()
    assert sum(rewards[-6:]) / 6 > 10 * max(sum(rewards[:6]) / 6, 0.003)
    assert all(m["n_windows"] == 1 for m in history)


def test_grpo_has_the_eager_gradients():
    grpo = example("grpo")
    loss, grads = grpo.one_update(grpo.fused_policy)
    eager_loss, eager_grads = grpo.one_update(grpo.eager_policy)
    assert loss == pytest.approx(eager_loss, rel=SAME_MODEL, abs=SAME_SUMS)
    assert grads.keys() == eager_grads.keys()
    assert "head.weight" in grads
    for name, grad in eager_grads.items():
        assert grad.norm() > 1e-3, name
        assert (grads[name] - grad).norm() <= SAME_MODEL * grad.norm(), name


# ---- the pipeline -------------------------------------------------------------------------------


@functools.cache
def pipeline_in_one_process():
    script = example("pipeline")
    model = torch.nn.Sequential(script.First(), script.Last())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for _ in range(2):
        for batch in script.steps():
            hidden, labels = model(batch["input_ids"]), fusedce.shift_labels(batch["labels"])
            out = fusedce.fused_ce(hidden, model[1].lm_head.weight, labels)
            out.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append({"loss": float(out.mean().detach()), "n_tokens": int(out.n_valid)})
    return history, {name[2:]: p for name, p in model.named_parameters()}


@PIPELINES_OVER_GLOO
@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_pipeline_trains_as_one_process(schedule, streaming):
    """It is the first thing that the processes do: no rank makes a group or waits for others."""

    def trained(rank):
        history, model = example("pipeline").train(schedule=schedule, streaming=streaming)
        return history, {name: p.detach() for name, p in model.named_parameters()}

    exact, parameters = pipeline_in_one_process()
    for history, found in ranks.shared({"trained": trained}, timeout=15)("trained"):
        assert_alike(history, exact)
        for key, p in found.items():
            assert distance(p, parameters[key]) <= 8 * SAME_MODEL, key  # after as many steps
