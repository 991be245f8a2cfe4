"""Label smoothing: ``p - s / V`` is rounded, not the probability ``p``."""

import pytest
import torch
from support.params import QUICK_ON_TORCH

from fusedce import fused_ce, reference_ce

BACKENDS = ["torch", "triton"]


def gradients(loss, tensors, labels, dtype, **options):
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    hidden, weight, bias = leaves
    out = loss(hidden, weight, labels, bias=bias, **options)
    return [g.double() for g in torch.autograd.grad(out.loss_sum, leaves)]


@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
@pytest.mark.parametrize("smoothing", [0.1, 0.9, 1.0])
@pytest.mark.parametrize("V", [2, 3, 40, 500])
@pytest.mark.parametrize("size", [1e-2, 1.0])
def test_errors_are_those_of_rounding_the_exact_gradient(backend, smoothing, V, size):
    """Nearly even probabilities less ``s / V`` are small, and make no more than three roundings.

    Of ``p - s / V``, of the hidden states with the tokens' factors, and of the gradient.
    """
    hidden, weight = torch.randn(24, 32).bfloat16(), (size * torch.randn(V, 32)).bfloat16()
    tensors = (hidden, weight, (size * torch.randn(V)).bfloat16())
    labels = torch.randint(V, (24,))
    exact = gradients(reference_ce, tensors, labels, torch.float64, label_smoothing=smoothing)
    got = gradients(
        fused_ce, tensors, labels, torch.bfloat16, label_smoothing=smoothing, backend=backend
    )
    for name, g, e in zip(("hidden", "weight"), got, exact, strict=False):
        once = (e.bfloat16().double() - e).norm()
        # Few elements may happen to round well: the mean relative error of a rounding at least.
        allowed = 3 * max(once, 1.6e-3 * e.norm())
        assert (g - e).norm() <= allowed, (name, (g - e).norm() / e.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_class_has_no_gradient(backend, smoothing, dtype):
    tensors = (torch.randn(5, 8), torch.randn(1, 8), torch.randn(1))
    labels = torch.zeros(5, dtype=torch.int64)
    got = gradients(fused_ce, tensors, labels, dtype, label_smoothing=smoothing, backend=backend)
    assert all(g.eq(0).all() for g in got)


@pytest.mark.parametrize("backend", BACKENDS)
def test_classes_of_their_own_weight(backend):
    """Smoothing follows torch with class weights, one of them 0 under a logit of -inf."""
    import torch.nn.functional as F

    from fusedce import fused_cross_entropy

    hidden = torch.randn(12, 16, requires_grad=True)
    weight = torch.randn(7, 16, requires_grad=True)
    labels, c = torch.randint(7, (12,)), torch.rand(7)
    options = {"label_smoothing": 0.4, "reduction": "sum"}
    got = fused_cross_entropy(hidden, weight, labels, class_weight=c, backend=backend, **options)
    exact = F.cross_entropy(F.linear(hidden, weight), labels, c, **options)
    torch.testing.assert_close(got, exact)
    torch.testing.assert_close(
        torch.autograd.grad(got, (hidden, weight)), torch.autograd.grad(exact, (hidden, weight))
    )
