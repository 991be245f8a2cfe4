"""The contract of fused_ce, clause by clause, on both backends."""

import pytest
import torch
import torch.nn.functional as F
from support.bounds import STATISTIC, errs_like, in_float64
from support.params import QUICK_ON_TORCH

import fusedce
from fusedce import LossSum, fused_ce, reference_ce
from fusedce.contract.objective import expecting

BACKENDS = ["torch", "triton"]
INPUTS = ("hidden", "weight")


def inputs(N=9, H=12, V=37, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=rng).to(dtype)
    weight = torch.randn(V, H, generator=rng).to(dtype)
    labels = torch.randint(0, V, (N,), generator=rng)
    labels[::3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_has_two_fields_of_their_own_dtypes(backend):
    out = fused_ce(*inputs(), backend=backend)
    assert isinstance(out, LossSum)
    assert LossSum._fields == ("loss_sum", "n_valid")
    assert (out.loss_sum.dtype, out.n_valid.dtype) == (torch.float32, torch.int64)
    assert out.loss_sum.shape == out.n_valid.shape == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_mean_divides_by_the_count_or_a_denominator(backend):
    out = fused_ce(*inputs(), backend=backend)
    torch.testing.assert_close(out.mean(), out.loss_sum / 6)
    torch.testing.assert_close(out.mean(100), out.loss_sum / 100)
    torch.testing.assert_close(out.mean(torch.tensor(50)), out.loss_sum / 50)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("need", ["h", "w", "b", "hw", "hb", "wb", "hwb", ""])
def test_any_subset_of_gradients_is_given(backend, need):
    hidden, weight, labels = inputs()
    bias = torch.linspace(-1, 1, 37)
    leaves = dict(zip("hwb", (hidden, weight, bias), strict=True))
    for name, x in leaves.items():
        x.requires_grad_(name in need)
    out = fused_ce(hidden, weight, labels, bias=bias, backend=backend)
    assert out.loss_sum.requires_grad == bool(need)
    if need:
        wanted = [leaves[n] for n in need]
        got = torch.autograd.grad(out.loss_sum, wanted)
        of_eager = reference_ce(hidden, weight, labels, bias=bias, dtype=torch.float32).loss_sum
        wide = dict(zip("hwb", in_float64(hidden, weight, bias), strict=True))
        exact = reference_ce(wide["h"], wide["w"], labels, bias=wide["b"]).loss_sum
        errs_like(
            got, torch.autograd.grad(of_eager, wanted),
            torch.autograd.grad(exact, [wide[n] for n in need]),
        )  # fmt: skip


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
def test_double_backward_is_refused(backend):
    hidden, weight, labels = inputs()
    loss = fused_ce(hidden, weight, labels, backend=backend).loss_sum
    with pytest.raises(RuntimeError, match="not differentiable"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("N", [0, 5])
def test_nothing_valid_is_0_with_gradients_of_0(backend, N):
    hidden, weight, _ = inputs(N)
    with torch.no_grad():
        hidden.fill_(float("nan"))
    labels = torch.full((N,), -100)
    out = fused_ce(hidden, weight, labels, backend=backend)
    assert out.loss_sum.item() == 0
    assert out.n_valid.item() == 0
    out.mean().backward()
    assert hidden.grad.eq(0).all()
    assert weight.grad.eq(0).all()
    with torch.no_grad():
        assert fused_ce(hidden, weight, labels, backend=backend).loss_sum.item() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_ignored_rows_contaminate_nothing(backend, poison):
    hidden, weight, labels = inputs()
    clean = fused_ce(hidden, weight, labels, backend=backend).loss_sum
    clean_grad = torch.autograd.grad(clean, weight)[0]
    dirty = hidden.detach().clone()
    dirty[labels == -100] = poison
    dirty.requires_grad_()
    loss = fused_ce(dirty, weight, labels, backend=backend).loss_sum
    torch.testing.assert_close(loss, clean, rtol=0, atol=0)
    d_hidden, d_weight = torch.autograd.grad(loss, (dirty, weight))
    torch.testing.assert_close(d_weight, clean_grad, rtol=0, atol=0)
    assert d_hidden[labels == -100].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_in_a_valid_row_is_not_hidden(backend, poison):
    hidden, weight, labels = inputs()
    with torch.no_grad():
        hidden[1, 0] = poison
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            loss = fused_ce(hidden, weight, labels, backend=backend).loss_sum
        assert not loss.isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_inf_masks_a_class(backend):
    """-inf is a legal logit: the class has probability 0 and the others share the rest."""
    hidden, weight, labels = inputs(V=400)
    bias = torch.zeros(400)
    bias[100:] = float("-inf")
    labels = torch.where(labels >= 0, labels % 100, labels)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            loss = fused_ce(hidden, weight, labels, bias=bias, backend=backend).loss_sum
        exact = reference_ce(hidden, weight[:100], labels).loss_sum
        torch.testing.assert_close(loss.double(), exact, rtol=STATISTIC, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_and_strides_do_not_matter(backend):
    hidden, weight, labels = inputs(24)
    flat = fused_ce(hidden, weight, labels, backend=backend).loss_sum
    wide = torch.zeros(2, 3, 4, 24)
    wide[..., ::2] = hidden.detach().view(2, 3, 4, 12)
    columns = weight.detach().t().contiguous().t().requires_grad_()
    strided = fused_ce(wide[..., ::2], columns, labels.view(2, 3, 4).int(), backend=backend)
    torch.testing.assert_close(strided.loss_sum, flat)
    strided.loss_sum.backward()
    flat.backward()
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
def test_no_graph_is_made_without_grad(backend):
    hidden, weight, labels = inputs()
    exact = reference_ce(hidden, weight, labels).loss_sum
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = fused_ce(hidden, weight, labels, backend=backend)
        assert not out.loss_sum.requires_grad
        torch.testing.assert_close(out.loss_sum.double(), exact.detach(), rtol=STATISTIC, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_bitwise_repeatable(backend):
    def run():
        hidden, weight, labels = inputs(50, 24, 333)
        fused_ce(hidden, weight, labels, chunk_tokens=7, backend=backend).mean().backward()
        return hidden.grad, weight.grad

    torch.testing.assert_close(run(), run(), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_gives_the_same_gradients(backend):
    if backend == "triton":
        pytest.skip("inductor and the interpreter do not mix")

    def step(hidden, weight, labels):
        return fused_ce(hidden, weight, labels, softcap=4.0, backend=backend).mean()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for N in (9, 14):
        hidden, weight, labels = inputs(N)
        got = torch.autograd.grad(compiled(hidden, weight, labels), (hidden, weight))
        torch.testing.assert_close(
            got, torch.autograd.grad(step(hidden, weight, labels), (hidden, weight))
        )


@pytest.mark.parametrize("logits", ["flat", "peaked"])
@pytest.mark.parametrize("chunk_tokens", [None, 40])
@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
def test_the_loss_of_bfloat16_is_as_exact_as_statistics(logits, chunk_tokens, backend):
    """At p -> 0.999, too. (Of gradients: test_gradient_errors.py.)"""
    from fusedce.testing import Case

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
    with expecting(1.0):
        out = fused_ce(hidden, weight, labels, backend=backend)
    out.mean().backward()
    exact = torch.full((7, 4), 1000 / 7)
    exact[0] -= 1000
    # a rounding of the sum that waits, and of each factor
    rounding = 2 * torch.finfo(torch.float16).eps
    torch.testing.assert_close(weight.grad.float(), exact, rtol=rounding, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_small_probabilities_keep_their_bits(backend):
    """Nearly all of a vocabulary has a probability that float16 holds with few bits or none."""
    from fusedce.testing import Case

    hidden, weight, labels, _ = Case((20,), 24, 1031, torch.float16, logits="peaked").tensors()

    def grad(fn, dtype):
        w = weight.to(dtype).requires_grad_()
        loss = fn(hidden.to(dtype), w, labels).loss_sum
        return torch.autograd.grad(1e5 * loss, w)[0].double()

    others = torch.ones(1031, dtype=torch.bool)
    others[labels] = False
    got = grad(lambda *a: fused_ce(*a, backend=backend), torch.float16)[others]
    exact = grad(reference_ce, torch.float64)[others]
    error = (got - exact).norm(dim=1) / exact.norm(dim=1)  # row by row: most are far below the norm
    assert error.median() <= 2 * torch.finfo(torch.float16).eps  # of the entries and of their sum


def test_the_mean_is_that_of_torch():
    hidden, weight, labels = inputs()
    torch.testing.assert_close(
        fused_ce(hidden, weight, labels).mean(),
        F.cross_entropy(F.linear(hidden, weight), labels),
    )
    assert fusedce.__all__ == sorted(fusedce.__all__)
