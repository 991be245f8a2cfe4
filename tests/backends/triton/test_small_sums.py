"""Calls of few tokens, all of whose logits exist: every option, rows left out, repeated labels."""

from functools import partial

import pytest
import torch

from fusedce import fused_ce
from fusedce.backends import triton as backend
from fusedce.contract.problem import Outputs, Problem
from fusedce.testing import Case, check, reference_ce

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
BOTH = ("hidden", "weight")
OPTIONS = {
    "plain": {},
    "scale": {"logit_scale": -0.7},
    "cap": {"softcap": 5.0},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.1},
    "all": {"logit_scale": 1.3, "softcap": 5.0, "label_smoothing": 0.2, "z_loss": 0.1},
}
small = partial(fused_ce, backend="triton")


@pytest.fixture(autouse=True)
def no_other_way(monkeypatch):
    monkeypatch.setattr(backend.sum_grads, "loss_and_grads", None)


@DTYPES
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("logits", ["flat", "peaked"])
def test_options(dtype, options, logits):
    """Weights are 0 for a quarter of the tokens; hidden states of ignored ones are NaN."""
    case = Case((40,), 64, 299, dtype, logits=logits, requires_grad=BOTH, options=OPTIONS[options])
    check(small, case)
    weighed = Case(
        (3, 15), 24, 2100, dtype, torch.int32, logits, ignored=0.3, requires_grad=BOTH,
        options=OPTIONS[options], token_weight=True,
    )  # fmt: skip
    check(small, weighed)


@DTYPES
@pytest.mark.parametrize(("N", "V"), [(1, 1), (1, 40), (100, 3), (130, 17)])
@pytest.mark.parametrize("need", [BOTH, ("hidden",), ("weight",)], ids="+".join)
def test_repeated_labels_and_one_gradient_alone(dtype, N, V, need):
    """A class of many rows, in several blocks of rows, is added up by one program."""
    check(small, Case((N,), 40, V, dtype, ignored=0.1 * (N > 1), requires_grad=need))


@DTYPES
def test_rows_of_any_stride(dtype):
    """Rows of a wider tensor, as slices of a sequence are, have the bits of contiguous ones."""
    hidden, weight, labels, _ = Case((40,), 24, 70, dtype, ignored=0.3).tensors()
    found = []
    for h, w in (
        (torch.cat([hidden, hidden], 1)[:, :24], torch.cat([weight, weight], 1)[:, :24]),
        (hidden, weight),
    ):
        leaves = h.detach().requires_grad_(), w.detach().requires_grad_()
        loss = small(*leaves, labels).mean()
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@DTYPES
def test_a_token_of_weight_0_may_hold_anything(dtype):
    """It counts, and neither it nor what it holds is in a gradient."""
    hidden, weight, labels, _ = Case((40,), 24, 70, dtype).tensors()
    w = torch.linspace(-0.5, 2, 40)
    w[::4] = 0
    found = []
    for filled in (float("nan"), 1.0):
        h = hidden.masked_fill((w == 0)[:, None], filled).requires_grad_()
        leaves = h, weight.detach().requires_grad_()
        out = small(*leaves, labels, token_weight=w, z_loss=0.1)
        assert out.n_valid == 40
        found.append((out.loss_sum.detach(), *torch.autograd.grad(out.loss_sum, leaves)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert found[0][1][w == 0].eq(0).all()


@DTYPES
def test_nothing_valid(dtype):
    """Gradients are 0, also beside a weight that is NaN."""
    hidden, weight, labels, _ = Case((20,), 24, 70, dtype, ignored=1.0).tensors()
    problem = Problem(hidden, weight.fill_(torch.nan), labels)
    found = backend.small_sums.loss_and_grads(problem, Outputs(hidden=True, weight=True))
    assert (float(found.loss), int(found.n_valid)) == (0, 0)
    assert not found.d_hidden.any()
    assert not found.d_weight.any()


def test_a_bad_label_is_named():
    hidden, weight, labels, _ = Case((20,), 24, 70).tensors()
    for bad in (-7, 70):
        labels[5] = bad
        with pytest.raises(ValueError, match=f"got {bad} at flattened position 5"):
            small(hidden, weight.requires_grad_(), labels)


@DTYPES
def test_the_likeliest_classes_beside_a_smoothed_sum(dtype):
    """In the memory of the labels, too: smoothing is not lost."""
    hidden, weight, labels, _ = Case((20,), 24, 70, dtype, ignored=0.3).tensors()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    alone = small(*leaves, labels, label_smoothing=0.2, softcap=5.0)
    best = (hidden.nan_to_num().double() @ weight.double().T).argmax(1)
    best[labels == -100] = -1
    for argmax in (torch.empty_like(labels), labels):
        given = {"label_smoothing": 0.2, "softcap": 5.0, "argmax_out": argmax}
        torch.testing.assert_close(tuple(small(*leaves, labels, **given)), tuple(alone))
        assert argmax.equal(best)


def test_compiled():
    """A compiled call goes by the operator, none of whose results may share memory."""
    case = Case((8,), 16, 50, requires_grad=("hidden",), options=OPTIONS["all"])
    check(torch.compile(small, backend="aot_eager", fullgraph=True), case)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_of_frequent_labels_are_rounded_once(smoothing):
    """Hidden states share a mean, labels are as likely as the head says: a row's parts cancel."""
    hidden = (torch.randn(16) + 0.3 * torch.randn(400, 16)).bfloat16()
    weight = (0.05 * torch.randn(8, 16)).bfloat16()
    labels = torch.multinomial((hidden.double() @ weight.double().T).softmax(1), 1).flatten()
    found = []
    for f, dtype in ((small, torch.bfloat16), (reference_ce, torch.float64)):
        w = weight.to(dtype).requires_grad_()
        loss = f(hidden.to(dtype), w, labels, label_smoothing=smoothing).mean()
        found.append(torch.autograd.grad(loss, w)[0].double())
    ours, exact = found
    rounding = (exact.bfloat16().double() - exact).norm()
    assert (ours - exact).norm() <= 2 * rounding
