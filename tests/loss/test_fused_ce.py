"""The contract of fused_ce, clause by clause, on both backends."""

import pytest
import torch
import torch.nn.functional as F
from support.operators import opcheck_sum

import fusedce
from fusedce import LossSum, fused_ce, reference_ce
from fusedce.backends import plan
from fusedce.contract.problem import Problem

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
class TestContract:
    def test_two_fields_and_types(self, backend):
        out = fused_ce(*inputs(), backend=backend)
        assert isinstance(out, LossSum)
        assert LossSum._fields == ("loss_sum", "n_valid")
        assert (out.loss_sum.dtype, out.n_valid.dtype) == (torch.float32, torch.int64)
        assert out.loss_sum.shape == out.n_valid.shape == ()

    def test_mean(self, backend):
        out = fused_ce(*inputs(), backend=backend)
        torch.testing.assert_close(out.mean(), out.loss_sum / 6)
        torch.testing.assert_close(out.mean(100), out.loss_sum / 100)
        torch.testing.assert_close(out.mean(torch.tensor(50)), out.loss_sum / 50)

    @pytest.mark.parametrize("need", ["h", "w", "b", "hw", "hb", "wb", "hwb", ""])
    def test_any_subset_of_gradients(self, backend, need):
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
            exact = torch.autograd.grad(
                reference_ce(hidden, weight, labels, bias=bias).loss_sum, wanted
            )
            torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5)

    def test_second_backward(self, backend):
        hidden, weight, labels = inputs()
        loss = fused_ce(hidden, weight, labels, backend=backend).mean()
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        first = [x.clone() for x in first]
        second = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
        third = torch.autograd.grad(loss, (hidden, weight))
        torch.testing.assert_close(third, tuple(first), rtol=0, atol=0)
        torch.testing.assert_close(second, tuple(3 * x for x in first))

    def test_double_backward_is_refused(self, backend):
        hidden, weight, labels = inputs()
        loss = fused_ce(hidden, weight, labels, backend=backend).loss_sum
        with pytest.raises(RuntimeError, match="not differentiable"):
            torch.autograd.grad(loss, hidden, create_graph=True)

    @pytest.mark.parametrize("N", [0, 5])
    def test_nothing_valid(self, backend, N):
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

    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_ignored_rows_contaminate_nothing(self, backend, poison):
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

    @pytest.mark.parametrize("poison", [float("nan"), float("inf")])
    def test_valid_nan_is_not_hidden(self, backend, poison):
        hidden, weight, labels = inputs()
        with torch.no_grad():
            hidden[1, 0] = poison
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                loss = fused_ce(hidden, weight, labels, backend=backend).loss_sum
            assert not loss.isfinite()

    def test_minus_inf_masks_a_class(self, backend):
        """-inf is a legal logit: the class has probability 0 and the others share the rest."""
        hidden, weight, labels = inputs(V=400)
        bias = torch.zeros(400)
        bias[100:] = float("-inf")
        labels = torch.where(labels >= 0, labels % 100, labels)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                loss = fused_ce(hidden, weight, labels, bias=bias, backend=backend).loss_sum
            exact = reference_ce(hidden, weight[:100], labels).loss_sum
            torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)

    def test_leading_dimensions_and_strides(self, backend):
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

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_autocast_casts_as_linear(self, backend, dtype):
        hidden, weight, labels = inputs()
        with torch.autocast("cpu", dtype):
            out = fused_ce(hidden, weight, labels, backend=backend)
            mixed = fused_ce(hidden.to(dtype), weight, labels, backend=backend)
        exact = reference_ce(hidden.to(dtype), weight.to(dtype), labels).loss_sum
        torch.testing.assert_close(out.loss_sum.double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(mixed.loss_sum, out.loss_sum)
        out.mean().backward()
        assert hidden.grad.dtype == weight.grad.dtype == torch.float32

    def test_no_grad_and_inference_mode(self, backend):
        hidden, weight, labels = inputs()
        exact = reference_ce(hidden, weight, labels).loss_sum
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                out = fused_ce(hidden, weight, labels, backend=backend)
            assert not out.loss_sum.requires_grad
            torch.testing.assert_close(out.loss_sum.double(), exact.detach(), rtol=1e-6, atol=0)

    def test_gradients_are_bitwise_repeatable(self, backend):
        def run():
            hidden, weight, labels = inputs(50, 24, 333)
            fused_ce(hidden, weight, labels, chunk_tokens=7, backend=backend).mean().backward()
            return hidden.grad, weight.grad

        torch.testing.assert_close(run(), run(), rtol=0, atol=0)

    def test_compile(self, backend):
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

    def test_opcheck(self, backend):
        hidden, weight, labels = inputs()
        opcheck_sum(Problem(hidden, weight, labels, chunk_tokens=4, backend=backend))


def test_gradcheck_fp64():
    hidden, weight, labels = inputs(5, 4, 9, torch.float64)
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)

    def f(h, w, b):
        return fused_ce(h, w, labels, bias=b, softcap=2.0, logit_scale=0.7, chunk_tokens=2).loss_sum

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


@pytest.mark.parametrize("logits", ["flat", "peaked"])
@pytest.mark.parametrize("chunk_tokens", [None, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_accuracy(logits, chunk_tokens, backend):
    """Loss to 1e-6 of fp64, gradients to about one rounding, at p -> 0.999 too."""
    from fusedce.testing import Case, _run

    def ours(*args):
        return fused_ce(*args, chunk_tokens=chunk_tokens, backend=backend)

    for seed in range(3):
        case = Case(
            (100,), 64, 1031, torch.bfloat16, logits=logits, requires_grad=INPUTS, seed=seed
        )
        hidden, weight, labels, _ = case.tensors()
        got = _run(ours, case, hidden, weight, labels, None)
        exact = _run(reference_ce, case, hidden.double(), weight.double(), labels, None)
        allowed = 1e-6 * exact["loss_sum"]
        assert abs(got["loss_sum"] - exact["loss_sum"]) <= allowed
        with torch.no_grad():
            assert abs(ours(hidden, weight, labels).loss_sum - exact["loss_sum"]) <= allowed
        for name in INPUTS:
            error = (got[name].double() - exact[name]).norm() / exact[name].norm()
            assert error <= 2.5e-3, (name, error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp16_gradient_of_the_sum_may_overflow(backend):
    """It reaches 7e4 before the denominator arrives, and fits fp16 (up to 65504) after it."""
    hidden = torch.full((800, 4), 100.0, dtype=torch.float16).requires_grad_()
    weight = torch.zeros(7, 4, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(800, dtype=torch.long)
    fused_ce(hidden, weight, labels, backend=backend).mean().backward()
    exact = torch.full((7, 4), 100 / 7)
    exact[0] -= 100
    torch.testing.assert_close(weight.grad.float(), exact, rtol=2e-3, atol=0)


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
    assert error.median() <= 2e-3


def test_upstream_gradient_is_not_rounded_to_bf16():
    """1/1234567 in bf16 is off by 0.1%, the same for every element."""
    hidden, weight, labels = inputs(64, 32, 100, torch.bfloat16)
    loss = fused_ce(hidden, weight, labels).loss_sum
    one = torch.autograd.grad(loss, weight, retain_graph=True)[0].double()
    small = torch.autograd.grad(loss / 1234567, weight)[0].double()
    assert abs((small * 1234567).norm() / one.norm() - 1) < 2e-4


def test_chunk_plan():
    common = {"V": 128256, "H": 4096, "accumulator": True, "on_cpu": False, "chunk_tokens": None}
    # One chunk of two-byte exponentials is smaller than several beside a float32 accumulator.
    assert plan.chunk_size(8192, logit_bytes=2, **common) == 8192
    size = plan.chunk_size(32768, logit_bytes=2, **common)
    assert size % 128 == 0
    assert size * 128256 * 2 <= plan.DEVICE_BUDGET
    assert plan.chunk_size(100, logit_bytes=2, **{**common, "chunk_tokens": 7}) == 7


H, W, L = (torch.zeros(4, 8), torch.zeros(10, 8), torch.zeros(4, dtype=torch.int64))
BAD = [
    ({"hidden": [1.0]}, TypeError, "hidden must be a tensor"),
    ({"hidden": torch.zeros(4, 8, dtype=torch.int64)}, TypeError, "hidden must be float32"),
    ({"hidden": torch.tensor(1.0)}, ValueError, r"hidden must be \(..., H\)"),
    ({"hidden": torch.zeros(4, 0)}, ValueError, "H >= 1"),
    ({"weight": torch.zeros(10, 9)}, ValueError, r"H=8 \(from hidden\), got \(10, 9\)"),
    ({"weight": torch.zeros(8)}, ValueError, r"weight must be \(V, H\)"),
    ({"weight": torch.zeros(0, 8)}, ValueError, "V >= 1"),
    ({"weight": torch.zeros(10, 8).bfloat16()}, TypeError, "weight must have the dtype"),
    ({"weight": torch.zeros(10, 8, device="meta")}, ValueError, "weight must be on the device"),
    ({"weight": None}, TypeError, "weight must be a tensor"),
    ({"labels": torch.zeros(5, dtype=torch.int64)}, ValueError, r"leading shape.*\(4,\).*\(5,\)"),
    ({"labels": torch.zeros(4)}, TypeError, "labels must be int64 or int32.*float32"),
    ({"labels": torch.tensor([0, 10, 1, 2])}, ValueError, "V=10.*got 10 at flattened position 1"),
    ({"labels": torch.tensor([0, 1, -7, 2])}, ValueError, "got -7 at flattened position 2"),
    ({"bias": torch.zeros(11)}, ValueError, r"bias must be \(V,\) with V=10"),
    ({"bias": torch.zeros(10).half()}, TypeError, "bias must have the dtype"),
    ({"bias": 1.0}, TypeError, "bias must be a tensor"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    ({"softcap": -1.0}, ValueError, "softcap must be positive"),
    ({"softcap": float("nan")}, ValueError, "softcap must be positive"),
    ({"softcap": "30"}, TypeError, "softcap must be a number"),
    ({"logit_scale": float("inf")}, ValueError, "logit_scale must be finite"),
    ({"logit_scale": None}, TypeError, "logit_scale must be a number"),
    ({"ignore_index": 1.5}, TypeError, "ignore_index must be an int"),
    ({"chunk_tokens": 0}, ValueError, "chunk_tokens must be >= 1, got 0"),
    ({"chunk_tokens": -3}, ValueError, "chunk_tokens must be >= 1, got -3"),
    ({"chunk_tokens": 2.0}, TypeError, "chunk_tokens must be an int"),
    ({"backend": "cuda"}, ValueError, "backend must be None, 'torch' or 'triton', got 'cuda'"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input(change, error, message, backend):
    arguments = {"hidden": H, "weight": W, "labels": L, "backend": backend} | change
    with pytest.raises(error, match=message):
        fused_ce(**arguments)


def test_triton_refuses_fp64_with_the_reason():
    with pytest.raises(RuntimeError, match="float64"):
        fused_ce(H.double(), W.double(), L, backend="triton")


def test_matches_torch():
    hidden, weight, labels = inputs()
    torch.testing.assert_close(
        fused_ce(hidden, weight, labels).mean(),
        F.cross_entropy(F.linear(hidden, weight), labels),
    )
    assert fusedce.__all__ == sorted(fusedce.__all__)
