"""Break the code at random places, as a public tool of mutation testing does, and run the tests.

    pip install cosmic-ray
    python tests/mutate_generated.py 100 --seed 20261123  # in the folders of FOLDERS

`tests/mutate.py` runs breakages that a person has chosen; these are cosmic-ray's, at places that
the seed draws. A mutant meets the tests of its folder first, and those that are slow last. One that
survives is equivalent to the code, or shows a test that is missing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mutants
from mutate import failed_test, passes, run_tests

# The folders of tests that a mutant of a folder meets; the first is its own.
FOLDERS = {
    "contract": "contract loss autograd backends",
    "autograd": "autograd loss backends",
    "backends": "backends loss autograd kernels",
    "ranks": "loss contract head",
    "accumulate": "accumulate test_faults_between_ranks.py",
    "head": "head trainer",
}
# Equal by construction: None and other single objects compare as they are identical.
EQUAL = ("Is_Eq", "Eq_Is", "IsNot_NotEq", "NotEq_IsNot")
SECONDS = 900  # until tests that do not end are a difference that was noticed


class Generated(NamedTuple):
    file: str  # from the package's folder
    line: int
    operator: str  # cosmic-ray's name
    text: str  # of the whole file

    def change(self) -> str:
        before = mutants.sources()[Path(self.file)].splitlines()
        lines = difflib.unified_diff(before, self.text.splitlines(), n=0, lineterm="")
        return " ".join(x for x in lines if x[:1] in "+-" and x[:3] not in ("+++", "---"))


def draw(count: int, seed: int) -> list[Generated]:
    """``count`` mutants at different places; each place is as likely as any other."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    files = {
        str(path): text
        for path, text in sorted(mutants.sources().items())
        if any(path.is_relative_to(folder) for folder in FOLDERS)
    }
    places: dict[tuple[str, int, int], list[tuple[str, int]]] = {}
    for file, text in files.items():
        for position, operator, occurrence in _sites(text):
            places.setdefault((file, *position), []).append((operator, occurrence))
    rng, drawn = random.Random(seed), []
    for file, line, column in rng.sample(sorted(places), len(places)):
        operator, occurrence = rng.choice(places[file, line, column])
        text = mutate_code(files[file], get_operator(operator)(), occurrence)
        with contextlib.suppress(SyntaxError):  # the * before keywords is taken for a product
            ast.parse(text)
            drawn.append(Generated(file, line, operator.removeprefix("core/"), text))
        if len(drawn) == count:
            break
    return drawn


def _sites(text: str) -> Iterator[tuple[tuple[int, int], str, int]]:
    """((line, column), operator, its occurrence in the text), outside of annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    annotated = []
    for node in ast.walk(ast.parse(text)):
        for name in ("annotation", "returns"):
            if (hint := getattr(node, name, None)) is not None:
                start = hint.lineno, hint.col_offset
                annotated.append((start, (hint.end_lineno, hint.end_col_offset)))
    nodes = list(ast_nodes(get_ast(text)))
    for name in sorted(operator_names()):
        if name.endswith((*EQUAL, "VariableInserter", "VariableReplacer")):
            continue
        operator = get_operator(name)()
        found = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(found):
            if not any(a <= start < b for a, b in annotated):
                yield start, name, occurrence


def verdict(mutant: Generated) -> str:
    names = FOLDERS[Path(mutant.file).parts[0]].split()
    for tests, chosen in (names[:1], "not slow"), (names[1:], "not slow"), (names, "slow"):
        paths = [str(mutants.ROOT / "tests" / name) for name in tests]
        begin = time.monotonic()
        code, output = run_tests(Path(mutant.file), mutant.text, ["-m", chosen, *paths], SECONDS)
        lines = [x for x in output.splitlines() if x.startswith(("FAILED", "ERROR"))]
        took = f"{time.monotonic() - begin:.0f} s"
        if code is None:
            return f"killed   by time ({took})"
        if code not in (0, 5):  # 5: no test was chosen
            test = failed_test(lines[0]) if lines else f"exit status {code}"
            # (Without "::" it is a file that could not be imported.)
            if "::" in test and not passes(test):
                raise RuntimeError(f"{test} fails without a mutant: mend it first")
            return f"killed   {test} ({took})"
    return "SURVIVED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", type=int, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    verdicts: Counter[str] = Counter()
    for number, mutant in enumerate(draw(given.count, given.seed)):
        found = verdict(mutant)
        verdicts[found.split(" ")[0]] += 1
        place = f"{mutant.file}:{mutant.line} {mutant.operator}"
        print(f"{number:3d} {found}\n    {place}: {mutant.change()}", flush=True)
    print(f"{verdicts['killed']} of {verdicts.total()} generated mutants killed")
    return 1 if verdicts["SURVIVED"] else 0


if __name__ == "__main__":
    sys.exit(main())
