"""fused_logprobs with labels (..., K): values and gradients of several classes of a token."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import errs_like, in_float64
from support.coverage import counted
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck

from fusedce import fused_logprobs
from fusedce.backends import chosen as class_logits
from fusedce.contract.problem import Problem

BACKENDS = ["torch", "triton"]
N, K, H, V = 6, 4, 8, 23
OPTIONS = {
    "plain": {},
    "all": {"softcap": 3.0, "logit_scale": -0.7, "temperature": 0.6},
}


def inputs(dtype=torch.float32, leading=(N,), scale=1.0, *, sizes=(H, V, K), seed=0):
    rng = torch.Generator().manual_seed(seed)
    H, V, K = sizes
    hidden = (scale * torch.randn(*leading, H, generator=rng)).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=rng).to(dtype).requires_grad_()
    labels = torch.randint(V, (*leading, K), generator=rng)
    flat = labels.view(-1, K)
    flat[0, (K - 1) // 2] = -100  # one entry of a token that counts
    flat[1] = -100  # a whole token
    flat[2, -1] = flat[2, 0]  # twice the same
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
    compare(inputs(dtype, leading), OPTIONS[name], backend=backend)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    leading=st.tuples(st.integers(3, 20)) | st.tuples(st.integers(1, 3), st.integers(3, 7)),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(1, 9)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "softcap": st.sampled_from([1.0, 30.0]),
            "logit_scale": st.sampled_from([0.25, -1.5]),
            "temperature": st.sampled_from([0.3, 2.0]),
        },
    ),
    backend=st.sampled_from([*["torch"] * 7, "triton"]),
    chunk_tokens=st.none() | st.integers(1, 9),
    seed=st.integers(0, 2**16),
)
def test_any_classes(leading, sizes, dtype, scale, options, backend, chunk_tokens, seed):
    backend = "torch" if dtype == torch.float64 else backend
    tensors = inputs(dtype, leading, scale, sizes=sizes, seed=seed)
    compare(tensors, options, backend=backend, chunk_tokens=chunk_tokens)


def compare(tensors, options, **how):
    """Norms of errors are at most twice those of eager code in the same dtype, plus roundings.

    A logit is a sum of H products, whose absolute values bound its rounding error; that error is
    one of every statistic, and of every factor of a row of logits, which backward multiplies by
    rows of the head and of the hidden states.
    """
    hidden, weight, bias, labels = tensors
    leaves, leading, dtype = (hidden, weight, bias), labels.shape[:-1], hidden.dtype
    stats = counted(fused_logprobs)(hidden, weight, labels, bias=bias, **options, **how)
    assert stats.logprob.shape == labels.shape
    assert stats.entropy.shape == stats.lse.shape == stats.argmax.shape == leading
    upstream = torch.randn(labels.shape), torch.randn(leading)

    def run(outs, leaves):
        loss = sum((u * x).sum() for u, x in zip(upstream, outs, strict=True))
        return (*outs, *torch.autograd.grad(loss, leaves))

    ours = run((stats.logprob, stats.entropy), leaves)
    torchs = run(eager(*leaves, labels, **options), leaves)
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact = run(eager(*exact_leaves, labels, **options), exact_leaves)
    h, w, b = (x.detach().double().abs() for x in leaves)
    h = h.flatten(0, -2)
    slope = abs(options.get("logit_scale", 1.0)) / options.get("temperature", 1.0)
    acc_eps, eps = torch.finfo(stats.logprob.dtype).eps, torch.finfo(dtype).eps
    of_logits = 4 * acc_eps * (1 + slope * float((h @ w.T + b).max()))
    factors = sum(float(u.abs().sum()) for u in upstream) * slope
    floors = (
        *(of_logits * x.numel() ** 0.5 for x in exact[:2]),
        *(
            of_logits * factors * x
            for x in (float(w.norm(dim=1).max()), float(h.norm(dim=1).max()), 1)
        ),
    )
    for o, t, e, floor in zip(ours, torchs, exact, floors, strict=True):
        rounding = 8 * max(eps if o.dtype == dtype else 0, torch.finfo(o.dtype).eps)
        error, of_torch, norm = (float(x.detach().norm()) for x in (o - e, t - e, e))
        if not math.isfinite(of_torch):  # eager overflows in float16
            of_torch = 0.0
        assert error <= 2 * of_torch + rounding * norm + floor, (error, of_torch, norm, floor)
    assert stats.logprob.flatten(0, -2)[1].eq(0).all()
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
    # 1 - p has the relative error that the logits have as numbers
    rounding = torch.finfo(torch.float32).eps * float(z.abs().max())
    torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=0)


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
    """A GPU does the same: the entry is NaN, and so are the token's log-probabilities."""
    hidden, weight = torch.randn(2, 4), torch.randn(7, 4)
    classes = torch.tensor([[1, 7], [-100, 3]])

    def unread(problem, classes):
        return classes != -100, classes.clamp(0, 6)

    monkeypatch.setattr(class_logits, "in_range", unread)
    z = class_logits.chosen_logits(Problem(hidden, weight, classes[:, 0]), classes)
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

    def mean_logit(hidden, weight, bias):
        z = F.linear(hidden, weight, bias) * o["logit_scale"]
        z = z if o["softcap"] is None else o["softcap"] * torch.tanh(z / o["softcap"])
        return (z / o["temperature"]).mean(-1).where((labels != -100).any(-1), 0)

    leaves = (hidden, weight, bias)
    wide, upstream = in_float64(*leaves), torch.randn(N)
    mean, exact = mean_logit(*leaves), mean_logit(*wide)
    errs_like(stats.mean_logit, mean, exact)
    errs_like(
        torch.autograd.grad(stats.mean_logit, leaves, upstream),
        torch.autograd.grad(mean, leaves, upstream),
        torch.autograd.grad(exact, wide, upstream.double()),
    )
    plain = fused_logprobs(hidden, weight, labels, bias=bias, backend=backend, **OPTIONS[name])
    assert plain._fields == stats._fields[:4]
    torch.testing.assert_close(tuple(plain), stats[:4])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_budget_without_room_for_wide_sums(backend):
    """The bias's gradient is summed in float32 there, too."""
    rng = torch.Generator().manual_seed(0)
    shapes, classes = ((64, 32), (1000, 32), (1000,)), torch.randint(1000, (64, 4), generator=rng)
    inputs = [torch.randn(s, generator=rng).bfloat16() for s in shapes]

    def gradients(dtype, **options):
        h, w, b = (x.detach().to(dtype).requires_grad_() for x in inputs)
        fused_logprobs(h, w, classes, bias=b, **options).logprob.sum().backward()
        return [x.grad.double() for x in (h, w, b)]

    budget = least_budget(lambda n: gradients(torch.bfloat16, backend=backend, memory_budget=n))
    for got, exact in zip(
        gradients(torch.bfloat16, backend=backend, memory_budget=budget),
        gradients(torch.float64, backend="torch"),
        strict=True,
    ):
        assert (got - exact).norm() <= 2**-7 * exact.norm()


def least_budget(run):
    """The least budget with which ``run`` ends, as the errors say."""
    budget = 1
    while True:
        try:
            run(budget)
        except ValueError as error:
            budget = int(re.search(r"at least (\d+) bytes", str(error))[1])
        else:
            return budget
