"""The README: short, its snippets run as pasted, its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LINKS = re.findall(r"\]\(([^)]+)\)", README)


def test_it_is_short_and_begins_with_what_to_run():
    assert len(README.splitlines()) <= 110
    assert README.index("make demo") < README.index("make test") < README.index("pip install '.")


@pytest.mark.parametrize(
    ("number", "printed"),
    [(0, "losses fused: 1"), (1, "train_loss"), (2, "'n_tokens': 109"), (3, "tensor(")],
)
def test_a_snippet_runs_as_pasted_and_alone(number, printed, tmp_path, monkeypatch, capsys):
    """`.ci/run` runs them once more in an environment that holds only what the line installs."""
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], "README.md", "exec"), {"__name__": "pasted"})
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize("link", LINKS)
def test_a_link_leads_to_a_file_of_the_repository(link):
    assert (ROOT / link).exists()
