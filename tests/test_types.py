"""Types of the public names, as a type checker sees them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """\
import torch
import fusedce

class Model(torch.nn.Module):
    pass

hidden, labels = torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)
fusedce.nonsense  # error: Module has no attribute "nonsense"
fusedce.fused_ce(hidden, hidden, labels, reduction="mean")  # error: Unexpected keyword argument
fusedce.fused_ce(hidden, hidden, "labels")  # error: Argument 3 to "fused_ce"
reveal_type(fusedce.fused_ce(hidden, hidden, labels))  # fusedce.contract.results.LossSum
stats = fusedce.fused_logprobs(hidden, hidden, labels, softcap=30.0)
reveal_type(stats)  # fallback=fusedce.contract.results.TokenStats]
more = fusedce.fused_logprobs(hidden, hidden, labels, mean_logit=True)
reveal_type(more)  # fallback=fusedce.contract.results.TokenStatsAndMean]
reveal_type(fusedce.replace_loss_head(Model()))  # program.Model
reveal_type(fusedce.restore_loss_head(Model()))  # program.Model
fusedce.accumulate, fusedce.head, fusedce.loss, fusedce.recipes, fusedce.sharded, fusedce.trainer
"""

PAGES = {
    "README": (ROOT / "README.md").read_text(),
    "quickstart": (ROOT / "docs" / "quickstart.md").read_text(),
}


def snippets(page):
    """Snippets of a page that run alone; those of the quickstart run one after the other."""
    found = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    return found if page == "README" else ["\n".join(found)]


PYRIGHT = """
{"typeCheckingMode": "standard", "reportPrivateImportUsage": "none", "extraPaths": ["%s"],
 "pythonVersion": "3.11"}
"""


def checked(checker, folder):
    """What a type checker says of the Python files of a folder."""
    if checker == "mypy":
        arguments = [
            "mypy",
            "--ignore-missing-imports",
            "--follow-imports=silent",
            *folder.iterdir(),
        ]
    else:  # pyright's own wheel downloads it at its first start
        pytest.importorskip("basedpyright")
        (folder / "pyrightconfig.json").write_text(PYRIGHT % ROOT)
        arguments = ["basedpyright", "--pythonpath", sys.executable, "-p", folder]
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr
    return [line.strip() for line in done.stdout.splitlines() if " error: " in line], done.stdout


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.slow), "pyright"])
def test_what_the_first_pages_show_passes_a_checker(checker, tmp_path):
    for page in PAGES:
        assert snippets(page)
        for i, text in enumerate(snippets(page)):
            (tmp_path / f"{page}_{i}.py").write_text(text)
    errors, said = checked(checker, tmp_path)
    assert not errors, said


MIXINS = """
import torch, fusedce
from fusedce.trainer_rl import FusedDistillationMixin, FusedPolicyMixin
from transformers import Seq2SeqTrainer, Trainer
from trl import DPOTrainer, GRPOTrainer, SFTTrainer


class A(fusedce.FusedTrainerMixin, Trainer):
    log_token_stats = True


class B(fusedce.FusedTrainerMixin, Seq2SeqTrainer): ...
class C(fusedce.FusedTrainerMixin, SFTTrainer): ...
class D(FusedPolicyMixin, DPOTrainer): ...
class E(FusedPolicyMixin, GRPOTrainer): ...


A(model=torch.nn.Linear(1, 1)).train().training_loss
out = fusedce.fused_ce(torch.ones(1, 2), torch.ones(3, 2), torch.ones(1, dtype=torch.int64))
total = (out + 2 * out) / 3
total.mean().backward()
out.monitors["correct"]
out.backward()  # wrong
"""


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.slow), "pyright"])
def test_a_checker_sees_the_mixins_and_that_a_sum_has_no_backward(checker, tmp_path):
    (tmp_path / "program.py").write_text(MIXINS)
    errors, said = checked(checker, tmp_path)
    line = 1 + MIXINS.splitlines().index("out.backward()  # wrong")
    assert len(errors) == 1, said
    assert f"program.py:{line}:" in errors[0]
    assert "backward" in errors[0]


@pytest.mark.slow
def test_a_checker_knows_every_name_and_type(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent",
         program], cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    said: dict[int, str] = {}
    for number, words in re.findall(r"program\.py:(\d+): (?:error|note): (.*)", done.stdout):
        said[int(number)] = said.get(int(number), "") + words
    for number, line in enumerate(PROGRAM.splitlines(), start=1):
        _, _, expected = line.partition("  # ")
        assert expected.removeprefix("error: ") in said.get(number, ""), (line, done.stdout)
        assert expected or number not in said, (line, said[number])
