"""Every public loss refuses a bad argument in the same words, naming it."""

import inspect

import pytest
import torch
from support.bad_inputs import BAD, GOOD

from fusedce import fused_ce, fused_cross_entropy, fused_logprobs
from fusedce.contract.checks import check_problem, flattened
from fusedce.contract.problem import Problem

FUNCTIONS = {
    "fused_ce": (fused_ce, {}),
    "fused_cross_entropy": (fused_cross_entropy, {}),
    "of tokens": (fused_cross_entropy, {"reduction": "none"}),
    "fused_logprobs": (fused_logprobs, {}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_bad_argument_is_named_with_what_was_expected_and_given(name, backend):
    function, options = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    for change, error, message in BAD:
        if change.keys() <= parameters.keys():
            with pytest.raises(error, match=message):
                function(**GOOD | {"backend": backend} | options | change)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64],
)
def test_the_layers_below_get_weights_in_float32_or_better(dtype):
    """One kernel for all masks, not one for each dtype of a mask."""
    masks = (torch.tensor([1, 0, 1, 0]), torch.arange(10) % 2)  # of tokens, of classes
    token_weight, class_weight = (x.to(dtype) for x in masks)
    given = Problem(**GOOD, token_weight=token_weight, class_weight=class_weight)
    problem = flattened(check_problem(given))
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    for x, mask in zip((problem.token_weight, problem.class_weight), masks, strict=True):
        torch.testing.assert_close(x, mask.to(kept), rtol=0, atol=0)
