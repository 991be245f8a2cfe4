"""Type checkers take what the first pages show; `make lint` reads `support/typed.py`."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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
 "pythonVersion": "3.11", "reportUnnecessaryTypeIgnoreComment": "error"}
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


def test_pyright_reads_the_same_types_as_mypy(tmp_path):
    shutil.copy(ROOT / "tests" / "support" / "typed.py", tmp_path)
    errors, said = checked("pyright", tmp_path)
    assert not errors, said
