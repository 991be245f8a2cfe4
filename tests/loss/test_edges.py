"""Inputs at the edge: ignored values change nothing, and impossible calls are errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from support.bounds import STATISTIC, errs_like

from fusedce import fused_ce, fused_cross_entropy, fused_logprobs, reference_ce

BACKENDS = ["torch", "triton"]
N, H, V = 6, 8, 13


def inputs(dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng).to(dtype).requires_grad_()
    labels = torch.randint(1, V, (N,), generator=rng)
    labels[2] = -100
    return hidden, weight, labels


# ---- ignored positions contaminate nothing --------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 5.0}, {"z_loss": 0.1}])
def test_the_weight_of_an_ignored_position_may_be_anything(options, backend):
    hidden, weight, labels = inputs()
    token_weight = torch.linspace(0.5, 2, N)
    expected = reference_ce(hidden, weight, labels, token_weight=token_weight, **options).loss_sum
    wanted = torch.autograd.grad(expected, (hidden, weight))
    eager = {"token_weight": token_weight.clone(), "dtype": torch.float32, **options}
    of_eager = torch.autograd.grad(
        reference_ce(hidden, weight, labels, **eager).loss_sum, (hidden, weight)
    )
    token_weight[2] = math.nan
    options = {**options, "token_weight": token_weight, "backend": backend}
    with torch.no_grad():
        evaluated = fused_ce(hidden, weight, labels, **options).loss_sum
    trained = fused_ce(hidden, weight, labels, **options).loss_sum
    each = fused_cross_entropy(hidden, weight, labels, reduction="none", **options)
    assert each[2] == 0
    for loss in (evaluated, trained, each.sum()):
        torch.testing.assert_close(loss.double(), expected, rtol=STATISTIC, atol=0)
    for loss in (trained, each.sum()):
        grads = torch.autograd.grad(loss, (hidden, weight))
        errs_like(grads, of_eager, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_weight_of_an_absent_class_may_be_anything(reduction, backend):
    """1 / frequency of a class that never occurs; ignored labels are not of class 0 either."""
    hidden, weight, labels = inputs()
    class_weight = torch.linspace(0.5, 2, V)
    class_weight[0] = math.inf
    expected = F.cross_entropy(F.linear(hidden, weight), labels, class_weight, reduction=reduction)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            loss = fused_cross_entropy(
                hidden, weight, labels, class_weight=class_weight, reduction=reduction,
                backend=backend,
            )  # fmt: skip
        torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected.sum(), (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), (hidden, weight)), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_computed_where_nothing_is_valid(backend, monkeypatch):
    from fusedce.backends.torch.logit_tiles import Logits

    hidden, weight, labels = inputs()
    labels.fill_(-100)
    if backend == "torch":
        monkeypatch.setattr(Logits, "tile", None)
    with torch.no_grad():
        assert fused_ce(hidden, weight, labels, backend=backend).loss_sum == 0
    statistics = fused_logprobs(hidden, weight, labels, backend=backend)
    grads = torch.autograd.grad(statistics.logprob.sum(), (hidden, weight))
    assert not any(grad.any() for grad in grads)


# ---- impossible calls are errors ------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_beyond_float32_are_refused(backend):
    arguments = {**dict(zip(("hidden", "weight", "labels"), inputs(), strict=True))}
    arguments["backend"] = backend
    for name, value in (("softcap", 1e39), ("softcap", 1e-46), ("logit_scale", -1e39)):
        with pytest.raises(ValueError, match=f"{name} must be .*range of float32"):
            fused_ce(**arguments, **{name: value})
    for softcap in (1e-37, 1e38):
        loss = fused_ce(**arguments, softcap=softcap).loss_sum
        grads = torch.autograd.grad(loss, (arguments["hidden"], arguments["weight"]))
        assert all(torch.isfinite(x).all() for x in (loss, *grads))


def test_an_ignore_index_must_fit_the_labels():
    hidden, weight, labels = inputs()
    with pytest.raises(
        ValueError, match=r"ignore_index must fit the dtype of labels, torch\.int32"
    ):
        fused_ce(hidden, weight, labels.int(), ignore_index=2**40)
    with pytest.raises(ValueError, match="ignore_index must fit"):
        fused_ce(hidden, weight, labels, ignore_index=2**63)


def test_denominators_are_numbers_and_never_0():
    out = fused_ce(*inputs())
    own, whole = out.mean(), out.loss_sum
    assert own == whole / 5
    for number in (0, 0.0, torch.tensor(0), torch.tensor([0.0])):
        assert out.mean(number) == own
    for number in (0.5, torch.tensor(0.5)):
        assert out.mean(number) == whole
    assert out.mean(torch.tensor(20)) == out.mean(20) == whole / 20
    for number in (-3, math.nan, math.inf):
        with pytest.raises(ValueError, match="denominator must be"):
            out.mean(number)
    with pytest.raises(TypeError, match="denominator must be a number, got str"):
        out.mean("a")
