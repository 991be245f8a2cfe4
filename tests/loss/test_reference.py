"""The reference in float64."""

import torch
import torch.nn.functional as F

from fusedce import reference_ce
from fusedce.testing import Case


def test_the_reference_is_fp64_throughout():
    hidden, weight, labels = Case(dtype=torch.float64).tensors()[:3]
    expected = F.cross_entropy(F.linear(hidden, weight), labels, label_smoothing=0.1)
    exact = reference_ce(hidden, weight, labels, label_smoothing=0.1).mean()
    torch.testing.assert_close(exact, expected, rtol=16 * torch.finfo(torch.float64).eps, atol=0)
