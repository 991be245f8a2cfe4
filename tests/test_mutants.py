"""The list of mutants is sound; `tests/mutate.py` shows whether tests notice them."""

import ast
import functools

import mutants
import mutate
import pytest

AREAS = mutants.by_area()
FILES = mutants.sources()


@functools.cache
def tree_of(file):
    return ast.dump(ast.parse(FILES[file]))


def check(mutant):
    file = mutants.place(mutant, FILES)
    mutants.suite(mutant)
    broken = FILES[file].replace(mutant.old, mutant.new)
    assert ast.dump(ast.parse(broken)) != tree_of(file), "changes nothing"


@pytest.mark.parametrize("area", AREAS)
def test_every_text_stands_once_and_its_replacement_is_other_code(area):
    wrong = []
    for mutant in AREAS[area]:
        try:
            check(mutant)
        except (ValueError, SyntaxError, AssertionError) as error:
            wrong.append(f"{mutant.name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("without", "verdict"), [(0, "killed"), (-11, "BROKEN")])
def test_a_crash_of_the_interpreter_is_noticed(monkeypatch, without, verdict):
    """Unless the tests crash without the mutant, too."""
    statuses = iter([-11, without])
    monkeypatch.setattr(mutate, "run_tests", lambda *_: (next(statuses), ""))
    assert mutate.kill(next(iter(AREAS.values()))[0]).startswith(verdict)
