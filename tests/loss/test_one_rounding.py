"""Gradients in bfloat16 are as exact as one rounding of the exact ones, for all options."""

import pytest
import torch
import torch.nn.functional as F
from support import rounding
from support.bounds import STATISTIC
from support.rounding import Draw

from fusedce import fused_ce, fused_cross_entropy, fused_logprobs, reference_ce
from fusedce.backends import gradients, mean_logit
from fusedce.backends.torch import logit_tiles, products

# In the median, and in one of a hundred.
BOUNDS = {"torch": (1.05, 1.1), "triton": (1.2, 2.8)}
# Allowed difference of a table computed anew: it has fewer draws, and CPUs add in other orders.
TOLERANCES = (0.02, 0.05)


@pytest.fixture
def exact_products(monkeypatch):
    """The product of this CPU; or else MKL's, also where AMX does not make it fast."""
    gemm = products.bf16_gemm() or products._checked(products.MKL)
    if gemm is None:
        pytest.skip("this torch has no MKL")
    monkeypatch.setattr(products, "bf16_gemm", lambda: gemm)


@pytest.fixture
def widened(monkeypatch):
    """The products of a CPU without AMX, whatever else it has."""
    monkeypatch.setattr(products, "bf16_gemm", lambda: None)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("backend", BOUNDS)
def test_every_option_and_pair_is_as_the_page_says(backend):
    found, stated = rounding.table(backend, seeds=1), rounding.stated(backend)
    assert list(found) == list(stated)
    for name, errors in found.items():
        limits = zip(errors, stated[name], BOUNDS[backend], TOLERANCES, strict=True)
        for error, says, bound, tolerance in limits:
            assert error <= bound, name
            assert abs(error - says) <= tolerance, name


@pytest.mark.parametrize("backend", BOUNDS)
def test_the_page_states_every_option_within_its_bounds(backend):
    rng = torch.Generator().manual_seed(0)
    stated = rounding.stated(backend)
    assert list(stated) == [name for name, _ in rounding.losses(torch.zeros(3).long(), 9, rng)]
    for errors in stated.values():
        assert all(1 <= x <= bound for x, bound in zip(errors, BOUNDS[backend], strict=True))


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("logits", ["flat", "peaked", "sharp"])
@pytest.mark.parametrize("shared", [0.0, 0.94])
def test_options_one_by_one_on_torch(logits, shared):
    for name, ratios in rounding.errors(Draw(logits, shared, True, 0), "torch"):
        assert max(ratios) <= 1.12, (name, ratios)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("logits", ["flat", "peaked", "sharp"])
def test_log_probabilities_from_several_tiles(monkeypatch, logits):
    """The likeliest class may lie in another tile than the label; tokens are two whole blocks."""
    monkeypatch.setattr("fusedce.backends.plan.tile_classes", lambda *_: 100)
    for name, ratios in rounding.errors(Draw(logits, 0.94, True, 0, N=128), "torch", "log-prob"):
        assert max(ratios) <= 1.12, (name, ratios)


@pytest.mark.parametrize("logits", ["peaked", "sharp"])
def test_log_probabilities_on_triton(logits):
    """Where rows of the head share a mean, what rounding takes of a row's sum shows.

    Eager, whose logits are bfloat16, errs 3.0 to 10 roundings there.
    """
    for name, ratios in rounding.errors(Draw(logits, 0.9, True, 0, 32, 32, 300), "triton", "log-p"):
        assert max(ratios) <= 3.0, (name, ratios)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("logits", ["flat", "peaked", "sharp"])
def test_without_amx_each_gradient_is_rounded_once(logits):
    """A product that is rounded before the labels' rows are taken away errs by 3 to 7 roundings."""
    for name, ratios in rounding.errors(Draw(logits, 0.9, True, 0), "torch"):
        assert max(ratios) <= 1.01, (name, ratios)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("amx", ["exact_products", "widened"])
@pytest.mark.parametrize("shared", [0.0, 0.9])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_hidden_states_that_share_a_mean_do_no_harm(
    request, monkeypatch, shared, amx, large, label_smoothing
):
    """Those of a class add up in the weight's gradient, and its label's is taken away from them.

    The gradient of a large head waits in bfloat16.
    """
    request.getfixturevalue(amx)
    if large:
        monkeypatch.setattr(gradients, "SMALL_HEAD", 0)
    errors = of_states_that_share_a_mean("torch", shared, label_smoothing=label_smoothing)
    assert max(errors) <= (1.01 if amx == "widened" else 1.05)


@pytest.mark.slow
@pytest.mark.parametrize(("large", "bound"), [(False, 1.1), (True, 2.3)])
def test_hidden_states_that_share_a_mean_on_triton(monkeypatch, large, bound):
    """There a large head's gradient is rounded before its labels' rows are taken away."""
    if large:
        monkeypatch.setattr(gradients, "SMALL_HEAD", 0)
    assert max(of_states_that_share_a_mean("triton", 0.9)) <= bound


def of_states_that_share_a_mean(backend, shared, **options):
    """Errors of the gradients of hidden states with a cosine of 0.9, and 8 labels of a class."""
    hidden, weight, _, labels, _ = Draw("flat", shared, False, 0, N=512, V=64).tensors()
    inputs = (hidden / 10**0.5 + 0.9**0.5).bfloat16(), weight

    def loss(h, w, backend):
        return fused_ce(h, w, labels, backend=backend, **options).mean()

    got = rounding._gradients(loss, inputs, torch.bfloat16, backend)
    exact = rounding._gradients(loss, inputs, torch.float64, "torch")
    return [rounding._over_once(x, e) for x, e in zip(got, exact, strict=True)]


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("statistic", ["lse", "entropy"])
@pytest.mark.parametrize("logits", ["flat", "peaked", "sharp"])
@pytest.mark.parametrize("shared", [0.0, 0.94])
def test_statistics_alone_on_torch(statistic, logits, shared):
    """No label's entry stands out, so rounding the entries errs as much as rounding their sum.

    The two are independent of each other: together they are a square root of 2.
    """
    hidden, weight, bias, labels, rng = Draw(logits, shared, True, 0).tensors()
    factors = torch.rand(len(labels), generator=rng) / len(labels)

    def loss(h, w, b, backend):
        stats = fused_logprobs(h, w, labels, bias=b, backend=backend)
        return (getattr(stats, statistic) * factors).sum()

    inputs = (hidden, weight, bias)
    got = rounding._gradients(loss, inputs, torch.bfloat16, "torch")
    exact = rounding._gradients(loss, inputs, torch.float64, "torch")
    ratios = [rounding._over_once(x, e) for x, e in zip(got, exact, strict=True)]
    assert max(ratios) <= (1.12 if logits == "sharp" else 2**0.5 * 1.05), ratios


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("shift", [300.0, -300.0])
def test_logits_far_from_zero(shift):
    """The exponentials' reference is not 0 there."""
    hidden, weight, _, labels, _ = Draw("peaked", 0.0, False, 0).tensors()
    bias = torch.full((len(weight),), shift).bfloat16()

    def loss(h, w, b, backend):
        return fused_ce(h, w, labels, bias=b, backend=backend).mean()

    inputs = (hidden, weight, bias)
    got = rounding._gradients(loss, inputs, torch.bfloat16, "torch")
    exact = rounding._gradients(loss, inputs, torch.float64, "torch")
    for x, e in list(zip(got, exact, strict=True))[:2]:
        assert rounding._over_once(x, e) <= 1.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("height", [25.0, 60.0, 200.0, 2000.0])
@pytest.mark.parametrize("masked", [False, True])
def test_a_logit_far_above_the_first_reference(monkeypatch, dtype, height, masked):
    """It is found where the sample did not look: at a class of the third tile, of some tokens."""
    monkeypatch.setattr(mean_logit, "SAMPLE", 2)
    monkeypatch.setattr("fusedce.backends.plan.tile_classes", lambda *_: 100)
    monkeypatch.setattr(logit_tiles, "_LEAST", 100)
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 32, generator=rng), torch.randn(430, 32, generator=rng) / 6
    hidden[:, 0] = torch.where(torch.arange(40) % 3 == 0, 1.0, 0.0)
    weight[:, 0] = 0
    weight[277, 0] = height
    weight[301, 0] = height - 1
    bias = torch.zeros(430)
    if masked:
        bias[:150] = -torch.inf
    labels = torch.randint(150, 430, (40,), generator=rng)
    labels[0], labels[3] = 277, 301
    inputs = [x.to(dtype) for x in (hidden, weight, bias)]

    def gradients(loss, kind, **options):
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        out = loss(*leaves[:2], labels, bias=leaves[2], **options)
        return [out.loss_sum.detach(), *torch.autograd.grad(out.loss_sum / 40, leaves)]

    exact = gradients(reference_ce, torch.float64)
    got = gradients(fused_ce, dtype, backend="torch")
    with torch.no_grad():
        evaluated = fused_ce(*inputs[:2], labels, bias=inputs[2], backend="torch").loss_sum
    for loss in (got[0], evaluated):
        torch.testing.assert_close(loss.double(), exact[0], rtol=2 * STATISTIC, atol=0)
    for x, e in zip(got[1:], exact[1:], strict=True):
        error = (x.double() - e).norm() / e.norm()
        assert error <= (1e-6 * max(height / 30, 1) if dtype == torch.float32 else 2.5e-3)


@pytest.mark.parametrize("labels", ["indices", "probabilities"])
def test_a_sum_needs_no_guess_of_its_factor(monkeypatch, labels):
    """Nobody divides it: a large head's gradient is made with the factor 1, not that of a mean."""
    monkeypatch.setattr(gradients, "SMALL_HEAD", 0)
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 16, generator=rng).bfloat16()
    weight = torch.randn(50, 16, generator=rng).bfloat16().requires_grad_()
    y = torch.tensor([4, 9, 30])
    given = F.one_hot(y, 50).bfloat16() if labels == "probabilities" else y
    (found,) = torch.autograd.grad(
        fused_cross_entropy(hidden, weight, given, reduction="sum"), weight
    )
    wide = weight.detach().double().requires_grad_()
    exact = F.cross_entropy(hidden.double() @ wide.T, y, reduction="sum")
    (exact,) = torch.autograd.grad(exact, wide)
    most = 1.05 * (exact.bfloat16().double() - exact).norm()
    if labels == "probabilities":  # whose labels' entries are rounded with the others: as eager's
        narrow = weight.detach().requires_grad_()
        eager = F.cross_entropy(F.linear(hidden, narrow).float(), y, reduction="sum")
        most = (torch.autograd.grad(eager, narrow)[0].double() - exact).norm()
    assert (found.double() - exact).norm() <= most
