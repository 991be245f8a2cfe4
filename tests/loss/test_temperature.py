"""A temperature per token gives what each token alone has at its own temperature."""

import pytest
import torch
import torch.nn.functional as F
from support.bounds import SAME_SUMS, errs_like, in_float64

from fusedce import fused_kl, fused_logprobs

BACKENDS = ["torch", "triton"]
N, H, V = 7, 8, 23


def inputs(dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=rng).to(dtype).requires_grad_()
    labels = torch.randint(V, (N,), generator=rng)
    labels[2] = -100
    temperature = torch.linspace(0.3, 2.5, N)
    temperature[2] = 0  # of an ignored token, may be anything
    return hidden, weight, bias, labels, temperature


def eager(hidden, weight, bias, labels, temperature, softcap):
    z = F.linear(hidden, weight, bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    used = labels != -100
    z = z / temperature.masked_fill(~used, 1)[:, None]
    log_p = z.log_softmax(-1)
    logprob = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    found = (logprob, -(log_p.exp() * log_p).sum(-1), z.logsumexp(-1), z.mean(-1))
    return tuple(x.where(used, 0) for x in found)


def check(ours, eager, leaves):
    """``eager`` is a function of the leaves, whose errors in float32 are measured too."""
    wide = in_float64(*leaves)
    theirs, exact = eager(*leaves), eager(*wide)
    errs_like(ours, theirs, exact)
    upstream = [torch.randn_like(x) for x in theirs]
    errs_like(
        torch.autograd.grad(ours, leaves, upstream),
        torch.autograd.grad(theirs, leaves, upstream),
        torch.autograd.grad(exact, wide, [x.double() for x in upstream]),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_values_and_gradients(backend, softcap):
    hidden, weight, bias, labels, temperature = inputs()
    stats = fused_logprobs(
        hidden, weight, labels, bias=bias, softcap=softcap, temperature=temperature,
        mean_logit=True, backend=backend,
    )  # fmt: skip
    ours = (stats.logprob, stats.entropy, stats.lse, stats.mean_logit)
    check(ours, lambda *x: eager(*x, labels, temperature, softcap), (hidden, weight, bias))


def test_gradcheck():
    hidden, weight, bias, labels, temperature = inputs(torch.float64)

    def f(h, w, b):
        stats = fused_logprobs(
            h, w, labels, bias=b, softcap=2.0, temperature=temperature, mean_logit=True
        )
        return stats.logprob, stats.entropy, stats.lse, stats.mean_logit

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_classes(backend):
    hidden, weight, bias, labels, temperature = inputs()
    several = torch.stack([labels, labels.clamp(min=0), (labels.clamp(min=0) + 5) % V], 1)
    several[4, 0] = -100  # the first alone
    several[2] = -100
    stats = fused_logprobs(
        hidden, weight, several, bias=bias, softcap=3.0, temperature=temperature, backend=backend
    )

    def eager(hidden, weight, bias):
        z = 3.0 * torch.tanh(F.linear(hidden, weight, bias) / 3.0)
        log_p = (z / temperature.clamp(min=0.1)[:, None]).log_softmax(-1)
        return (log_p.gather(1, several.clamp(min=0)).where(several != -100, 0),)

    check((stats.logprob,), eager, (hidden, weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_temperature_for_all_is_the_same(backend):
    hidden, weight, bias, labels, _ = inputs()
    each = fused_logprobs(
        hidden, weight, labels, bias=bias, temperature=torch.full((N,), 0.7), backend=backend
    )
    one = fused_logprobs(hidden, weight, labels, bias=bias, temperature=0.7, backend=backend)
    # a division by 0.7 in place of a product: a rounding of the logits, not of their products
    close = {"rtol": SAME_SUMS, "atol": SAME_SUMS}
    torch.testing.assert_close(tuple(each), tuple(one), **close)


def test_what_is_no_temperature():
    hidden, weight, _, labels, temperature = inputs()
    for change, error, message in (
        (temperature[:3], ValueError, r"temperature must be \(...\) = \(7,\), got \(3,\)"),
        (temperature.long(), TypeError, "temperature must be floats"),
        (temperature - 1, ValueError, r"temperature must be positive and finite, got -0\.69"),
        (temperature.requires_grad_(), ValueError, "temperature must not require grad"),
    ):
        with pytest.raises(error, match=message):
            fused_logprobs(hidden, weight, labels, temperature=change)


def test_a_temperature_that_would_make_logits_infinite():
    h, w = torch.ones(2, 3), torch.ones(4, 3)
    for call in (
        lambda t: fused_logprobs(h, w, torch.tensor([0, 1]), softcap=5.0, temperature=t),
        lambda t: fused_kl(h, w, h, w, temperature=t),
    ):
        for cold in (1e-38, 1e-40):
            with pytest.raises(ValueError, match=rf"temperature must be .* 1e-30.* got {cold}"):
                call(cold)
