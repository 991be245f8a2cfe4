"""`fusedce run` runs an unchanged script: what it changes, and that it changes nothing else."""

import json

import pytest
import torch
from support.bounds import SAME_MODEL
from support.command_line import call
from support.scripts import TRAINER, TWO, python
from support.tiny_trainer import CLOSE


def fused(folder, *arguments, launcher=()):
    """A script that has ended well, and the report of ``fusedce run``."""
    done = python(folder, *launcher, "-m", "fusedce", "run", "--report", "report.json", *arguments)
    assert done.returncode == 0, done.stderr
    assert sum(line.startswith("fusedce run:") for line in done.stderr.splitlines()) == 1
    return json.loads((folder / "report.json").read_text()), done


# ---- the script is run as by python ------------------------------------------------------------

FAILURE = """
import sys
def fail():
    raise KeyError(sys.argv[1:])
print(__name__, sys.argv, sys.path[0], __file__)
try:
    1 / 0
except ZeroDivisionError:
    fail()
"""
ENDS = {
    "an error": FAILURE,
    "a status": "import sys; sys.exit(7)",
    "words": "import sys; sys.exit('no')",
    "a wrong syntax": "x = = 2",
    "ctrl-C": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "its own hook": "import sys; sys.excepthook = lambda *e: print(e[:2]); raise ValueError(3)",
    "click": "import click; click.command()(lambda: click.get_current_context().fail('no'))()",
    "success": "print('done')",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_as_without_us(name, tmp_path):
    """Output, traceback, exit status, ``sys.argv``, ``__file__`` and the search path are its own.

    Options after the script are the script's.
    """
    (tmp_path / "train.py").write_text(ENDS[name])
    stock = python(tmp_path, "train.py", "--report", "x", "-m")
    ours = python(tmp_path, "-m", "fusedce", "run", "train.py", "--report", "x", "-m")
    assert ours.returncode == stock.returncode
    lines = [line for line in ours.stderr.splitlines() if not line.startswith("fusedce run:")]
    assert lines == stock.stderr.splitlines()
    assert ours.stdout == stock.stdout
    assert len(lines) == len(ours.stderr.splitlines()) - 1


def test_a_module_is_run_as_by_python(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("import sys; print(sys.argv, sys.path[0])")
    stock = python(tmp_path, "-m", "package", "-m", "x")
    ours = python(tmp_path, "-m", "fusedce", "run", "-m", "package", "-m", "x")
    assert (ours.returncode, ours.stdout) == (0, stock.stdout)


@pytest.mark.parametrize("command", ["run", "audit"])
def test_a_script_may_set_variables_before_it_imports_torch(command, tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys; print({'torch', 'transformers'} & sys.modules.keys())"
    )
    assert python(tmp_path, "-m", "fusedce", command, "train.py").stdout == "set()\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "there is no script 'nothing.py'"),
        (["json"], "for a module: fusedce run -m json"),
        (["torchrun", "train.py"], "torchrun --nproc_per_node 2 -m fusedce run train.py"),
        (["accelerate", "launch", "x.py"], "accelerate launch -m fusedce run train.py"),
        (["-m", "torch.distributed.run", "train.py"], "-m fusedce run train.py"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_a_wrong_call_of_run(arguments, words):
    done = call("run", *arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())


# ---- Trainer -----------------------------------------------------------------------------------


def losses(log, key="loss"):
    return [entry[key] for entry in log if key in entry]


def mean_loss_of_rows():
    """Nats per token of the script's model before its first step, over all rows, in float64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    space = {"__name__": "imported"}
    exec(TRAINER, space)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0,
                   embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2)
    ).double().eval()  # fmt: skip
    total = count = 0
    for row in space["rows"]:
        ids = row["input_ids"]
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs.gather(-1, ids[1:, None]).sum())
        count += len(ids) - 1
    return total / count


def test_a_trainer_script_logs_the_token_mean(tmp_path):
    """A step of 8 micro-batches of one row each logs the mean over the tokens of all rows.

    It evaluates, saves, and goes on from a checkpoint with the losses of the first run.
    """
    (tmp_path / "train.py").write_text(TRAINER)
    report, done = fused(tmp_path, "train.py", "8")
    first, resumed = json.loads(done.stdout.splitlines()[-1])
    assert losses(first)[0] == pytest.approx(mean_loss_of_rows(), rel=SAME_MODEL)
    assert losses(resumed) == pytest.approx(losses(first), rel=8 * SAME_MODEL)
    evaluated = losses(first, "eval_loss")
    assert len(evaluated) == 2
    assert evaluated[0] == pytest.approx(losses(first)[2], rel=SAME_MODEL)  # all rows, as a step
    assert (tmp_path / "out" / "checkpoint-4" / "model.safetensors").exists()
    models = report["models"]
    assert [(m["class"], m["replaced"], m["logits_made"]) for m in models] == [
        ("GPT2LMHeadModel", True, 0)
    ] * 2
    assert models[0]["losses_fused"] == 4 * 8 + 2 * 8 + 2  # training, evaluation, the shift
    trainer = {"name": "Trainer", "mixin": "FusedTrainerMixin", "why_not": None}
    assert report["trainers"] == [trainer] * 2


@pytest.mark.slow
def test_a_trainer_script_on_two_ranks(tmp_path):
    """Four micro-batches on each of two ranks log and save what eight on one do."""
    pytest.importorskip(
        "transformers", minversion="5.20", reason="an older Trainer resumes on no rank without GPU"
    )
    (tmp_path / "train.py").write_text(TRAINER)
    report, done = fused(tmp_path, "train.py", "4", launcher=TWO)
    assert report["models"][0]["losses_fused"] == 4 * 4 + 2 * 4 + 2  # half of the evaluation's
    first, resumed = json.loads(done.stdout.splitlines()[-1])
    assert losses(first)[0] == pytest.approx(mean_loss_of_rows(), rel=SAME_MODEL)
    assert losses(resumed) == pytest.approx(losses(first), rel=8 * SAME_MODEL)
    _, done = fused(tmp_path, "train.py", "8")
    alone, _ = json.loads(done.stdout.splitlines()[-1])
    for key in ("loss", "eval_loss"):
        assert losses(first, key) == pytest.approx(losses(alone, key), rel=8 * SAME_MODEL)


OWN_LOSSES = """
import torch, transformers
from transformers import BertConfig, BertForQuestionAnswering
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        out = model(**inputs)
        return (2 * out.loss, out) if return_outputs else 2 * out.loss

def loss_func(outputs, labels, num_items_in_batch=None):
    return 3 * outputs.logits.logsumexp(-1).mean()

class OwnEvaluation(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            return model(**inputs).loss + 1, None, None

class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        for factor in (0.5, 0.5):  # twice, as adversarial training does
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss * factor)
        return loss.detach()

sizes = dict(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
             num_attention_heads=2)
args = transformers.TrainingArguments(
    "out", max_steps=2, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
    disable_tqdm=True, per_device_train_batch_size=2,
)
rows = [{"input_ids": list(range(n, n + 9)), "labels": list(range(n, n + 9))} for n in range(3, 9)]
for kind, function in (
    (Weighted, None), (Trainer, loss_func), (OwnEvaluation, None), (OwnStep, None),
):
    torch.manual_seed(0)
    trainer = kind(LlamaForCausalLM(LlamaConfig(**sizes)), args, train_dataset=rows,
                   eval_dataset=rows, compute_loss_func=function)
    trainer.train()
    print("is", trainer.evaluate()["eval_loss"], trainer.state.log_history[0]["loss"],
          type(trainer) is kind)
torch.manual_seed(0)
rows = [{"input_ids": r["input_ids"], "start_positions": 1, "end_positions": 3} for r in rows]
answers = Trainer(BertForQuestionAnswering(BertConfig(**sizes)), args, eval_dataset=rows)
print("is", answers.evaluate()["eval_loss"], 0.0, type(answers) is Trainer)
"""


@pytest.mark.slow
def test_a_loss_or_a_step_of_a_scripts_own_and_an_evaluation_alone_stay_the_scripts(tmp_path):
    """The mixin would report another loss than the script's, or stop it; the reason is said."""
    (tmp_path / "train.py").write_text(OWN_LOSSES)
    stock = python(tmp_path, "train.py")
    assert stock.returncode == 0, stock.stderr
    report, done = fused(tmp_path, "train.py")
    ours, theirs = (
        [x.split()[1:] for x in out.stdout.splitlines() if x.startswith("is ")]
        for out in (done, stock)
    )
    assert len(ours) == 5
    for mine, exact in zip(ours, theirs, strict=True):
        assert [float(x) for x in mine[:2]] == pytest.approx(
            [float(x) for x in exact[:2]], rel=SAME_MODEL
        )
    assert [kept for *_, kept in ours[:2]] == ["True", "True"]
    why = [str(trainer["why_not"]) for trainer in report["trainers"]]
    assert "Weighted has a compute_loss of its own" in why[0]
    assert "compute_loss_func" in why[1]
    assert "OwnEvaluation has a prediction_step of its own" in why[2]
    assert "OwnStep has a training_step of its own" in why[3]
    assert "Trainer keeps its loss (FusedTrainerMixin computes" in done.stderr


# ---- a plain loop ------------------------------------------------------------------------------


LOOP = """
import torch, transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

def main():
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                         num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained("model")
    models = [
        AutoModelForCausalLM.from_pretrained("model"),
        AutoModelForCausalLM.from_config(config),
        transformers.AutoModelForSequenceClassification.from_config(config),
    ]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    ids = torch.arange(3, 33)[None]
    for _ in range(3):
        out = models[0](input_ids=ids, labels=ids)
        out.loss.backward()
        print(f"{out.loss.item():.6f}")
        optimizer.step()
        optimizer.zero_grad()
    print(models[1](input_ids=ids, labels=ids).logits.argmax().item())

main()
"""


@pytest.mark.slow
def test_a_plain_loop_has_the_heads_of_its_models_replaced(tmp_path):
    """Whatever made them; the report outlives them, and names the line that made logits."""
    (tmp_path / "train.py").write_text(LOOP)
    stock = python(tmp_path, "train.py")
    report, done = fused(tmp_path, "train.py")
    assert [float(x) for x in done.stdout.split()] == pytest.approx(
        [float(x) for x in stock.stdout.split()], **CLOSE
    )
    saved, loaded, made = report["models"]
    assert (saved["losses_fused"], loaded["losses_fused"], made["losses_fused"]) == (0, 3, 1)
    assert (loaded["logits_made"], made["logits_made"]) == (0, 1)
    assert "argmax" in made["why_not"][0]
    assert f"{tmp_path / 'train.py'}:23" in made["why_not"][0]
    assert report["trainers"] == []


ACCELERATE_LOOP = """
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
config = LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                     num_attention_heads=2)
model = LlamaForCausalLM(config)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for n in (4, 12):
    with accelerator.accumulate(model):
        ids = torch.randint(3, 61, (2, n))
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("accumulates", [False, True])
def test_the_last_line_says_whose_denominator_a_loop_has_and_what_to_write(tmp_path, accumulates):
    """Nothing, if the loop writes it already."""
    made = "import fusedce; fusedce.LossAccumulator.from_accelerator(accelerator, model)\n"
    script = ACCELERATE_LOOP + (made if accumulates else "")
    (tmp_path / "train.py").write_text(script)
    report, done = fused(tmp_path, "train.py")
    assert report["models"][0]["losses_fused"] == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fusedce run: LlamaForCausalLM: 2 losses fused, logits made 0 times")
    words = (
        "the denominator is still the loop's own",
        "fusedce.LossAccumulator.from_accelerator(accelerator, model); "
        "acc.backward(fusedce.model_loss(model, batch)) for each micro-batch; acc.finish()",
    )
    assert [text in last for text in words] == [not accumulates] * 2
    assert (report["denominator"] is None) == accumulates
