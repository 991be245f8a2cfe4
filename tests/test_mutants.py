"""The list of mutants is sound; `tests/mutate.py` shows whether tests notice them."""

import ast
import functools
from collections import Counter

import mutants
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


def test_a_name_belongs_to_one_mutant():
    names = Counter(mutant.name for area in AREAS.values() for mutant in area)
    assert [name for name, n in names.items() if n > 1] == []


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (mutants.Mutant("stale", "no such text", "pass", "test_labels.py"), "stands in no"),
        (mutants.Mutant("vague", "import torch\n", "pass\n", "test_labels.py"), "must stand once"),
        (mutants.Mutant("untested", "def shift_labels(", "def x(", "no_test.py"), "0 such"),
        (
            mutants.Mutant("unseen", "def shift_labels(", "def x(", "test_labels.py -k nobody"),
            "selects 'nobody'",
        ),
        (
            mutants.Mutant("same", "def shift_labels(", "def  shift_labels(", "test_labels.py"),
            "changes nothing",
        ),
        (mutants.Mutant("broken", "def shift_labels(", "def (", "test_labels.py"), "syntax"),
    ],
)
def test_an_unsound_mutant_is_found(mutant, message):
    with pytest.raises((ValueError, SyntaxError, AssertionError), match=message):
        check(mutant)
