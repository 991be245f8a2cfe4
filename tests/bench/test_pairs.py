"""The suite over eager: each pair computes the same."""

import pytest
import torch
from lib import losses, problems


@pytest.mark.parametrize("name", losses.PAIRS)
def test_a_pair_computes_the_same(name):
    """With ignored labels, where the problem has some."""
    spec = problems.Spec(40, 16, 300, dtype="float32", ignored=0.25)
    found, expected = (f(*problems.make_inputs(spec)) for f in losses.PAIRS[name])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
