"""Property tests against the fp64 reference, through what users get in fusedce.testing."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fusedce
from fusedce.backends import plan
from fusedce.testing import Case, assert_matches_reference, cases, check


@pytest.mark.hypothesis
@pytest.mark.parametrize("tile", [64, 2**20])
def test_torch_backend_matches_the_reference(tile, monkeypatch):
    # Tiles are never below 256 vocabulary rows in use; small ones put several into small cases.
    monkeypatch.setattr(plan, "tile_classes", lambda *_: tile)
    assert_matches_reference(partial(fusedce.fused_ce, backend="torch"), max_examples=150)


@settings(max_examples=100, deadline=None)
@given(case=cases(), chunk_tokens=st.integers(1, 17))
def test_torch_backend_in_chunks_matches_the_reference(case, chunk_tokens):
    check(partial(fusedce.fused_ce, backend="torch", chunk_tokens=chunk_tokens), case)


def test_the_reference_is_fp64_throughout():
    hidden, weight, labels, _ = Case(dtype=torch.float64).tensors()
    expected = F.cross_entropy(F.linear(hidden, weight), labels, label_smoothing=0.1)
    exact = fusedce.reference_ce(hidden, weight, labels, label_smoothing=0.1).mean()
    torch.testing.assert_close(exact, expected, rtol=16 * torch.finfo(torch.float64).eps, atol=0)


def test_a_log_sum_exp_may_be_rounded_at_its_own_size():
    """Logits of 0.5 beside log V = 4.8: two float64 roundings of a loss of 4.7."""
    options = {"logit_scale": 0.25, "label_smoothing": 0.1}
    case = Case((1,), 2, 127, torch.float64, contiguous=False, requires_grad=(), options=options)
    check(partial(fusedce.fused_ce, backend="torch"), dataclasses.replace(case, seed=1))


def test_the_check_can_fail():
    """The property tests fail for a wrong loss, a wrong count and a wrong gradient."""

    def zero_gradient(hidden, weight, labels, **options):
        out = fusedce.fused_ce(hidden, weight, labels, **options)
        return out.loss_sum.detach() + 0 * hidden.sum(), out.n_valid

    def scaled(hidden, weight, labels, **options):
        out = fusedce.fused_ce(hidden, weight, labels, **options)
        return out.loss_sum * 1.001, out.n_valid

    def one_too_many(hidden, weight, labels, **options):
        out = fusedce.fused_ce(hidden, weight, labels, **options)
        return out.loss_sum, out.n_valid + 1

    case = Case(leading=(7,), H=12, V=40, requires_grad=("hidden",))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(AssertionError, match="hidden: error"):
            check(zero_gradient, dataclasses.replace(case, dtype=dtype))
    with pytest.raises(AssertionError, match="loss_sum: error"):
        check(scaled, case)
    with pytest.raises(AssertionError, match="n_valid"):
        check(one_too_many, case)
    with pytest.raises(AssertionError):
        assert_matches_reference(scaled, max_examples=50)


@pytest.mark.parametrize(
    ("name", "dtype", "roundings"),
    [
        ("loss_sum", torch.float32, 10),
        *zip(("hidden", "weight", "bias"), [torch.float32] * 3, (110, 80, 180), strict=True),
        *zip(("hidden", "weight", "bias"), [torch.bfloat16] * 3, (4, 4, 5), strict=True),
    ],
)
def test_the_check_allows_a_few_roundings(name, dtype, roundings):
    """A tenth of so many passes; those of a float32 gradient are of its logits, too."""

    def off(part, hidden, weight, labels, bias):
        wrong = 1 + part * roundings * torch.finfo(dtype).eps
        if name != "loss_sum":
            given = {"hidden": hidden, "weight": weight, "bias": bias}
            given[name].register_hook(lambda grad: grad * wrong)
        out = fusedce.fused_ce(hidden, weight, labels, bias=bias)
        return (out.loss_sum * wrong if name == "loss_sum" else out.loss_sum), out.n_valid

    case = Case((7,), 12, 40, dtype, with_bias=True)
    check(partial(off, 0.1), case)
    with pytest.raises(AssertionError, match=f"{name}: error"):
        check(partial(off, 1.0), case)
