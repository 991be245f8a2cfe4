"""The buffers of the gradients."""

import pytest
import torch

from fusedce.backends.gradients import Gradients, of_inputs, waiting
from fusedce.contract.problem import Problem, Wanted


def test_gradients_that_are_not_wanted_are_empty_on_the_device_of_the_inputs():
    """Shapes and dtypes are those of the operators' fake implementations."""
    x = torch.empty(3, 4, device="meta")
    problem = Problem(x, torch.empty(7, 4, device="meta"), x[:, 0].long())
    wanted = Wanted(hidden=False, weight=True, bias=False)
    grads = Gradients(problem, wanted, dtypes=of_inputs(problem), chunks=1).written()
    assert [grad.device.type for grad in grads] == ["meta"] * 3
    assert [tuple(grad.shape) for grad in grads] == [(0,), (7, 4), (0,)]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),  # whose range the gradient of a sum can leave
        (torch.float64, torch.float64),
    ],
)
def test_a_weights_gradient_waits_in_its_dtype(dtype, expected):
    x = torch.empty(3, 4, dtype=dtype, device="meta")
    assert waiting(Problem(x, x, x[:, 0].long())).weight == expected
