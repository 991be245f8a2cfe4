"""`fusedce audit SCRIPT` finds what an unchanged script does to the weight of tokens."""

import json

import pytest
from support.bounds import SAME_MODEL
from support.scripts import TWO, python
from support.versions import TORCH

LOOP = """
import os, sys
import torch, torch.nn.functional as F
import torch.distributed as dist

class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)
    def forward(self, ids):
        return self.head(self.body(ids))

class Encoder(torch.nn.Linear):
    pass

def main(kind):
    torch.manual_seed(0)
    model, encoder = GPT(), Encoder(4, 4)
    encoder(torch.ones(1, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    called, ranks = model, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        called, ranks = torch.nn.parallel.DistributedDataParallel(model), 2
    for step in range(6):
        torch.manual_seed(step)
        rows = [torch.randint(50, (n,)) for n in (3, 40, 12, 25)]
        tokens = sum(len(row) - 1 for row in rows)
        mine = rows[dist.get_rank() :: 2] if ranks == 2 else rows
        for row in mine:
            z = called(row[:-1])
            if kind == "means":
                loss = F.cross_entropy(z, row[1:]) / len(mine)
            else:
                loss = F.cross_entropy(z, row[1:], reduction="sum") * ranks / tokens
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", step)
    if ranks == 2:
        del called  # DDP that outlives its group may wait for ever when it is freed
        dist.destroy_process_group()

main(sys.argv[1])
"""


def audit(folder, *arguments, script=LOOP, launcher=()):
    (folder / "train.py").write_text(script)
    return python(folder, *launcher, "-m", "fusedce", "audit", *arguments)


def test_a_wrong_loop_is_found_and_drawn(tmp_path):
    """The script ends after the steps that were asked for; a short bar stands for a light token."""
    done = audit(tmp_path, "--model", "GPT", "--steps", "2", "--picture", "train.py", "means")
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("step 1\n") == 1
    assert "step 2\n" not in done.stdout
    assert done.stdout.rstrip().endswith("tokens of short ones weigh up to 19.5 x more")
    bars = [line for line in done.stdout.splitlines() if " tokens  " in line]
    assert len(bars) == 2 * 4
    lengths = [bar.count("#") for bar in bars[:4]]
    assert lengths[0] == max(lengths) == 40  # 2 tokens
    assert lengths[1] == min(lengths) == 2  # 39 tokens


def test_a_right_loop_is_found_right(tmp_path):
    """With ``--json``, standard output holds nothing else. It runs to its end if that is sooner."""
    done = audit(tmp_path, "--json", "--steps", "9", "--model", "GPT", "train.py", "sums")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["right"]
    assert len(found["steps"]) == 6
    for n, weight in found["steps"][0]["micro_batches"]:
        assert n in (2, 39, 11, 24)
        assert weight == pytest.approx(1, rel=10 * SAME_MODEL)
    assert "step 5\n" in done.stderr


def test_a_model_that_never_trains_cannot_be_judged(tmp_path):
    """The first model that is called is not the one that is trained: the verdict has a status."""
    done = audit(tmp_path, "train.py", "means")
    assert done.returncode == 3, done.stdout
    assert "no optimizer step was made" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "there is no script 'nothing.py'"),
        (["--model", "Llama", "train.py", "means"], "no model of a class Llama was called with"),
        (["--model", "Llama", "train.py", "means"], "called were Encoder, GPT, Embedding, Linear"),
    ],
)
def test_a_wrong_call_of_audit(tmp_path, arguments, words):
    done = audit(tmp_path, *arguments)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_error_of_the_script_is_its_own(tmp_path):
    script = "import torch\nraise KeyError('mine')\n"
    done = audit(tmp_path, "train.py", script=script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
    assert "fusedce" not in done.stderr


def test_a_model_without_logits_is_named(tmp_path):
    script = (
        "import torch\nmodel = torch.nn.LSTM(2, 2)\n"
        "model(torch.ones(1, 1, 2))[0].sum().backward()\n"
    )
    done = audit(tmp_path, "train.py", script=script)
    assert done.returncode == 2
    assert "LSTM returned tuple; --model CLASS chooses another" in " ".join(done.stderr.split())


NANOGPT = """
import torch, torch.nn as nn, torch.nn.functional as F

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.wte.weight = self.lm_head.weight
    def forward(self, idx, targets=None):
        logits = self.lm_head(self.wte(idx))
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, targets.view(-1), ignore_index=-1)

torch.manual_seed(0)
model = torch.compile(GPT())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    for n in (3, 11):
        X = torch.randint(50, (2, 12))
        Y = torch.roll(X, -1, 1).masked_fill(torch.arange(12) >= n, -1)
        logits, loss = model(X, Y)
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_that_returns_logits_and_loss_compiled_or_not(tmp_path, compiled):
    """The first micro-batch counts, too. The last line says what to write."""
    script = NANOGPT if compiled else NANOGPT.replace("torch.compile(GPT())", "GPT()")
    done = audit(tmp_path, "--json", "--steps", "2", "train.py", script=script)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [step["n_tokens"] for step in found["steps"]] == [28, 28]
    assert "your micro-batches are averaged" in found["verdict"]
    assert done.stderr.splitlines()[-1].startswith(
        "fusedce audit: To divide by the tokens of a step, write acc = "
        "fusedce.LossAccumulator(model); acc.backward(fusedce.model_loss(model, batch))"
    )
    assert "Warning" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["means", "sums"])
def test_a_script_on_two_ranks(tmp_path, kind):
    """Micro-batches of both ranks count, also where the script destroys its process group.

    No verdict is an error of torchrun's.
    """
    done = audit(tmp_path, "--json", "--model", "GPT", "train.py", kind, launcher=TWO)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    if TORCH <= (2, 10):  # its gloo says from C that it has connected
        text = "\n".join(x for x in text.splitlines() if not x.startswith("[Gloo] Rank"))
    found = json.loads(text)
    assert found["right"] == (kind == "sums"), found["verdict"]
    assert len(found["steps"]) == 6
    assert found["steps"][0]["n_tokens"] == 2 + 39 + 11 + 24
