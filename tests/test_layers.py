"""Imports go down: no module imports a higher layer, and there are no circles."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the ground up; folders and files of one floor may import each other, circles apart.
FLOORS = (
    {"kernels"},
    {"contract", "measure", "agreement"},
    {"backends", "accumulate"},
    {"autograd"},
    {"loss", "sharded"},
    {"head", "testing", "recipes"},
    {"trainer", "trainer_rl", "logged_stats", "auditing"},
    {"__init__"},
    {"tools"},
    {"cli", "__main__"},
)


def modules():
    """``name: path`` of every module of the package, `kernels` through its symlink."""
    files = [*(ROOT / "fusedce").glob("**/*.py"), *(ROOT / "fusedce" / "kernels").glob("*.py")]
    named = {}
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imports_of(name, path, known):
    """Modules of the package that a file imports, wherever in it the statement stands."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                if inside in known:
                    yield inside
                elif base in known:
                    yield base


@pytest.fixture(scope="module")
def graph():
    known = modules()
    return {name: set(imports_of(name, path, known)) - {name} for name, path in known.items()}


def floor(name):
    part = name.split(".")[1] if "." in name else "__init__"
    return next((i for i, names in enumerate(FLOORS) if part in names), None)


def test_every_module_has_its_floor(graph):
    assert not [name for name in graph if floor(name) is None]


def test_nothing_imports_a_higher_floor(graph):
    up = [f"{a} -> {b}" for a, others in graph.items() for b in others if floor(b) > floor(a)]
    assert not up


def test_imports_have_no_circle(graph):
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the circle


def test_kernels_import_triton_and_each_other_alone():
    for file in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert {a.name.split(".")[0] for a in node.names} <= {"triton"}, file
            elif isinstance(node, ast.ImportFrom):
                assert node.level or node.module.split(".")[0] in ("triton", "__future__"), file
