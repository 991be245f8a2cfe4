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
    ("dtype", "rows", "budget", "expected"),
    [
        (torch.bfloat16, 2**12, None, torch.float32),
        (torch.bfloat16, 2**12 + 1, None, torch.bfloat16),
        (torch.bfloat16, 2**12, 2**40, torch.bfloat16),
        (torch.float16, 2**12 + 1, 2**40, torch.float32),
        (torch.float64, 2**12, 2**40, torch.float64),
    ],
)
def test_a_small_heads_gradient_waits_wide_but_not_under_a_budget(dtype, rows, budget, expected):
    hidden = torch.empty(3, 2**12, dtype=dtype, device="meta")
    weight = torch.empty(rows, 2**12, dtype=dtype, device="meta")
    problem = Problem(hidden, weight, hidden[:, 0].long(), memory_budget=budget)
    assert waiting(problem).weight == expected
