"""Losses whose logits are large: log-probabilities are what counts, not the size of logits.

Logits are entries of the weight, since the hidden states are unit vectors: no product rounds them.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fusedce import (
    fused_ce,
    fused_cross_entropy,
    fused_kl,
    fused_kl_tokens,
    reference_ce,
    reference_kl,
)
from fusedce.contract.problem import KINDS

SIZES = torch.tensor([100.0, 1e3, 1e4, 1e6, 1e8]).repeat(4)  # of the tokens
N, V = len(SIZES), 70
SHAPES = ("one class", "three classes", "all classes")


def confident(shape: str, sizes: torch.Tensor, seed: int) -> torch.Tensor:
    """``(V, N)`` logits: one, three equal or all classes of a token are as large as its size."""
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(V, N, generator=rng)
    if shape == "all classes":
        return z.mul_(sizes)
    classes = torch.rand(V, N, generator=rng).argsort(0)[: 1 if shape == "one class" else 3]
    return z.scatter_(0, classes, sizes.expand_as(classes))


def loss_and_gradients(loss, dtype, *logits, **options):
    """The losses of all tokens, and the gradient of their sum by the first logits."""
    units = torch.eye(N, dtype=dtype)
    weight, *others = (z.to(dtype) for z in logits)
    weight = weight.clone().requires_grad_()
    losses = loss(units, weight, *(x for z in others for x in (units, z)), **options)
    return losses.detach().double(), torch.autograd.grad(losses.sum(), weight)[0].double()


def check(loss, eager, *logits, **options):
    """Each token errs at most as much as in eager code.

    Four roundings are a floor, of a loss and of the addends of its gradient: a probability times a
    logarithm, and times the divergence itself.
    """
    found = loss_and_gradients(loss, torch.float32, *logits, **options)
    theirs = loss_and_gradients(
        partial(eager, dtype=torch.float32), torch.float32, *logits, **options
    )
    exact = loss_and_gradients(eager, torch.float64, *logits, **options)
    rounding, (losses, gradients) = 4 * torch.finfo(torch.float32).eps, exact
    sizes = losses.abs(), losses.abs() + gradients.abs().amax(0)
    names = ("loss", "gradient")
    for name, x, y, truth, size in zip(names, found, theirs, exact, sizes, strict=True):
        error, of_eager = ((z - truth).abs().view(-1, N).amax(0) for z in (x, y))
        bound = torch.maximum(of_eager, rounding * size)
        worst = int((error - bound).argmax())
        assert error[worst] <= bound[worst], (
            f"{name} of a token of size {float(SIZES[worst]):.0e}: error {float(error[worst]):.2e} "
            f"exceeds {float(bound[worst]):.2e} (eager makes {float(of_eager[worst]):.2e})"
        )


def reference(hidden, weight, there, head, labels=None, **options):
    """Eager losses of the tokens."""
    rows = range(len(hidden))
    given = [(hidden[i : i + 1], weight, there[i : i + 1], head) for i in rows]
    labels = [None if labels is None else labels[i : i + 1] for i in rows]
    return torch.stack([
        reference_kl(*x, y, **options).loss_sum for x, y in zip(given, labels, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("of", ["student", "teacher", "both"])
def test_divergences(of, shape, kind, backend):
    student = confident(shape, SIZES**0 if of == "teacher" else SIZES, 0)
    teacher = confident(shape, SIZES**0 if of == "student" else SIZES, 1)
    ours = partial(fused_kl_tokens, backend=backend)
    check(ours, reference, student, teacher, divergence=kind)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy_beside_a_divergence(shape, backend):
    labels = torch.arange(N)
    ours = partial(fused_kl_tokens, backend=backend)
    logits = (confident(shape, SIZES, seed) for seed in (0, 1))
    check(ours, reference, *logits, labels=labels, ce_weight=0.7, temperature=2.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_cross_entropy(shape, backend):
    labels = torch.arange(N)

    def eager(hidden, weight, dtype=None):
        return F.cross_entropy(hidden @ weight.T, labels, reduction="none")

    def ours(hidden, weight):
        return fused_cross_entropy(hidden, weight, labels, reduction="none", backend=backend)

    check(ours, eager, confident(shape, SIZES, 0))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("gap", [20.0, 30.0, 36.5, 60.0])
def test_the_sum_of_tiny_losses_has_its_digits(gap, backend, train):
    """Of exp(-gap) a class: float32 rounds the exponent, and 1 + x must not round x away."""
    weight = torch.eye(V, 16) * gap
    hidden = torch.eye(1, 16).repeat(4, 1).requires_grad_(train)
    labels = torch.zeros(4, dtype=torch.int64)
    found = fused_ce(hidden, weight, labels, backend=backend)
    beside = fused_kl(
        hidden, weight, hidden.detach(), weight, labels, ce_weight=0.5, backend=backend
    )  # a divergence of 0
    exact = 4 * math.log1p((V - 1) * math.exp(-gap))
    for loss_sum in (found.loss_sum, 2 * beside.loss_sum):
        eps = torch.finfo(torch.float32).eps
        assert loss_sum.item() == pytest.approx(exact, rel=gap * eps, abs=0)


def test_a_label_far_above_a_reference_keeps_its_log_sum_exp():
    """In several tiles, whose reference is of other classes: exp(k - lse) is 0 in float64, too."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(9000, 16, generator=rng)
    labels = torch.randint(9000, (300,), generator=rng)
    hidden = (300 * weight[labels]).requires_grad_()
    found = fused_ce(hidden, weight, labels, z_loss=1e-3)
    exact = reference_ce(hidden, weight, labels, z_loss=1e-3)
    assert exact.loss_sum > 1e3
    torch.testing.assert_close(found.loss_sum.double(), exact.loss_sum, rtol=1e-6, atol=0)
    z = F.linear(hidden, weight)
    eager = F.cross_entropy(z, labels, reduction="sum") + 1e-3 * z.logsumexp(-1).square().sum()
    losses = found.loss_sum, eager, exact.loss_sum
    ours, eagers, right = (torch.autograd.grad(x, hidden)[0].double() for x in losses)
    assert (ours - right).norm() <= (eagers - right).norm() <= 2e-5 * right.norm()
