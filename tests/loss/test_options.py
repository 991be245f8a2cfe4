"""Options of the loss: each alone, in pairs, in any subset, on both backends."""

import dataclasses
from functools import partial
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import SAME_SUMS, in_float64
from support.oracle import by_token, summed
from support.params import QUICK_ON_TORCH, slow

from fusedce import fused_argmax, fused_ce, reference_ce
from fusedce.backends import plan
from fusedce.testing import NUMBERS, OPTIONS, Case, cases, check

BACKENDS = ["torch", "triton"]
SMALL_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EVERY = (*OPTIONS, "class_weight")
ALL = ("hidden", "weight", "bias")


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(case=cases(options=EVERY), chunk_tokens=st.none() | st.integers(1, 17))
@pytest.mark.parametrize("fn", [summed, by_token])
def test_any_subset_torch_matches_the_reference(fn, case, chunk_tokens):
    check(partial(fn, backend="torch", chunk_tokens=chunk_tokens), case)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    case=cases(dtypes=SMALL_FLOATS, options=EVERY, max_tokens=20, max_vocabulary=150),
    chunk_tokens=st.none() | st.integers(1, 9),
)
@pytest.mark.parametrize("fn", [summed, by_token])
def test_any_subset_triton_matches_the_reference(fn, case, chunk_tokens):
    check(partial(fn, backend="triton", chunk_tokens=chunk_tokens), case)


OF_TENSORS = ("bias", "token_weight", "class_weight")
VALUES = {name: values[-1] for name, values in NUMBERS.items()}
VALUES |= {
    "softcap": 4.0,
    "logit_scale": -0.7,
    "label_smoothing": 0.2,
    "z_loss": 0.1,
    "ignore_index": 3,
}


PAIRS = list(combinations(EVERY, 2))
ROW_FACTORS = [("token_weight", x) for x in ("label_smoothing", "z_loss")]  # of the gradient


@pytest.mark.parametrize(
    ("backend", "pair"),
    [
        *(("torch", pair) for pair in PAIRS),
        *(("triton", p) if p in ROW_FACTORS else slow("triton", p) for p in PAIRS),
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
    hidden, weight, labels, _ = Case((30,), 16, 200, torch.float16, logits="peaked").tensors()
    w = 10.0 ** torch.linspace(-5, 5, 30)

    def grads(fn, dtype, **options):
        h, m = (x.to(dtype).requires_grad_() for x in (hidden, weight))
        loss = fn(h, m, labels, token_weight=w, z_loss=0.01, **options).loss_sum
        return torch.autograd.grad(loss / 1e5, (h, m))

    exact = grads(reference_ce, torch.float64)
    for x, e in zip(grads(fused_ce, torch.float16, backend=backend), exact, strict=True):
        # several roundings of an entry: of its factor, its power of two, and the result
        assert (x.double() - e).norm() <= 4 * torch.finfo(torch.float16).eps * e.norm()
    # each token by its own size: the light ones are not lost beside the heavy ones
    wide = grads(fused_ce, torch.float32, backend=backend)
    eager = grads(partial(reference_ce, dtype=torch.float32), torch.float32)
    ours, theirs = ((x[0] - exact[0]).norm(dim=1) / exact[0].norm(dim=1) for x in (wide, eager))
    assert ours.max() <= 4 * theirs.max() + 4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
@pytest.mark.parametrize("smoothing", [0.1, 0.9, 1.0])
@pytest.mark.parametrize("V", [2, 3, 40, 500])
def test_smoothing_errs_as_rounding_the_exact_gradient_does(backend, smoothing, V):
    """Nearly even probabilities less ``s / V`` are small, and make no more than three roundings.

    Of ``p - s / V``, of the hidden states with the tokens' factors, and of the gradient.
    """
    labels = torch.randint(V, (24,))
    for size in (1e-2, 1.0):
        leaves = [torch.randn(24, 32), size * torch.randn(V, 32), size * torch.randn(V)]
        leaves = [x.bfloat16().requires_grad_() for x in leaves]
        wide = in_float64(*leaves)
        options = {"label_smoothing": smoothing}
        ours = fused_ce(*leaves[:2], labels, bias=leaves[2], backend=backend, **options).loss_sum
        exact = reference_ce(*wide[:2], labels, bias=wide[2], **options).loss_sum
        grads = torch.autograd.grad(ours, leaves[:2]), torch.autograd.grad(exact, wide[:2])
        for g, e in zip(*grads, strict=True):
            once = (e.bfloat16().double() - e).norm()
            # Few elements may happen to round well: the mean relative error of a rounding at least.
            assert (g.double() - e).norm() <= 3 * max(once, 1.6e-3 * e.norm())


@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
@pytest.mark.parametrize(("H", "V"), [(17, 2100), (48, 700)])
@pytest.mark.parametrize("size", [0.1, 0.01])
def test_smoothing_of_nearly_even_logits_errs_no_more_than_eager(backend, H, V, size):
    """A relative error that all probabilities of a token share is left over beside ``s / V``."""
    labels = torch.randint(V, (64,))
    h, w = torch.randn(64, H), torch.randn(V, H) * size / H**0.5

    def grads(loss, dtype=torch.float32):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (h, w)]
        return torch.autograd.grad(loss(*leaves, labels, label_smoothing=1.0).loss_sum, leaves)

    exact = grads(reference_ce, torch.float64)
    ours = grads(partial(fused_ce, backend=backend))
    eager = grads(partial(reference_ce, dtype=torch.float32))
    for g, e, x in zip(ours, eager, exact, strict=True):
        assert (g.double() - x).norm() <= (e.double() - x).norm()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_one_class_has_no_gradient(backend, smoothing, dtype):
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in ((5, 8), (1, 8), (1,))]
    options = {"label_smoothing": smoothing, "backend": backend}
    out = fused_ce(*leaves[:2], torch.zeros(5).long(), bias=leaves[2], **options)
    assert all(g.eq(0).all() for g in torch.autograd.grad(out.loss_sum, leaves))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_terms", [False, slow(True)])
@pytest.mark.parametrize("grad", [True, slow(False)])
def test_argmax_comes_at_no_second_pass(monkeypatch, backend, with_terms, grad):
    """The argmax is right in training and evaluation, by chunks, tiles and blocks."""
    monkeypatch.setattr(plan, "tile_classes", lambda *_: 100)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{"monitor": ("correct",)}, {"monitor": ("correct", "entropy"), "z_loss": 0.1},
     {"softcap": 5.0, "label_smoothing": 0.1}],
)  # fmt: skip
def test_argmax_out_in_the_memory_of_labels(backend, options):
    """Labels are read to the end, by some losses in backward again, before they are overwritten."""
    hidden, weight, labels, _ = Case((30,), 12, 70, ignored=0.3).tensors()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    options = options | {"backend": backend}
    right = fused_ce(*leaves, labels, **options)
    grads = torch.autograd.grad(right.loss_sum, leaves)
    best = torch.where(labels == -100, -1, fused_argmax(hidden.nan_to_num(), weight))
    for grad in (False, True):
        for shift in (0, 1):
            memory = torch.cat([labels[:1], labels])
            read, argmax = memory[1:], memory[1 - shift : 31 - shift]
            with torch.set_grad_enabled(grad):
                out = fused_ce(*leaves, read, argmax_out=argmax, **options)
            torch.testing.assert_close(tuple(out), tuple(right))
            assert argmax.equal(best)
            if "monitor" in options:
                assert out.monitors["correct"] == ((best == labels) & (labels != -100)).sum()
        # the argmax changes the order of sums
    for x, y in zip(torch.autograd.grad(out.loss_sum, leaves), grads, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=SAME_SUMS * float(y.abs().max()))
