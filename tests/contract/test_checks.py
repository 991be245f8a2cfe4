"""Every public loss refuses a bad argument in the same words, naming it."""

import inspect

import pytest
import torch
from support.bad_inputs import BAD, GOOD

from fusedce import fused_argmax, fused_ce, fused_cross_entropy, fused_logprobs
from fusedce.contract.checks import checked
from fusedce.contract.problem import Problem

FUNCTIONS = (fused_ce, fused_cross_entropy, fused_logprobs)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_bad_argument_is_named_with_what_was_expected_and_given(function, backend):
    parameters = inspect.signature(function).parameters
    for change, error, message in BAD:
        if change.keys() <= parameters.keys():
            with pytest.raises(error, match=message):
                function(**GOOD | {"backend": backend} | change)


def test_options_of_token_losses_are_checked_there_too():
    for change, error, message in BAD:
        if "reduction" not in change and "argmax_out" not in change and "temperature" not in change:
            with pytest.raises(error, match=message):
                fused_cross_entropy(**GOOD | {"reduction": "none"} | change)


def test_an_argument_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="reduction"):
        fused_ce(**GOOD, reduction="sum")


def test_triton_refuses_fp64_with_the_reason():
    double = {k: x.double() if x.is_floating_point() else x for k, x in GOOD.items()}
    with pytest.raises(RuntimeError, match="float64"):
        fused_ce(**double, backend="triton")


def test_argmax_of_anything_else_is_refused():
    with pytest.raises(TypeError, match="hidden must be a tensor"):
        fused_argmax(None, torch.zeros(10, 8))
    with pytest.raises(ValueError, match="weight must be"):
        fused_argmax(torch.zeros(4, 8), torch.zeros(10, 9))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.float64])
def test_the_layers_below_get_weights_in_float32_or_better(dtype):
    """One kernel for all masks, not one for each dtype of a mask."""
    N, V = len(GOOD["labels"]), len(GOOD["weight"])
    weights = {"token_weight": torch.ones(N, dtype=dtype), "class_weight": torch.ones(V).to(dtype)}
    problem = checked(Problem(**GOOD, **weights))
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert (problem.token_weight.dtype, problem.class_weight.dtype) == (kept, kept)
