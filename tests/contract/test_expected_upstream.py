"""A factor known beforehand is folded into the gradient before it is rounded: one rounding."""

import types

import pytest
import torch
import torch.nn.functional as F
from support.params import QUICK_ON_TORCH

import fusedce
from fusedce.contract.objective import expecting
from fusedce.testing import Case

BACKENDS = ("torch", "triton")
ONE_ROUNDING = 1.1
"""1, and what float32 adds to it; a second rounding of all entries makes it 1.41."""


def inputs(N=96, H=48, V=700):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng).bfloat16().requires_grad_()
    weight = (torch.randn(V, H, generator=rng) / H**0.5).bfloat16().requires_grad_()
    labels = torch.randint(V, (N,), generator=rng)
    labels[: N // 5] = -100
    return hidden, weight, labels


def error(x, exact):
    """Normwise, relative."""
    return float((x.double() - exact).norm() / exact.norm())


def gradients(backend, loss_of, chunk_tokens=None, given=None):
    """Gradients of ``loss_of(hidden, weight, labels, **options)``, and how exact they are.

    Exactness is in units of the error of the exact gradient rounded once.
    """
    options = {"chunk_tokens": chunk_tokens}
    return exactness(
        backend, lambda x, labels, **more: grads(loss_of(*x, labels, **more), x), options, given
    )


def grads(loss, x):
    return torch.autograd.grad(loss, x)


def exactness(backend, grads_of, options=None, given=None):
    """The same for ``grads_of((hidden, weight), labels, **options)``."""
    *x, labels = given or inputs()
    found = grads_of(x, labels, backend=backend, **(options or {}))
    x = [t.detach().double().requires_grad_() for t in x]
    exact = grads_of(x, labels, backend="torch", **(options or {}))
    return [error(a, b) / error(b.to(a.dtype), b) for a, b in zip(found, exact, strict=True)]


def mean_reduction(*inputs, **options):
    return fusedce.fused_cross_entropy(*inputs, reduction="mean", **options)


def mean_of_sum(*inputs, **options):
    return fusedce.fused_ce(*inputs, **options).mean()


def open_window(*inputs, **options):
    with expecting(3 / 1234):
        loss = fusedce.fused_ce(*inputs, **options).loss_sum
    return loss * (3 / 1234)


def tensor_window(*inputs, **options):
    factor = torch.tensor(3 / 1234, dtype=torch.float64)
    with expecting(factor):
        loss = fusedce.fused_ce(*inputs, **options).loss_sum
    return loss * factor.float()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk_tokens", [None, 32])
@pytest.mark.parametrize("way", [mean_reduction, mean_of_sum, open_window, tensor_window])
def test_a_known_factor_costs_no_rounding(backend, way, chunk_tokens):
    # Triton's chunk holds the label's entry in bf16, and 1 - 1 / 700 lies in the middle between two
    # numbers: 1.18 for the weight where its rounding is not given back.
    assert max(gradients(backend, way, chunk_tokens)) <= ONE_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("logits", ["flat", "peaked"])
@pytest.mark.parametrize("chunk_tokens", [None, 64], ids=["one chunk", "chunks"])
def test_one_rounding_whatever_the_logits(backend, logits, chunk_tokens):
    hidden, weight, labels, _ = Case((100,), 64, 700, torch.bfloat16, logits=logits).tensors()
    given = hidden.requires_grad_(), weight.requires_grad_(), labels
    assert max(gradients(backend, mean_reduction, chunk_tokens, given)) <= ONE_ROUNDING


@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
@pytest.mark.parametrize(
    ("size", "right", "softcap"),
    [(3, 0.5, None), (8, 0, None), (8, 0.6, None), (8, 1, None), (40, 0.6, None), (8, 0.6, 20.0)],
)
def test_errors_however_sure_of_a_class(backend, size, right, softcap):
    """``size`` is that of the logits, ``right`` the share of labels that are likeliest."""
    rng = torch.Generator().manual_seed(0)
    hidden = (size * torch.randn(100, 64, generator=rng)).to(torch.bfloat16)
    weight = (torch.randn(700, 64, generator=rng) / 8).to(torch.bfloat16)
    labels = torch.randint(700, (100,), generator=rng)
    likeliest = (hidden.double() @ weight.double().T).argmax(1)
    labels = torch.where(torch.rand(100, generator=rng) < right, likeliest, labels)
    given = hidden.requires_grad_(), weight.requires_grad_(), labels

    def loss_of(*inputs, **options):
        return fusedce.fused_ce(*inputs, **options, softcap=softcap).mean()

    found = gradients(backend, loss_of, None, given)
    if backend == "triton":
        assert max(found) <= ONE_ROUNDING
        return

    def eager(hidden, weight, labels, **_):
        z = F.linear(hidden, weight).float()
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return F.cross_entropy(z, labels)

    for ours, eagers in zip(found, gradients(backend, eager, None, given), strict=True):
        assert ours <= eagers


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_options_and_a_bias_cost_no_rounding(dtype):
    """Rows of the Triton backend's gradient wait for factors, here 2 to 16, powers of two."""
    hidden, weight, labels, bias = Case((60,), 48, 700, dtype, with_bias=True).tensors()
    x = [t.requires_grad_() for t in (hidden, weight, bias)]
    token_weight = torch.linspace(2.0, 20.0, 60)

    def loss_of(hidden, weight, bias, labels, **options):
        return fusedce.fused_ce(
            hidden, weight, labels, bias=bias, token_weight=token_weight, z_loss=0.1,
            label_smoothing=0.1, **options,
        ).mean()  # fmt: skip

    assert max(gradients("triton", loss_of, None, (*x, labels))) <= ONE_ROUNDING


def plain():
    return fusedce.LossAccumulator(backward_divisor=3)


def accelerated():
    """An engine that divides each loss by 3, which the accumulator takes back."""
    accelerator = types.SimpleNamespace(
        distributed_type="NO",
        gradient_accumulation_steps=3,
        num_processes=1,
        backward=lambda loss: (loss / 3).backward(),
    )
    return fusedce.LossAccumulator.from_accelerator(accelerator)


@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
@pytest.mark.parametrize("accumulator", [plain, accelerated])
def test_a_declared_window_rounds_once(backend, accumulator):
    def grads_of(x, labels, **options):
        acc = accumulator()
        few = labels.index_fill(0, torch.arange(60), -100)  # trains nothing here
        with acc.window([fusedce.count_valid(labels), fusedce.count_valid(few)]):
            acc.backward(fusedce.fused_ce(*x, labels, **options))
            acc.scale(fusedce.fused_ce(*[t.detach() for t in x], few, **options))
        return [t.grad for t in x]

    assert max(exactness(backend, grads_of)) <= ONE_ROUNDING


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_factor_than_the_expected_one_is_right(backend):
    def other(*inputs, **options):
        with expecting(0.37):
            return fusedce.fused_ce(*inputs, **options).loss_sum * 5.0

    for ratio in gradients(backend, other):
        assert ratio <= 2.0  # of the gradient, of the factor, and of their product: sqrt(3)


def test_an_expectation_ends_with_its_block():
    hidden, weight, labels = inputs()

    def grad():
        """An unexpected factor costs a second rounding, which changes bits."""
        return torch.autograd.grad(fusedce.fused_ce(hidden, weight, labels).loss_sum, weight)[0]

    before = grad()
    with expecting(0.37):
        with expecting(None):
            assert torch.equal(grad(), before)
        assert not torch.equal(grad(), before)
    assert torch.equal(grad(), before)
