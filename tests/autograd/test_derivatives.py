"""Derivatives: exact in float64, scaled without a rounding, and refused where there is none."""

import pytest
import torch
from torch.autograd import forward_ad

from fusedce import fused_ce, fused_cross_entropy, fused_logprobs
from fusedce.backends import gradients
from fusedce.contract.denominator import expecting
from fusedce.testing import Case


def inputs(N=9, H=12, V=37, dtype=torch.float32):
    hidden, weight, labels, _ = Case((N,), H, V, dtype, ignored=0.3).tensors()
    return hidden.nan_to_num().requires_grad_(), weight.requires_grad_(), labels


def test_upstream_gradient_is_not_rounded_to_bf16(monkeypatch):
    """1/1234567 in bf16 is off by 0.1%, the same for every element of what waits in bf16."""
    monkeypatch.setattr(gradients, "SMALL_HEAD", 0)
    hidden, weight, labels = inputs(64, 32, 100, torch.bfloat16)
    with expecting(1.0):
        loss = fused_ce(hidden, weight, labels).loss_sum
    one = torch.autograd.grad(loss, weight, retain_graph=True)[0].double()
    small = torch.autograd.grad(loss / 1234567, weight)[0].double()
    assert abs((small * 1234567).norm() / one.norm() - 1) < 2e-4


def test_finite_differences_agree_in_float64():
    hidden, weight, labels = inputs(5, 4, 9, torch.float64)
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)

    def f(h, w, b):
        return fused_ce(h, w, labels, bias=b, softcap=2.0, logit_scale=0.7, chunk_tokens=2).loss_sum

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


def test_derivatives_that_do_not_exist_are_refused():
    hidden, weight, labels = (x.detach() for x in inputs())

    def loss(x):
        return fused_ce(x, weight, labels).loss_sum

    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(loss, (hidden,), (hidden,))
    for function in (loss, lambda x: fused_logprobs(x, weight, labels).logprob):
        with forward_ad.dual_level():
            with pytest.raises(RuntimeError, match="no forward-mode derivative"):
                function(forward_ad.make_dual(hidden, hidden))
            function(hidden)


def test_second_derivatives_of_token_losses_are_refused():
    hidden, weight, labels = inputs()
    loss = fused_cross_entropy(hidden, weight, labels, reduction="none").sum()
    with pytest.raises(RuntimeError, match="not differentiable"):
        torch.autograd.grad(loss, hidden, create_graph=True)
