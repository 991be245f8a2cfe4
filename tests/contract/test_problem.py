"""All loss functions, the reference and the tests' strategies have every option."""

import ast
import inspect
from pathlib import Path

import pytest

import fusedce
from fusedce import FusedLinearCrossEntropyLoss, fused_ce, fused_cross_entropy, linear_cross_entropy
from fusedce.contract.problem import NUMBERS
from fusedce.loss.reference import reference_ce
from fusedce.sharded import sharded_ce, sharded_cross_entropy
from fusedce.testing import OPTIONS

PACKAGE = Path(fusedce.__file__).parent
LOSSES = (
    fused_ce,
    fused_cross_entropy,
    linear_cross_entropy,
    FusedLinearCrossEntropyLoss,
    sharded_ce,
    sharded_cross_entropy,
    reference_ce,
)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_every_number_is_an_option_of_every_loss(loss):
    assert set(NUMBERS) <= inspect.signature(loss).parameters.keys()


def test_every_number_is_drawn():
    assert set(NUMBERS) <= set(OPTIONS)


def test_an_option_is_declared_in_the_record_and_the_signatures_alone():
    files = [file for file in PACKAGE.glob("**/*.py") if "kernels" not in file.parts]
    declared = {file.relative_to(PACKAGE).as_posix() for file in files
                if "z_loss" in set(declarations(ast.parse(file.read_text())))}  # fmt: skip
    assert declared == {
        "contract/problem.py",
        "loss/cross_entropy.py",
        "loss/fused_ce.py",
        "loss/names_of_peers.py",
        "loss/reference.py",
    }


def declarations(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.keyword)):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
