"""A LossSum behaves as a sum; using it as a loss tensor is an error that says how to get one."""

import math

import numpy as np
import pytest
import torch
from torch.utils import _pytree

from fusedce import LossSum, fused_ce


def a_sum(value, n):
    return LossSum(torch.tensor(float(value), requires_grad=True), torch.tensor(n))


def numbers(out):
    assert isinstance(out, LossSum)
    return out.loss_sum.item(), int(out.n_valid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_with_a_dimension_does_not_lower_the_dtype(dtype):
    for out in (
        a_sum(2, 3) * torch.tensor([0.3], dtype=dtype),
        a_sum(2, 3) / torch.ones(1, dtype=dtype),
    ):
        assert (out.loss_sum.dtype, out.loss_sum.shape) == (torch.float32, ())


def test_losses_and_counts_are_added():
    a, b = a_sum(2, 3), a_sum(1, 4)
    assert numbers(a + b) == (3, 7)
    assert numbers(sum([a, b, a])) == (5, 10)
    hidden, weight = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)
    labels = torch.tensor([0, 1, -100, 3, 4, -100])
    parts = sum(fused_ce(hidden[i::2], weight, labels[i::2]) for i in range(2))
    whole = fused_ce(hidden, weight, labels)
    torch.testing.assert_close(parts.mean(), whole.mean())
    grads = [torch.autograd.grad(out.mean(), weight)[0] for out in (parts, whole)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("x", [2, 0.5, torch.tensor(4.0), np.float64(4), torch.ones(1).double()])
def test_a_factor_scales_the_loss_and_keeps_the_count(x):
    a = a_sum(2, 3)
    assert numbers(a * x) == numbers(x * a) == (2 * float(x), 3)
    assert numbers(a / x) == (2 / float(x), 3)
    assert numbers(-a) == (-2, 3)
    assert (a * x).loss_sum.shape == ()
    assert (a * x).loss_sum.dtype == torch.float32


ASKS_FOR_A_LOSS = [
    lambda a: a.backward(), lambda a: a.item(), lambda a: float(a), lambda a: a < 1.0,
    lambda a: a >= 1.0, lambda a: a > 1.0, lambda a: a <= 1.0, lambda a: a == 1.0,
    lambda a: a != 1, lambda a: a == torch.tensor(1.0), lambda a: torch.tensor(1.0) == a,
    lambda a: a in [2.0], lambda a: min(a, a_sum(1, 1)), lambda a: a + 1.0,
    lambda a: a + torch.tensor(1.0),
]  # fmt: skip
HAS_NO_MEANING = [
    lambda a: a * a, lambda a: 1 / a, lambda a: a * True, lambda a: a * torch.ones(0),
]  # fmt: skip


def test_what_asks_for_a_loss_is_told_how_to_get_one():
    for use in ASKS_FOR_A_LOSS:
        with pytest.raises(TypeError, match=r"LossSum\. .*\.mean\(\).*LossAccumulator"):
            use(a_sum(2, 3))
    for regulariser in (1.0, torch.tensor(1.0)):
        with pytest.raises(TypeError, match=r"regulariser.*add_auxiliary\(term\)"):
            a_sum(2, 3) + regulariser
    for use in HAS_NO_MEANING:
        with pytest.raises(TypeError, match="unsupported operand"):
            use(a_sum(2, 3))


def test_it_is_still_a_tuple_of_two():
    a = a_sum(2, 3)
    assert LossSum._fields == ("loss_sum", "n_valid")
    assert len(a) == 2
    same = LossSum(*a)
    assert a == same == tuple(a)
    assert a != a_sum(2, 4)
    assert a is not None
    assert a != None  # noqa: E711
    assert len({a, same}) == 1
    leaves, spec = _pytree.tree_flatten(a)
    assert isinstance(_pytree.tree_unflatten(leaves, spec), LossSum)


def test_a_denominator_is_a_number_and_never_0():
    out = a_sum(6, 3)
    for number in (None, 0, 0.0, torch.tensor(0), torch.tensor([0.0])):
        assert out.mean(number) == 2
    for number in (0.5, torch.tensor(0.5)):
        assert out.mean(number) == 6
    assert out.mean(torch.tensor(20)) == out.mean(20) == out.loss_sum / 20
    for n in (-1, -0.5):
        for denominator in (n, torch.tensor(n), torch.tensor([n])):
            with pytest.raises(ValueError, match=f"denominator must be at least 0 .*got {n}"):
                out.mean(denominator)
    for n in (math.nan, math.inf):
        with pytest.raises(ValueError, match="denominator must be"):
            out.mean(n)
    with pytest.raises(TypeError, match="denominator must be a number, got str"):
        out.mean("a")


def test_a_sum_is_not_formatted_as_a_number():
    out = a_sum(20, 10)
    with pytest.raises(TypeError, match=r"cannot be formatted by '\.3f'.*Use \.mean\(\)"):
        f"{out:.3f}"
    for text in (f"{out}", str(out), repr(2 * out)):
        assert "n_valid=tensor(10); .mean() is the loss per token" in text


def test_a_grad_scaler_gets_a_loss_and_no_sum():
    out = a_sum(20, 10)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(TypeError, match=r"a LossSum has two fields.*scaler\.scale\(acc\.scale"):
        scaler.scale(out)
    assert scaler.scale(out.mean()).item() == pytest.approx(out.mean().item() * 2**16)


@pytest.mark.parametrize("name", ["loss", "detach", "cpu", "requires_grad"])
def test_what_a_loss_has_and_a_sum_has_not(name):
    out = a_sum(20, 10)
    with pytest.raises(AttributeError, match=rf"a LossSum has no {name}.*Use \.mean\(\)"):
        getattr(out, name)
    assert not hasattr(out, "shape")
