"""Derivatives are exact in float64, scaled without a rounding, and errors where there is none."""

import sys
import threading

import pytest
import torch
from support.bounds import EXACT, SAME_SUMS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from fusedce import (
    count_valid,
    fused_ce,
    fused_cross_entropy,
    fused_kl,
    fused_kl_tokens,
    fused_logprobs,
    shift_labels,
)
from fusedce.contract.objective import expecting
from fusedce.testing import Case


def inputs(N=9, H=12, V=37, dtype=torch.float32):
    hidden, weight, labels, _ = Case((N,), H, V, dtype, ignored=0.3).tensors()
    return hidden.nan_to_num().requires_grad_(), weight.requires_grad_(), labels


def test_upstream_gradient_is_not_rounded_to_bf16():
    """1/1234567 in bf16 is off by 0.1%, the same for every element of what waits in bf16."""
    hidden, weight, labels = inputs(64, 32, 100, torch.bfloat16)
    with expecting(1.0):
        loss = fused_ce(hidden, weight, labels).loss_sum
    one = torch.autograd.grad(loss, weight, retain_graph=True)[0].double()
    small = torch.autograd.grad(loss / 1234567, weight)[0].double()
    # 3200 roundings of 2**-9 in all directions leave less than a tenth of bf16's error above
    assert abs((small * 1234567).norm() / one.norm() - 1) < 2e-4


def test_upstream_gradient_is_not_rounded_to_float32():
    hidden, weight, labels = inputs(64, 32, 100, torch.float64)
    with expecting(1.0):
        loss = fused_ce(hidden, weight, labels).loss_sum
    leaves = (hidden, weight)
    ones = torch.autograd.grad(loss, leaves, retain_graph=True)
    for one, part in zip(ones, torch.autograd.grad(loss / 1234567, leaves), strict=True):
        torch.testing.assert_close(part * 1234567, one, rtol=4 * torch.finfo(one.dtype).eps, atol=0)


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


@pytest.mark.parametrize("name", ["token_weight", "class_weight", "temperature"])
def test_tangents_of_weights_and_temperatures_are_refused(name):
    hidden, weight, labels = (x.detach() for x in inputs())
    size = len(weight) if name == "class_weight" else len(labels)
    functions = {
        "token_weight": [fused_ce, fused_cross_entropy, fused_kl],
        "class_weight": [fused_cross_entropy],
        "temperature": [fused_logprobs],
    }
    for function in functions[name]:
        teacher = (hidden / 2, weight) if function is fused_kl else ()
        given = torch.full((size,), 1.5)
        function(hidden, weight, *teacher, labels, **{name: given})
        with forward_ad.dual_level():
            given = forward_ad.make_dual(given, torch.ones(size))
            with pytest.raises(RuntimeError, match="no forward-mode derivative"):
                function(hidden, weight, *teacher, labels, **{name: given})


def test_a_tangent_of_class_probabilities_is_refused():
    hidden, weight, _ = (x.detach() for x in inputs())
    given = torch.rand(len(hidden), len(weight))
    with forward_ad.dual_level():
        with pytest.raises(ValueError, match="must not require grad, or have a tangent"):
            fused_cross_entropy(hidden, weight, forward_ad.make_dual(given, given))
        fused_cross_entropy(hidden, weight, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_several_factors_at_once(dtype):
    """``is_grads_batched`` gives the gradients of one factor after another."""
    hidden, weight, labels = inputs(dtype=dtype)
    teacher = (hidden.detach() / 2, weight.detach())
    several = labels[:, None].expand(-1, 2).clamp(min=0)
    losses = (
        fused_ce(hidden, weight, labels).loss_sum,
        fused_ce(hidden, weight, labels).mean(),
        fused_cross_entropy(hidden, weight, labels, reduction="none"),
        fused_logprobs(hidden, weight, several).logprob,
        fused_kl(hidden, weight, *teacher, labels).mean(),
        fused_kl_tokens(hidden, weight, *teacher, labels),
    )
    for loss in losses:
        factors = torch.randn(3, *loss.shape)
        one_by_one = [
            torch.autograd.grad(loss, (hidden, weight), x, retain_graph=True) for x in factors
        ]
        at_once = torch.autograd.grad(loss, (hidden, weight), factors, is_grads_batched=True)
        for i, grads in enumerate(one_by_one):
            eps = max(torch.finfo(dtype).eps, SAME_SUMS)
            for x, y in zip(at_once, grads, strict=True):
                torch.testing.assert_close(x[i], y, rtol=eps, atol=eps * float(y.abs().max()))


def test_values_of_fake_tensors_are_not_asked_for():
    with FakeTensorMode():
        hidden, weight, labels = torch.empty(9, 12), torch.empty(37, 12), torch.zeros(9).long()
        stats = fused_logprobs(hidden, weight, labels, temperature=torch.ones(9))
        assert stats.logprob.shape == (9,)
        borders = torch.tensor([0, 4, 9])
        assert shift_labels(labels, cu_seqlens=borders).shape == (9,)
        assert count_valid(labels, cu_seqlens=borders).shape == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("K", [None, 2])
def test_statistics_are_of_one_dtype(dtype, K):
    """The dtype of the temperature does not change theirs."""
    hidden, weight, labels = inputs(dtype=dtype)
    labels = labels if K is None else labels[:, None].expand(-1, K)
    t = torch.full((9,), 1.3, dtype=torch.float64)
    stats = fused_logprobs(hidden, weight, labels, temperature=t)
    wide = torch.promote_types(dtype, torch.float32)
    assert stats.logprob.dtype == stats.lse.dtype == stats.entropy.dtype == wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_users_hooks_hand_back_is_left_as_it_is(dtype):
    hidden, weight, labels = inputs(dtype=dtype)
    teacher = (hidden.detach() / 2, weight.detach())
    losses = (
        lambda: fused_ce(hidden, weight, labels).loss_sum * 3,
        lambda: fused_cross_entropy(hidden, weight, labels, reduction="none").sum(),
        lambda: fused_logprobs(hidden, weight, labels).logprob.sum(),
        lambda: fused_kl(hidden, weight, *teacher, labels).loss_sum * 3,
    )
    for loss in losses:
        kept = []

        def pack(x, kept=kept):
            kept.append((x, x.clone()))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = loss()
        got = torch.autograd.grad(out, (hidden, weight))
        assert kept
        assert all(x.equal(before) for x, before in kept)
        torch.testing.assert_close(got, torch.autograd.grad(loss(), (hidden, weight)))


@pytest.mark.parametrize("name", ["sum", "none", "entropy"])
def test_threads_differentiate_one_graph(name):
    """``retain_graph`` lets several threads do so, and each gets the whole gradient.

    torch 2.13 shortens ``ctx.needs_input_grad`` of a custom operator while its backward runs, for
    all threads, and a thread that meets a shorter one leaves that one behind.
    """
    hidden, weight = torch.randn(9, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    labels = torch.randint(7, (9,))
    losses = {
        "sum": lambda: fused_ce(hidden, weight, labels).loss_sum,
        "none": lambda: fused_cross_entropy(hidden, weight, labels, reduction="none").sum(),
        "entropy": lambda: fused_logprobs(hidden, weight, labels).entropy.sum(),
    }
    loss = losses[name]()
    expected = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    found, threads = [], 8
    together = threading.Barrier(threads)

    def work():
        together.wait()
        for _ in range(20):
            found.append(torch.autograd.grad(loss, (hidden, weight), retain_graph=True))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = [threading.Thread(target=work) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 20 * threads
    for grads in found:
        torch.testing.assert_close(grads, expected, **EXACT)
