"""Inputs at the edge: what is ignored changes nothing, and what is not finite is not hidden."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.bounds import EXACT, STATISTIC, errs_like
from support.params import slow

from fusedce import fused_ce, fused_cross_entropy, fused_kl, fused_logprobs, reference_ce
from fusedce.backends.torch.logit_tiles import Logits
from fusedce.testing import Case

BACKENDS = ["torch", "triton"]
N, H, V = 6, 8, 13


def inputs(n=N):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, H, generator=rng).requires_grad_()
    weight = torch.randn(V, H, generator=rng).requires_grad_()
    labels = torch.randint(1, V, (n,), generator=rng)
    labels[2:3] = -100
    return hidden, weight, labels


def evaluated_and_trained(loss):
    """The loss without gradients, then with them."""
    with torch.no_grad():
        without = loss()
    return without, loss()


# ---- ignored positions contaminate nothing --------------------------------------------------

LOSSES = {
    "fused_ce": lambda *x, **o: fused_ce(*x, **o).mean(),
    "with options": lambda *x, **o: fused_ce(*x, softcap=5.0, z_loss=0.1, **o).mean(),
    **{
        reduction: lambda *x, reduction=reduction, **o: fused_cross_entropy(
            *x, class_weight=torch.linspace(0, 1, V), label_smoothing=0.1, reduction=reduction, **o
        )
        for reduction in ("mean", "sum", "none")
    },
    "fused_logprobs": lambda *x, **o: sum(fused_logprobs(*x, **o)[:3]),
    "fused_kl": lambda h, w, y, **o: fused_kl(h, w, h.detach(), w.detach(), y, **o).mean(),
}
SUMS = fused_ce, lambda h, w, y, **o: fused_kl(h, w, h.detach(), w.detach(), y, **o)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("n", [0, 5])
def test_nothing_valid_is_0_with_gradients_of_0(monkeypatch, backend, name, n):
    """Where torch says NaN; the torch backend computes no logit."""
    monkeypatch.setattr(Logits, "tile", None)
    hidden, weight, labels = inputs(n)
    with torch.no_grad():
        hidden.fill_(math.nan)
    labels.fill_(-100)
    given = hidden, weight, labels
    for loss in evaluated_and_trained(lambda: LOSSES[name](*given, backend=backend)):
        assert loss.eq(0).all()
    for grad in torch.autograd.grad(loss.sum(), (hidden, weight)):
        assert grad.eq(0).all()
    assert fused_ce(*given, backend=backend).n_valid == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("summed", SUMS, ids=["fused_ce", "fused_kl"])
def test_nothing_valid_over_0_tokens_has_gradients_of_0(backend, dtype, summed):
    """As of torch: the loss is NaN, and training goes on."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in inputs(5)[:2])
    loss = summed(hidden, weight, torch.full((5,), -100), backend=backend)[0] / 0
    for keep in (True, False):
        for grad in torch.autograd.grad(loss, (hidden, weight), retain_graph=keep):
            assert grad.eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 5.0}, {"z_loss": 0.1}])
def test_the_weight_of_an_ignored_position_may_be_anything(options, backend):
    hidden, weight, labels = inputs()
    leaves = hidden, weight
    options = {**options, "token_weight": torch.linspace(0.5, 2, N)}
    exact = reference_ce(*leaves, labels, **options).loss_sum
    eager = reference_ce(*leaves, labels, **options, dtype=torch.float32).loss_sum
    exact_grads, of_eager = (torch.autograd.grad(x, leaves) for x in (exact, eager))
    options["token_weight"][2] = math.nan
    losses = (
        lambda: fused_ce(*leaves, labels, backend=backend, **options).loss_sum,
        lambda: fused_cross_entropy(*leaves, labels, reduction="none", backend=backend, **options),
    )
    for loss in losses:
        for each in evaluated_and_trained(loss):
            torch.testing.assert_close(each.sum().double(), exact, rtol=STATISTIC, atol=0)
        errs_like(torch.autograd.grad(each.sum(), leaves), of_eager, exact_grads)
    assert each[2] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_weight_of_an_absent_class_may_be_anything(reduction, backend):
    """1 / frequency of a class that never occurs; ignored labels are not of class 0 either."""
    hidden, weight, labels = inputs()
    class_weight = torch.linspace(0.5, 2, V)
    class_weight[0] = math.inf
    expected = F.cross_entropy(F.linear(hidden, weight), labels, class_weight, reduction=reduction)
    options = {"class_weight": class_weight, "reduction": reduction, "backend": backend}
    for loss in evaluated_and_trained(
        lambda: fused_cross_entropy(hidden, weight, labels, **options)
    ):
        torch.testing.assert_close(loss, expected)
    grads = (torch.autograd.grad(x.sum(), (hidden, weight)) for x in (loss, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("backend", "poison"),
    [("torch", math.nan), ("torch", math.inf), ("triton", math.nan), slow("triton", math.inf)],
)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1},
                                     {"label_smoothing": 0.1, "softcap": 3.0}])  # fmt: skip
def test_a_token_of_weight_0_is_left_out_and_counts(backend, poison, options):
    hidden, weight, labels, _ = Case((30,), 12, 70).tensors()
    w = torch.rand(30, generator=torch.Generator().manual_seed(0)) - 0.3  # negative ones too
    w[::4] = 0

    def run(hidden):
        leaves = hidden.requires_grad_(), weight.clone().requires_grad_()
        forward, out = evaluated_and_trained(
            lambda: fused_ce(
                *leaves, labels, token_weight=w, backend=backend, chunk_tokens=7, **options
            )
        )
        torch.testing.assert_close(forward.loss_sum, out.loss_sum)
        assert out.n_valid == forward.n_valid == 30
        return out.loss_sum.detach(), *torch.autograd.grad(out.loss_sum, leaves)

    got = run(hidden.masked_fill((w == 0)[:, None], poison))
    torch.testing.assert_close(got, run(hidden.clone()), **EXACT)
    assert got[1][w == 0].eq(0).all()
    assert got[1][w != 0].ne(0).any(1).all()
    exact = reference_ce(hidden, weight, labels, token_weight=w, **options).loss_sum
    # weights have both signs: relative to the sum of the absolute values
    size = float(reference_ce(hidden, weight, labels, token_weight=w.abs(), **options).loss_sum)
    torch.testing.assert_close(got[0].double(), exact, rtol=0, atol=STATISTIC * size)


# ---- logits and hidden states that are not finite -------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_in_a_valid_row_is_not_hidden(backend, poison):
    hidden, weight, labels = inputs()
    with torch.no_grad():
        hidden[1, 0] = poison
    for loss in evaluated_and_trained(lambda: fused_ce(hidden, weight, labels, backend=backend)):
        assert not loss.loss_sum.isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_masked_class_has_no_part(backend, softcap, smoothing):
    """A logit of -inf has probability 0, and is no target of smoothing where its weight is 0."""
    hidden, weight, labels, _ = Case((30,), 12, 300).tensors()
    bias, c = torch.zeros(300), torch.ones(300)
    bias[100:], c[100:] = -math.inf if softcap is None else -1e30, 0
    weight.requires_grad_()
    given = hidden, weight, labels % 100
    options = {"bias": bias, "label_smoothing": smoothing, "softcap": softcap}
    options |= {"class_weight": c} if smoothing else {}
    exact = reference_ce(*given, **options).loss_sum
    eager = reference_ce(*given, **options, dtype=torch.float32).loss_sum
    of_weight = [torch.autograd.grad(x, weight, retain_graph=True)[0] for x in (eager, exact)]
    for reduction in ("sum", "none"):
        for loss in evaluated_and_trained(
            lambda reduction=reduction: fused_cross_entropy(
                *given, reduction=reduction, backend=backend, **options
            ).sum()
        ):
            torch.testing.assert_close(loss.double(), exact, rtol=STATISTIC, atol=0)
        errs_like(torch.autograd.grad(loss, weight)[0], *of_weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"token_weight": torch.full((8,), 2.0)},
                                     {"z_loss": 0.1}])  # fmt: skip
def test_a_label_at_plus_inf_is_not_a_loss_of_0(backend, options):
    hidden, weight, labels, _ = Case((8,), 12, 70).tensors()
    bias = torch.zeros(70)
    bias[labels[3]] = math.inf
    given = hidden, weight.requires_grad_(), labels[3:4].expand(8)
    for loss in evaluated_and_trained(
        lambda: fused_ce(*given, bias=bias, backend=backend, **options)
    ):
        assert loss.loss_sum.isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [1e-37, 1e38])
def test_a_soft_cap_at_the_end_of_float32_is_finite(backend, softcap):
    hidden, weight, labels = inputs()
    loss = fused_ce(hidden, weight, labels, softcap=softcap, backend=backend).loss_sum
    for x in (loss, *torch.autograd.grad(loss, (hidden, weight))):
        assert x.isfinite().all()
