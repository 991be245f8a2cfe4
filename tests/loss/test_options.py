"""Options of the loss: each alone, in pairs, in any subset, on both backends."""

import dataclasses
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import EXACT, SAME_SUMS, STATISTIC, errs_like
from support.coverage import counted
from support.params import QUICK_ON_TORCH, slow

from fusedce import fused_argmax, fused_ce, fused_cross_entropy, reference_ce
from fusedce.testing import OPTIONS, Case, cases, check

BACKENDS = ["torch", "triton"]
SMALL_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EVERY = (*OPTIONS, "class_weight")
ALL = ("hidden", "weight", "bias")


def summed(hidden, weight, labels, **options):
    """``fused_cross_entropy`` as a loss of ``fusedce.testing``: it has all options."""
    n_valid = (labels != options.get("ignore_index", -100)).sum()
    loss = counted(fused_cross_entropy)(hidden, weight, labels, reduction="sum", **options)
    return loss, n_valid


def summed_by_token(hidden, weight, labels, **options):
    """The same by token losses, whose backward computes the logits again."""
    n_valid = (labels != options.get("ignore_index", -100)).sum()
    loss = counted(fused_cross_entropy)(hidden, weight, labels, reduction="none", **options)
    return loss.sum(), n_valid


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(case=cases(options=EVERY), chunk_tokens=st.none() | st.integers(1, 17))
@pytest.mark.parametrize("fn", [summed, summed_by_token])
def test_any_subset_torch_matches_the_reference(fn, case, chunk_tokens):
    check(partial(fn, backend="torch", chunk_tokens=chunk_tokens), case)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    case=cases(dtypes=SMALL_FLOATS, options=EVERY, max_tokens=20, max_vocabulary=150),
    chunk_tokens=st.none() | st.integers(1, 9),
)
@pytest.mark.parametrize("fn", [summed, summed_by_token])
def test_any_subset_triton_matches_the_reference(fn, case, chunk_tokens):
    check(partial(fn, backend="triton", chunk_tokens=chunk_tokens), case)


OF_TENSORS = ("bias", "token_weight", "class_weight")
VALUES = {
    "softcap": 4.0, "logit_scale": -0.7, "ignore_index": 3, "label_smoothing": 0.2, "z_loss": 0.1,
}  # fmt: skip


PAIRS = list(combinations(EVERY, 2))
ROW_FACTORS = ("token_weight", "label_smoothing")  # of the gradient, one for each row


@pytest.mark.parametrize(
    ("backend", "pair"),
    [
        *(("torch", pair) for pair in PAIRS),
        *(("triton", p) if p == ROW_FACTORS else slow("triton", p) for p in PAIRS),
    ],
    ids=lambda x: x if isinstance(x, str) else "+".join(x),
)
def test_every_pair_matches_the_reference(backend, pair):
    """Cases have peaked and flat logits, gradients or none, and one chunk or several."""
    case = Case(
        (16,), 20, 300, ignored=0.2,
        with_bias="bias" in pair,
        options={name: VALUES[name] for name in pair if name not in OF_TENSORS},
        token_weight="token_weight" in pair,
        class_weight="class_weight" in pair,
    )  # fmt: skip
    everything = ALL if case.with_bias else ALL[:2]
    for logits, dtype, need in (
        ("flat", torch.bfloat16, everything),
        ("peaked", torch.float32, everything),
        ("peaked", torch.float32, ()),
    ):
        each = dataclasses.replace(case, logits=logits, dtype=dtype, requires_grad=need)
        check(partial(summed, backend=backend, chunk_tokens=10), each)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_factors_may_leave_its_range(backend):
    """Weights and z-loss make gradients of the logits of 1e5, and others of 1e-5, beside 1."""
    case = Case((30,), 16, 200, torch.float16, logits="peaked", options={"z_loss": 1e-4})
    hidden, weight, labels, _ = case.tensors()
    w = 10.0 ** torch.linspace(-5, 5, 30)

    def grads(fn, dtype, **options):
        h, m = (x.to(dtype).requires_grad_() for x in (hidden, weight))
        loss = fn(h, m, labels, token_weight=w, z_loss=0.01, **options).loss_sum
        return torch.autograd.grad(loss / 1e5, (h, m))

    ours = grads(fused_ce, torch.float16, backend=backend)
    exact = grads(reference_ce, torch.float64)
    for x, e in zip(ours, exact, strict=True):
        # several roundings of an entry: of its factor, its power of two, and the result
        assert (x.double() - e).norm() <= 4 * torch.finfo(torch.float16).eps * e.norm()

    def eager(h, m, y, token_weight, z_loss):
        z = F.linear(h, m)
        each = F.cross_entropy(z, y, reduction="none") + z_loss * z.logsumexp(-1) ** 2
        return SimpleNamespace(loss_sum=(token_weight * each).sum())

    # each token by its own size: the light ones are not lost beside the heavy ones
    wide, wide_eager = grads(fused_ce, torch.float32, backend=backend), grads(eager, torch.float32)
    of_tokens = [
        (x[0].double() - exact[0]).norm(dim=1) / exact[0].norm(dim=1) for x in (wide, wide_eager)
    ]
    assert of_tokens[0].max() <= 4 * of_tokens[1].max() + 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1},
                                     {"label_smoothing": 0.1, "softcap": 3.0}])  # fmt: skip
def test_a_token_of_weight_0_is_left_out_and_counts(backend, poison, options):
    hidden, weight, labels, _ = Case((30,), 12, 70).tensors()
    w = torch.rand(30, generator=torch.Generator().manual_seed(0)) - 0.3  # negative ones too
    w[::4] = 0

    def run(hidden, weight, n=30):
        hidden.requires_grad_()
        weight = weight.clone().requires_grad_()
        out = fused_ce(
            hidden, weight, labels, token_weight=w, backend=backend, chunk_tokens=7, **options
        )
        with torch.no_grad():
            forward = fused_ce(hidden, weight, labels, token_weight=w, backend=backend, **options)
        torch.testing.assert_close(forward.loss_sum, out.loss_sum)
        assert out.n_valid == forward.n_valid == n
        return out.loss_sum.detach(), *torch.autograd.grad(out.loss_sum, (hidden, weight))

    clean = run(hidden.clone(), weight)
    dirty = hidden.clone()
    dirty[w == 0] = poison
    got = run(dirty, weight)
    torch.testing.assert_close(got, clean, **EXACT)
    assert got[1][w == 0].eq(0).all()
    assert got[1][w != 0].ne(0).any(1).all()
    exact = reference_ce(hidden, weight, labels, token_weight=w, **options).loss_sum
    # weights have both signs: relative to the sum of the absolute values
    size = float(reference_ce(hidden, weight, labels, token_weight=w.abs(), **options).loss_sum)
    torch.testing.assert_close(got[0].double(), exact, rtol=0, atol=STATISTIC * size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("grad", [True, False])
def test_masked_classes_of_weight_0_are_no_target(backend, softcap, grad):
    """A logit of -inf is no target where its weight is 0: neither inf nor NaN comes of it."""
    hidden, weight, labels, _ = Case((30,), 12, 300).tensors()
    labels = labels % 100
    bias, c = torch.zeros(300), torch.ones(300)
    bias[100:], c[100:] = float("-inf"), 0
    if softcap is not None:
        bias[100:] = -1e30
    weight.requires_grad_(grad)
    options = {"label_smoothing": 0.2, "softcap": softcap}
    for fn in (summed, summed_by_token):
        loss, _ = fn(hidden, weight, labels, bias=bias, class_weight=c, backend=backend, **options)
        given, more = (hidden, weight, labels), {"bias": bias, "class_weight": c, **options}
        exact = reference_ce(*given, **more).loss_sum
        torch.testing.assert_close(loss.double(), exact, rtol=STATISTIC, atol=0)
        if grad:
            eager = reference_ce(*given, **more, dtype=torch.float32).loss_sum
            of_weight = (torch.autograd.grad(x, weight)[0] for x in (loss, eager, exact))
            errs_like(*of_weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"token_weight": torch.full((8,), 2.0)},
                                     {"z_loss": 0.1}])  # fmt: skip
def test_a_label_at_plus_inf_is_not_a_loss_of_0(backend, options):
    hidden, weight, labels, _ = Case((8,), 12, 70).tensors()
    bias = torch.zeros(70)
    bias[labels[3]] = float("inf")
    for grad in (True, False):
        loss = fused_ce(
            hidden, weight.requires_grad_(grad), labels[3:4].expand(8), bias=bias,
            backend=backend, **options,
        ).loss_sum  # fmt: skip
        assert loss.isnan()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_terms", [False, slow(True)])
@pytest.mark.parametrize("grad", [True, slow(False)])
def test_argmax_comes_at_no_second_pass(backend, with_terms, grad):
    """The argmax is right in training and evaluation, by chunks, tiles and blocks."""
    hidden, weight, labels, bias = Case(
        (3, 8), 16, 600, torch.bfloat16, ignored=0.3, with_bias=True
    ).tensors()
    # half of the labels are the likeliest class
    logits = hidden.nan_to_num().double() @ weight.double().T + bias.double()
    best = logits.argmax(-1)
    half = (torch.rand(3, 8) < 0.5) & (labels != -100)
    labels = torch.where(half, best, labels)
    options = {"token_weight": 1 + torch.rand(3, 8), "z_loss": 0.1} if with_terms else {}
    argmax = torch.full((8, 3), 77).t()
    out = fused_ce(
        hidden, weight.requires_grad_(grad), labels, bias=bias, backend=backend,
        chunk_tokens=12, argmax_out=argmax, **options,
    )  # fmt: skip
    assert argmax.eq(torch.where(labels == -100, -1, best)).all()
    plain = fused_ce(hidden, weight, labels, bias=bias, backend=backend, **options)
    torch.testing.assert_close(out.loss_sum, plain.loss_sum)
    everywhere = fused_argmax(hidden.nan_to_num(), weight, bias=bias, backend=backend)
    assert everywhere.eq(best).all()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_argmax_out_in_the_memory_of_labels(backend, grad):
    """Labels are read to the end before they are overwritten."""
    hidden, weight, labels, _ = Case((30,), 12, 70, ignored=0.3).tensors()
    weight.requires_grad_(grad)
    best = torch.empty_like(labels)
    right = fused_ce(hidden, weight, labels, backend=backend, argmax_out=best)
    shifted = torch.cat([labels[:1], labels])
    for read, argmax in ((labels.clone(),) * 2, (shifted[1:], shifted[:-1])):
        out = fused_ce(
            hidden, weight, read, backend=backend, argmax_out=argmax, monitor=("correct",)
        )
        torch.testing.assert_close(tuple(out), tuple(right), **EXACT)
        assert argmax.equal(best)
        assert out.monitors["correct"] == ((best == labels) & (labels != -100)).sum()


@pytest.mark.parametrize(
    "options",
    [{"monitor": ("entropy",)}, {"monitor": ("z_loss",)}, {"softcap": 5.0, "label_smoothing": 0.1}],
)
def test_backward_after_argmax_out_has_overwritten_the_labels(options):
    """These losses read the labels again in backward."""
    hidden, weight, labels, _ = Case((30,), 12, 70, ignored=0.3).tensors()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    right = torch.autograd.grad(fused_ce(*leaves, labels, **options)[0], leaves)
    shifted = torch.cat([labels[:1], labels])
    for read, argmax in ((labels.clone(),) * 2, (shifted[1:], shifted[:-1])):
        loss = fused_ce(*leaves, read, argmax_out=argmax, **options)[0]
        got = torch.autograd.grad(loss, leaves)
        for x, y in zip(got, right, strict=True):  # the argmax changes the order of sums
            torch.testing.assert_close(x, y, rtol=0, atol=SAME_SUMS * float(y.abs().max()))


def test_plain_means_plain():
    """Options at their neutral values take the plain way, bit by bit."""
    hidden, weight, labels, _ = Case((30,), 12, 70).tensors()
    weight.requires_grad_()
    plain = fused_ce(hidden, weight, labels).loss_sum
    neutral = fused_ce(
        hidden, weight, labels, label_smoothing=0.0, z_loss=0, token_weight=torch.ones(30)
    ).loss_sum
    torch.testing.assert_close(neutral, plain, **EXACT)
