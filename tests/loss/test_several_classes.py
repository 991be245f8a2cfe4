"""fused_logprobs with labels (..., K): values and gradients of several classes of a token."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck

from fusedce import fused_logprobs
from fusedce.autograd import chosen
from fusedce.contract.problem import Problem

BACKENDS = ["torch", "triton"]
N, K, H, V = 6, 4, 8, 23
OPTIONS = {
    "plain": {},
    "all": {"softcap": 3.0, "logit_scale": -0.7, "temperature": 0.6},
}


def inputs(dtype=torch.float32, leading=(N,), scale=1.0):
    rng = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(*leading, H, generator=rng)).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=rng).to(dtype).requires_grad_()
    labels = torch.randint(V, (*leading, K), generator=rng)
    flat = labels.view(-1, K)
    flat[0, 1] = -100  # one entry of a token that counts
    flat[1] = -100  # a whole token
    flat[2, 3] = flat[2, 0]  # twice the same
    return hidden, weight, bias, labels


def eager(hidden, weight, bias, labels, *, softcap=None, logit_scale=1.0, temperature=1.0):
    z = F.linear(hidden, weight, bias)
    z = (z if z.dtype == torch.float64 else z.float()) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = (z / temperature).log_softmax(-1)
    valid = labels != -100
    entropy = -(log_p.exp() * log_p).sum(-1).where(valid.any(-1), 0)
    return log_p.gather(-1, labels.clamp(min=0)).where(valid, 0), entropy


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leading", [(N,), (2, 3)])
def test_values_and_gradients(backend, name, dtype, leading):
    hidden, weight, bias, labels = inputs(dtype, leading)
    leaves = (hidden, weight, bias)
    stats = fused_logprobs(hidden, weight, labels, bias=bias, backend=backend, **OPTIONS[name])
    assert stats.logprob.shape == labels.shape
    assert stats.entropy.shape == stats.lse.shape == stats.argmax.shape == leading
    upstream = torch.randn(labels.shape), torch.randn(leading)

    def run(outs, leaves):
        loss = sum((u * x).sum() for u, x in zip(upstream, outs, strict=True))
        return (*outs, *torch.autograd.grad(loss, leaves))

    ours = run((stats.logprob, stats.entropy), leaves)
    torchs = run(eager(*leaves, labels, **OPTIONS[name]), leaves)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = run(eager(*exact_leaves, labels, **OPTIONS[name]), exact_leaves)
    eps = torch.finfo(dtype).eps
    for o, t, e in zip(ours, torchs, exact, strict=True):
        floor = 8 * max(eps if o.dtype == dtype else 0, torch.finfo(o.dtype).eps) * e.norm()
        error, of_torch = (o - e).norm(), (t - e).norm()
        assert error <= 2 * of_torch + floor, (float(error), float(of_torch), float(floor))
    assert stats.logprob.view(-1, K)[1].eq(0).all()
    assert stats.argmax.view(-1)[1] == -1


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_class_is_the_label(backend):
    hidden, weight, bias, labels = inputs()
    one = fused_logprobs(hidden, weight, labels[:, :1], bias=bias, backend=backend)
    label = fused_logprobs(hidden, weight, labels[:, 0], bias=bias, backend=backend)
    torch.testing.assert_close(one.logprob[:, 0], label.logprob, rtol=0, atol=0)
    torch.testing.assert_close(one.entropy, label.entropy, rtol=0, atol=0)


def test_gradcheck():
    hidden, weight, bias, labels = inputs(torch.float64)

    def f(h, w, b):
        stats = fused_logprobs(h, w, labels, bias=b, softcap=2.0, temperature=0.7)
        return stats.logprob, stats.entropy, stats.lse

    assert gradcheck(f, (hidden, weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_in_any_order_of_memory(backend):
    """``torch.stack([chosen, rejected]).T`` is how pairs are often made."""
    hidden, weight, bias, labels = inputs()
    in_order = fused_logprobs(hidden, weight, labels, bias=bias, backend=backend)
    transposed = labels.t().contiguous().t()
    assert not transposed.is_contiguous()
    stats = fused_logprobs(hidden, weight, transposed, bias=bias, backend=backend)
    for got, expected in zip(stats, in_order, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_near_a_probability_of_one(backend):
    """The likeliest class's log-probability keeps its digits, at whatever place it stands."""
    hidden, weight, bias, labels = inputs(scale=20.0)
    best = F.linear(hidden, weight, bias).argmax(-1)
    labels[:, 2] = best
    z = F.linear(hidden.double(), weight.double(), bias.double())
    others = z.scatter(1, best[:, None], -torch.inf).logsumexp(1)
    exact = -torch.log1p(torch.exp(others - z.gather(1, best[:, None])[:, 0]))
    assert -1e-6 < exact.max() < 0
    ours = fused_logprobs(hidden, weight, labels, bias=bias, backend=backend).logprob[:, 2]
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_ignored_reaches_nobody(backend):
    hidden, weight, _, labels = inputs()
    poisoned = hidden.detach().clone()
    poisoned[1] = torch.nan
    poisoned.requires_grad_()
    stats = fused_logprobs(poisoned, weight, labels, backend=backend)
    grads = torch.autograd.grad(stats.logprob.sum(), (poisoned, weight))
    assert all(x.isfinite().all() for x in (stats.logprob, *grads))
    assert grads[0][1].eq(0).all()


def test_a_bad_class_is_named():
    hidden, weight, _, labels = inputs()
    labels[3, 2] = V
    with pytest.raises(ValueError, match=f"got {V} at flattened position {3 * K + 2}"):
        fused_logprobs(hidden, weight, labels)
    with pytest.raises(ValueError, match="got -100 at flattened position 1"):
        fused_logprobs(hidden, weight, inputs()[3], ignore_index=None)


def test_a_bad_class_is_nan_where_labels_are_not_read(monkeypatch):
    """As on a GPU: its entry is NaN, and so are then the token's log-probabilities."""
    hidden, weight = torch.randn(2, 4), torch.randn(7, 4)
    classes = torch.tensor([[1, 7], [-100, 3]])

    def unread(problem, classes):
        return classes != -100, classes.clamp(0, 6)

    monkeypatch.setattr(chosen, "in_range", unread)
    z = chosen.chosen_logits(Problem(hidden, weight, classes[:, 0]), classes)
    assert z.isnan().tolist() == [[False, True], [False, False]]
    assert z[1, 0] == 0


@pytest.mark.slow
def test_compiled_with_any_length():
    _, weight, bias, _ = inputs()

    def step(h, y):
        return fused_logprobs(h, weight, y, bias=bias).logprob.sum()

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for n in range(3, 9):
        hidden, _, _, labels = inputs(leading=(n,))
        torch.testing.assert_close(
            torch.autograd.grad(compiled(hidden, labels), (hidden, weight)),
            torch.autograd.grad(step(hidden, labels), (hidden, weight)),
        )
    assert counter.frame_count <= 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_mean_logit_on_request(backend, name):
    hidden, weight, bias, labels = inputs()
    stats = fused_logprobs(
        hidden, weight, labels, bias=bias, mean_logit=True, backend=backend, **OPTIONS[name]
    )
    o = {"softcap": None, "logit_scale": 1.0, "temperature": 1.0} | OPTIONS[name]
    z = F.linear(hidden, weight, bias) * o["logit_scale"]
    z = z if o["softcap"] is None else o["softcap"] * torch.tanh(z / o["softcap"])
    mean = (z / o["temperature"]).mean(-1).where((labels != -100).any(-1), 0)
    torch.testing.assert_close(stats.mean_logit, mean, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(N)
    torch.testing.assert_close(
        torch.autograd.grad(stats.mean_logit, (hidden, weight, bias), upstream),
        torch.autograd.grad(mean, (hidden, weight, bias), upstream),
        rtol=1e-4, atol=1e-6,
    )  # fmt: skip
    plain = fused_logprobs(hidden, weight, labels, bias=bias, backend=backend, **OPTIONS[name])
    assert plain._fields == stats._fields[:4]
    torch.testing.assert_close(tuple(plain), stats[:4])
