"""The contract of fused_ce, clause by clause, on both backends."""

from functools import partial

import pytest
import torch
from support.bounds import STATISTIC
from support.params import QUICK_ON_TORCH

from fusedce import LossSum, fused_ce, fused_cross_entropy, reference_ce
from fusedce.testing import Case, check

BACKENDS = ["torch", "triton"]


def inputs(N=9, H=12, V=37):
    hidden, weight, labels, _ = Case((N,), H, V, ignored=0.3).tensors()
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("need", ["h", "w", "b", "hw", "hb", "wb", "hwb", ""])
def test_any_subset_of_gradients_is_given(backend, need):
    def loss(*tensors, **options):
        out = fused_ce(*tensors, backend=backend, **options)
        assert isinstance(out, LossSum)
        assert out.loss_sum.requires_grad == bool(need)
        return out

    names = {"h": "hidden", "w": "weight", "b": "bias"}
    requires_grad = tuple(names[x] for x in need)
    check(loss, Case((9,), 12, 37, ignored=0.3, with_bias=True, requires_grad=requires_grad))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_backward_is_right(backend):
    hidden, weight, labels = inputs()
    loss = fused_ce(hidden, weight, labels, backend=backend).mean()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    first = [x.clone() for x in first]
    second = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
    third = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(third, tuple(first), rtol=0, atol=0)
    torch.testing.assert_close(second, tuple(3 * x for x in first))


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_strides_and_narrow_labels_do_not_matter(backend):
    shape = {"leading": (2, 3, 4), "label_dtype": torch.int32, "contiguous": False}
    check(partial(fused_ce, backend=backend), Case(**shape, ignored=0.3, with_bias=True))
    hidden, weight, labels = inputs()
    columns = weight.detach().t().contiguous().t().requires_grad_()
    for x in (weight, columns):
        fused_ce(hidden, x, labels, backend=backend).loss_sum.backward()
    torch.testing.assert_close(columns.grad, weight.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_linear(backend, dtype):
    hidden, weight, labels = inputs()
    with torch.autocast("cpu", dtype):
        out = fused_ce(hidden, weight, labels, backend=backend)
        mixed = fused_ce(hidden.to(dtype), weight, labels, backend=backend)
    exact = reference_ce(hidden.to(dtype), weight.to(dtype), labels).loss_sum
    torch.testing.assert_close(out.loss_sum.double(), exact, rtol=STATISTIC, atol=0)
    torch.testing.assert_close(mixed.loss_sum, out.loss_sum)
    out.mean().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", [{"chunk_tokens": 17}, {"memory_budget": 6 * 2**20}])
def test_gradients_are_bitwise_repeatable(backend, way):
    def run():
        hidden, weight, labels = inputs(50, 24, 333)
        fused_ce(hidden, weight, labels, backend=backend, **way).mean().backward()
        return hidden.grad, weight.grad

    torch.testing.assert_close(run(), run(), rtol=0, atol=0)


def test_frequent_labels_are_added_in_one_order_by_any_number_of_threads():
    hidden, weight, _, _ = Case((512,), 576, 64, torch.bfloat16).tensors()
    weight.requires_grad_()
    labels = torch.arange(512) % 4
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = [
            torch.autograd.grad(fused_ce(hidden, weight, labels).loss_sum, weight)[0]
            for _ in range(30)
        ]
    finally:
        torch.set_num_threads(before)
    assert all(grad.equal(found[0]) for grad in found)


@pytest.mark.parametrize("logits", ["flat", "peaked"])
@pytest.mark.parametrize("chunk_tokens", [None, 40])
@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
def test_the_loss_of_bfloat16_is_as_exact_as_statistics(logits, chunk_tokens, backend):
    """At p -> 0.999, too. (Of gradients: test_gradient_errors.py.)"""
    for seed in range(3 if backend == "torch" else 1):  # the interpreter is slow
        case = Case((100,), 64, 1031, torch.bfloat16, logits=logits, seed=seed)
        hidden, weight, labels, _ = case.tensors()
        exact = reference_ce(hidden.double(), weight.double(), labels).loss_sum
        options = {"chunk_tokens": chunk_tokens, "backend": backend}
        for train in (False, True):
            got = fused_ce(hidden, weight.detach().requires_grad_(train), labels, **options)
            assert abs(got.loss_sum - exact) <= STATISTIC * exact


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_gradient_of_the_sum_may_overflow(backend):
    """It reaches 7e4 before the denominator arrives, and fits fp16 (up to 65504) after it."""
    hidden = torch.full((80, 4), 1000.0, dtype=torch.float16).requires_grad_()
    weight = torch.zeros(7, 4, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(80, dtype=torch.long)
    (fused_cross_entropy(hidden, weight, labels, reduction="sum", backend=backend) / 80).backward()
    exact = torch.full((7, 4), 1000 / 7)
    exact[0] -= 1000
    # a rounding of the sum that waits, and of each factor
    rounding = 2 * torch.finfo(torch.float16).eps
    torch.testing.assert_close(weight.grad.float(), exact, rtol=rounding, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_small_probabilities_keep_their_bits(backend):
    """Nearly all of a vocabulary has a probability that float16 holds with few bits or none."""
    hidden, weight, labels, _ = Case((20,), 24, 1031, torch.float16, logits="peaked").tensors()

    def grad(fn, dtype):
        w = weight.to(dtype).requires_grad_()
        loss = fn(hidden.to(dtype), w, labels).loss_sum
        return torch.autograd.grad(1e5 * loss, w)[0].double()

    others = torch.ones(1031, dtype=torch.bool)
    others[labels] = False
    got = grad(partial(fused_ce, backend=backend), torch.float16)[others]
    exact = grad(reference_ce, torch.float64)[others]
    error = (got - exact).norm(dim=1) / exact.norm(dim=1)  # row by row: most are far below the norm
    assert error.median() <= 2 * torch.finfo(torch.float16).eps  # of the entries and of their sum
