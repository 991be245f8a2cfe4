"""Deliberate breakages of the code, each with the tests that must turn red.

`mutants.jsonl` has one a line: an area, a name that says what goes wrong, a text in the code, the
text put in its place, and tests. They break what code means, and none is one that cosmic-ray makes:
`tests/mutate_generated.py` draws those (another number, another operator).

The old text must occur exactly once in the package, `kernels/` included; no file is named, so code
may move. The tests are a file (its name, or the end of its path where two have the same name), and
what else pytest takes. `tests/test_mutants.py` checks all of this without running any;
`tests/mutate.py` runs them.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    name: str
    old: str  # occurs exactly once in the package
    new: str
    tests: str  # what must turn red: a test file, then arguments of pytest


def by_area() -> dict[str, list[Mutant]]:
    """All mutants."""
    found: dict[str, list[Mutant]] = {}
    for line in (ROOT / "tests" / "mutants.jsonl").read_text().splitlines():
        fields = json.loads(line)
        found.setdefault(fields.pop("area"), []).append(Mutant(**fields))
    return found


def sources() -> dict[Path, str]:
    """The package's files by their path from the package's folder, as a wheel has them."""
    found = {}
    for folder in (ROOT / "fusedce", ROOT / "kernels"):
        inside = Path() if folder.name == "fusedce" else Path(folder.name)
        for file in folder.rglob("*.py"):
            found[inside / file.relative_to(folder)] = file.read_text()
    return found


def place(mutant: Mutant, files: dict[Path, str]) -> Path:
    """The file that holds the mutant's text; ``ValueError`` unless exactly one does, once."""
    counts = {str(path): text.count(mutant.old) for path, text in files.items()}
    counts = {path: n for path, n in counts.items() if n}
    if sum(counts.values()) != 1:
        raise ValueError(f"{mutant.name!r} must stand once in the code, stands in {counts or 'no'}")
    return Path(next(iter(counts)))


@functools.cache
def _test_files() -> list[Path]:
    return list((ROOT / "tests").rglob("*.py"))


def suite(mutant: Mutant) -> Path:
    """Its test file; ``ValueError`` unless one matches, and holds the word that -k selects."""
    wanted = Path(mutant.tests.split()[0]).parts
    found = [path for path in _test_files() if path.parts[-len(wanted) :] == wanted]
    if len(found) != 1:
        raise ValueError(f"{mutant.name!r} names {'/'.join(wanted)}: {len(found)} such test files")
    selected = re.search(r"-k (.+)$", mutant.tests)
    if selected and selected[1] not in found[0].read_text():  # a test's name or a parameter
        raise ValueError(
            f"{mutant.name!r} selects {selected[1]!r}: no such test in {found[0].name}"
        )
    return found[0]
