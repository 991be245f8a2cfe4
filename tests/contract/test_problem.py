"""All loss functions, the reference and the tests' strategies have every option."""

import inspect

import pytest

from fusedce import FusedLinearCrossEntropyLoss, fused_ce, fused_cross_entropy, linear_cross_entropy
from fusedce.contract.problem import NUMBERS
from fusedce.loss.reference import reference_ce
from fusedce.sharded import sharded_ce, sharded_cross_entropy
from fusedce.testing import OPTIONS

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
    assert set(NUMBERS) <= set(OPTIONS)  # those that are drawn
