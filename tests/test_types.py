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
