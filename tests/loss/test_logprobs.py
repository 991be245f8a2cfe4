"""fused_logprobs: values, gradients token by token, and the numbers near p = 1."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import SAME_SUMS, STATISTIC, errs_like, in_float64
from support.coverage import counted
from support.oracle import finished_logits, token_stats

from fusedce import TokenStats, fused_argmax, fused_logprobs
from fusedce.testing import Case, cases

BACKENDS = ["torch", "triton"]


def compare(case, backend, temperature=1.0, chunk_tokens=None):
    """Values and gradients under random upstream ones: at most twice the eager error in bf16."""
    hidden, weight, labels, bias = case.tensors()
    hidden = hidden.nan_to_num()  # eager looks at ignored rows too
    rng = torch.Generator().manual_seed(1)
    upstream = torch.randn(3, *labels.shape, generator=rng)
    upstream[:, torch.rand(labels.shape, generator=rng) < 0.3] = 0
    options = case.options | {"temperature": temperature}

    def run(fn, cast=lambda x: x, **more):
        leaves = [
            cast(x).detach().requires_grad_() for x in (hidden, weight, bias) if x is not None
        ]
        out = fn(
            leaves[0], leaves[1], labels, bias=leaves[2] if len(leaves) > 2 else None,
            **options, **more,
        )  # fmt: skip
        loss = sum((u.to(x.dtype) * x).sum() for u, x in zip(upstream, out, strict=False))
        return out, torch.autograd.grad(loss, leaves)

    (ours, d_ours) = run(counted(fused_logprobs), backend=backend, chunk_tokens=chunk_tokens)
    (torchs, d_torchs) = run(token_stats)
    (exact, d_exact) = run(token_stats, lambda x: x.double())
    scale = abs(case.options.get("logit_scale", 1.0)) / temperature
    size = hidden.double().abs() @ weight.double().abs().T
    size = size + (0 if bias is None else bias.double().abs())
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    condition = 1 + scale * (float(size.max()) if size.numel() else 0)
    rounding = 4 * torch.finfo(wide).eps * condition
    for name, o, t, e in zip(TokenStats._fields[:3], ours, torchs, exact, strict=False):
        assert o.dtype == wide
        error, bound = (o - e).abs(), 2 * (t - e).abs().amax() if t.numel() else 0
        assert (error <= bound + rounding * (1 + e.abs())).all(), (name, error.max())
    eps = torch.finfo(case.dtype).eps
    for name, o, t, e in zip(("hidden", "weight", "bias"), d_ours, d_torchs, d_exact, strict=False):
        spread = {"hidden": weight, "weight": hidden.reshape(-1, case.H)}.get(name)
        spread = float(spread.double().abs().sum(0).max()) if spread is not None else labels.numel()
        floor = 2 * eps * float(e.abs().max()) if e.numel() else 0
        floor += 2 * rounding * condition * spread * scale
        error = float((o - e).abs().max()) if e.numel() else 0
        torch_error = float((t - e).abs().max()) if e.numel() else 0
        assert error <= 2 * torch_error + floor, (name, error, torch_error, floor)
    valid = labels != case.options.get("ignore_index", -100)
    assert ours.argmax[~valid].eq(-1).all()
    z = finished_logits(hidden.double(), weight.double(), None if bias is None else bias.double(),
                 **{k: v for k, v in case.options.items() if k != "ignore_index"})  # fmt: skip
    given = {k: v for k, v in case.options.items() if k != "ignore_index"}
    alone = counted(fused_argmax)(hidden, weight, bias=bias, backend=backend, **given)
    for argmax, where in ((ours.argmax, valid), (alone, torch.ones_like(valid))):
        taken = z.gather(-1, argmax.clamp(min=0)[..., None])[..., 0]
        least = z.amax(-1) - rounding * temperature * (1 + z.abs().amax(-1))
        assert (taken >= least)[where].all()


OPTIONS = ("bias", "softcap", "logit_scale", "ignore_index")


@settings(max_examples=50, deadline=None)
@given(
    case=cases(options=OPTIONS),
    temperature=st.sampled_from([1.0, 0.3, 2.0]),
    chunk_tokens=st.none() | st.integers(1, 17),
)
def test_any_case_torch_agrees_with_eager(case, temperature, chunk_tokens):
    if case.logits == "huge" and case.dtype == torch.float16:
        return  # eager overflows
    compare(case, "torch", temperature, chunk_tokens)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    case=cases(dtypes=(torch.float32, torch.bfloat16), options=OPTIONS, max_tokens=20,
               max_vocabulary=150),
    temperature=st.sampled_from([1.0, 0.3]),
    chunk_tokens=st.none() | st.integers(1, 9),
)  # fmt: skip
def test_any_case_triton_agrees_with_eager(case, temperature, chunk_tokens):
    compare(case, "triton", temperature, chunk_tokens)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("logits", ["flat", "peaked"])
def test_a_vocabulary_of_1031_agrees_with_eager(backend, dtype, logits):
    """A prime: divisible by no block, with several tiles, splits and blocks."""
    case = Case(
        (40,), 40, 1031, dtype, logits=logits, ignored=0.3, with_bias=True,
        options={"softcap": 30.0},
    )  # fmt: skip
    compare(case, backend, 0.7, 16)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "logit_scale": 0.7}])
def test_gradcheck_passes(options):
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -100, 0, 8, 3])

    def f(h, w, b):
        stats = fused_logprobs(h, w, labels, bias=b, temperature=0.6, chunk_tokens=2, **options)
        return stats[:3]

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("label_is_top", [True, False])
@pytest.mark.parametrize("V", [2, 300, 700])
def test_entropy_does_not_cancel_where_one_class_has_all(backend, label_is_top, V):
    """``1 - p`` from 1e-1 to 1e-18: the rounding of a gap of 40 is that of a log-probability."""
    gaps = torch.linspace(2, 40, 39)
    hidden = gaps[:, None].clone()
    weight = torch.zeros(V, 1)
    weight[V // 2] = 1  # logits: the gap at one class, 0 at all others
    labels = torch.full((39,), V // 2 if label_is_top else 1 - min(V // 2, 1))
    leaves = hidden.requires_grad_(), weight
    stats = fused_logprobs(*leaves, labels, backend=backend)
    d = gaps.double()
    rest = (V - 1) * torch.exp(-d)  # against the top's 1
    log_sum = torch.log1p(rest)
    entropy = log_sum + d * rest / (1 + rest)
    logprob = -log_sum if label_is_top else -d - log_sum
    # an exponential errs by the rounding of its argument, here up to 40 times log2(e)
    rounding = 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=rounding, atol=0)
    torch.testing.assert_close(stats.logprob.double(), logprob, rtol=rounding, atol=0)
    torch.testing.assert_close(stats.lse.double(), d + log_sum, rtol=STATISTIC, atol=0)
    if label_is_top:  # d logprob / d gap = 1 - p
        grad = torch.autograd.grad(stats.logprob.sum(), hidden)[0][:, 0]
        torch.testing.assert_close(grad.double(), rest / (1 + rest), rtol=rounding, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_positions_hold_nothing(backend):
    hidden, weight, labels, _ = Case((3, 9), 12, 70, ignored=0.4).tensors()  # NaN where ignored
    ignored = labels == -100
    stats = fused_logprobs(hidden.requires_grad_(), weight.requires_grad_(), labels,
                           backend=backend)  # fmt: skip
    for x, value in zip(stats, (0, 0, 0, -1), strict=True):
        assert x.shape == (3, 9)
        assert x[ignored].eq(value).all()
        assert x[~ignored].ne(value).all()
    d_hidden, d_weight = torch.autograd.grad(sum(x.sum() for x in stats[:3]), (hidden, weight))
    assert d_hidden[ignored].eq(0).all()
    assert d_weight.isfinite().all()
    nothing = fused_logprobs(hidden, weight, torch.full_like(labels, -100), backend=backend)
    assert torch.autograd.grad(nothing.logprob.sum(), weight)[0].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masked_class_has_no_part_in_the_entropy(backend):
    hidden, weight, labels, _ = Case((20,), 12, 400).tensors()
    bias = torch.zeros(400)
    bias[100:] = float("-inf")
    stats = fused_logprobs(hidden, weight.requires_grad_(), labels % 100, bias=bias,
                           backend=backend)  # fmt: skip
    wide = in_float64(hidden, weight)
    torchs = token_stats(hidden, weight[:100], labels % 100)
    exact = token_stats(wide[0], wide[1][:100], labels % 100)
    errs_like(stats.entropy, torchs.entropy, exact.entropy)
    got = torch.autograd.grad(100 * stats.entropy.sum(), weight)[0]
    errs_like(
        got, torch.autograd.grad(100 * torchs.entropy.sum(), weight)[0],
        torch.autograd.grad(100 * exact.entropy.sum(), wide[1])[0],
    )  # fmt: skip
    assert got[100:].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_has_the_same_bits_in_every_batch(backend):
    hidden, weight, labels, _ = Case((40,), 24, 700, torch.bfloat16).tensors()
    whole = fused_logprobs(hidden, weight, labels, backend=backend)
    part = fused_logprobs(hidden[7:19], weight, labels[7:19], backend=backend)
    for x, y in zip(whole, part, strict=True):
        assert x[7:19].equal(y)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.slow),
    ],
)
def test_backward_inside_a_graph_is_backward_outside(monkeypatch, dtype):
    """There the used rows cannot be counted: all take part, and the result must not show it."""
    from fusedce.backends.triton import vocab_tiles as launch_tokens

    hidden, weight, labels, bias = Case(
        (90,), 24, 200, dtype, ignored=0.3, with_bias=True
    ).tensors()

    def run():
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        stats = fused_logprobs(leaves[0], leaves[1], labels, bias=leaves[2], backend="triton",
                               chunk_tokens=40)  # fmt: skip
        return torch.autograd.grad((stats.logprob + stats.entropy).sum(), leaves)

    outside = run()
    monkeypatch.setattr(launch_tokens, "capturing", lambda device: True)
    # the same terms; 60 rows are added, whose gradients are 0
    eps = max(torch.finfo(dtype).eps, SAME_SUMS)
    for x, y in zip(run(), outside, strict=True):
        torch.testing.assert_close(x, y, rtol=eps, atol=eps * float(y.abs().max()))


def test_the_entropy_of_several_tiles_of_the_vocabulary():
    """Each tile sums with its own maximum, and the sums are moved to the largest."""
    torch.manual_seed(0)
    N, H, V = 256, 8, 70_000
    hidden, weight = torch.randn(N, H), torch.randn(V, H)

    def entropy(h, w):
        logprobs = torch.log_softmax(h @ w.t(), -1)
        return -(logprobs.exp() * logprobs).sum(-1)

    stats = fused_logprobs(hidden, weight, torch.zeros(N, dtype=torch.int64), backend="torch")
    exact = entropy(hidden.double(), weight.double())
    errs_like(stats.entropy, entropy(hidden, weight), exact)
