"""fused_logprobs: values and gradients of one or several classes a token, and near p = 1."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import EXACT, STATISTIC, errs_like, in_float64
from support.oracle import finished_logits, token_stats
from support.token_stats import DIFFERENTIABLE, compare

from fusedce import fused_kl, fused_logprobs
from fusedce.backends import class_logits
from fusedce.contract.problem import Problem
from fusedce.testing import Case, cases

BACKENDS = ["torch", "triton"]
OPTIONS = ("bias", "softcap", "logit_scale", "ignore_index")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("K", [None, 3])
@pytest.mark.parametrize(
    "through",
    [some for n in range(1, 5) for some in itertools.combinations(DIFFERENTIABLE, n)],
    ids="+".join,
)
def test_any_outputs_may_be_without_a_gradient(through, K, backend):
    compare(Case((7,), 16, 37, ignored=0.3), backend, K=K, through=through)


temperatures = st.sampled_from([1.0, 0.3, 2.0, "each"])


@settings(max_examples=60, deadline=None)
@given(cases(options=OPTIONS), temperatures, st.none() | st.integers(1, 17),
       st.none() | st.integers(1, 9))  # fmt: skip
def test_any_case_torch_agrees_with_eager(case, temperature, chunk_tokens, K):
    if case.logits == "huge" and case.dtype == torch.float16:
        return  # eager overflows
    compare(case, "torch", temperature, chunk_tokens, K)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    cases(dtypes=(torch.float32, torch.bfloat16), options=OPTIONS, max_tokens=20,
          max_vocabulary=150),
    temperatures, st.none() | st.integers(1, 9), st.none() | st.integers(1, 9),
)  # fmt: skip
def test_any_case_triton_agrees_with_eager(case, temperature, chunk_tokens, K):
    compare(case, "triton", temperature, chunk_tokens, K)


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K", [None, 4])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "logit_scale": -0.7}])
def test_several_classes_and_a_temperature_for_each_token(backend, dtype, K, options):
    case = Case((2, 5), 8, 23, dtype, ignored=0.3, with_bias=True, options=options)
    compare(case, backend, "each", K=K)


# ---- nothing cancels near a probability of one ----------------------------------------------


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
def test_a_sure_class_keeps_its_digits_at_whatever_place_it_stands(backend):
    hidden, weight, labels, bias = Case((6,), 8, 23, with_bias=True).tensors()
    hidden = 60 * hidden
    z = finished_logits(hidden.double(), weight.double(), bias.double())
    best = z.argmax(-1)
    others = z.scatter(1, best[:, None], -torch.inf).logsumexp(1)
    exact = -torch.log1p(torch.exp(others - z.amax(1)))
    assert -1e-6 < exact.max() < 0
    for at in range(3):
        classes = torch.stack([labels, labels, labels], 1)
        classes[:, at] = best
        ours = fused_logprobs(hidden, weight, classes, bias=bias, backend=backend).logprob[:, at]
        # 1 - p has the relative error that the logits have as numbers
        rounding = torch.finfo(torch.float32).eps * float(z.abs().max())
        torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=0)


# ---- ignored positions, masked classes, batches ---------------------------------------------


def gradients_of_entropy_err_like_eager(hidden, weight, **options):
    def gradients(stats, dtype, **options):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        entropy = stats(*leaves, torch.ones(len(hidden), dtype=torch.int64), **options).entropy
        return torch.autograd.grad(entropy.sum(), leaves)

    ours = gradients(fused_logprobs, torch.float32, **options)
    eager = gradients(token_stats, torch.float32)
    errs_like(ours, eager, gradients(token_stats, torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rounded_log_sum_exp_is_in_no_gradient(backend):
    """Logits are exact here; a log-sum-exp near 300 would be rounded by up to 1.5e-5."""
    hidden = torch.tensor([[300.0, 300 - 5.0], [301.0, 301 - 7.0], [-200.0, -208.0]])
    gradients_of_entropy_err_like_eager(hidden, torch.eye(2), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_of_few_tokens_has_the_logits_of_the_forward_pass(backend):
    rng = torch.Generator().manual_seed(0)
    hidden, weight = 12 * torch.randn(24, 32, generator=rng), torch.randn(128, 32, generator=rng)
    gradients_of_entropy_err_like_eager(hidden, weight, backend=backend, chunk_tokens=1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("K", [None, 3])
def test_ignored_positions_hold_nothing(backend, K):
    hidden, weight, labels, _ = Case((3, 9), 12, 70, ignored=0.4).tensors()  # NaN where ignored
    ignored = labels == -100
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    labels = labels if K is None else labels[..., None].expand(3, 9, K)
    stats = fused_logprobs(*leaves, labels, backend=backend)
    for x, value in zip(stats, (0, 0, 0, -1), strict=True):
        assert x[ignored].eq(value).all()
        assert x[~ignored].ne(value).all()
    d_hidden, d_weight = torch.autograd.grad(sum(x.sum() for x in stats[:3]), leaves)
    assert d_hidden[ignored].eq(0).all()
    assert d_weight.isfinite().all()


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_a_student_near_its_teacher_do_not_cancel(backend, dtype):
    """``p - q`` of a class is rounded, not ``p``: with all classes and nearly equal logits."""
    hidden, weight, *_ = Case((20,), 16, 40, dtype).tensors()
    z = F.linear(*in_float64(hidden, weight)).detach()
    z = z + 0.01 * torch.randn(z.shape, generator=torch.Generator().manual_seed(2))
    q, classes = z.softmax(-1).topk(40)
    q = q.float()

    def gradients(function, *leaves):
        return torch.autograd.grad(-(q * function(*leaves, classes)).sum(), leaves)

    def ours(hidden, weight, classes):
        return fused_logprobs(hidden, weight, classes, backend=backend).logprob

    found = gradients(ours, hidden.requires_grad_(), weight.requires_grad_())
    exact = gradients(lambda *x: token_stats(*x).logprob, *in_float64(hidden, weight))
    # The last of logits' own float32 roundings, beside differences of 0.01.
    rounding = 4 * torch.finfo(dtype).eps + 2e-4
    for x, y in zip(found, exact, strict=True):
        assert (x.double() - y).norm() <= rounding * y.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_chosen_classes_that_are_masked_are_impossible_and_not_nan(backend):
    """Also where all classes chosen for a token are."""
    hidden, weight, *_ = Case((3,), 8, 23).tensors()
    bias = torch.zeros(23)
    bias[1:3] = float("-inf")
    labels = torch.tensor([[1, 2], [1, 0], [3, 2]])
    found = fused_logprobs(hidden, weight, labels, bias=bias, backend=backend).logprob
    exact = F.linear(*in_float64(hidden, weight), bias.double()).log_softmax(-1).gather(1, labels)
    torch.testing.assert_close(found.detach(), exact.detach().to(found))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_has_the_same_bits_in_every_batch(backend):
    hidden, weight, labels, _ = Case((40,), 24, 700, torch.bfloat16).tensors()
    whole = fused_logprobs(hidden, weight, labels, backend=backend)
    part = fused_logprobs(hidden[7:19], weight, labels[7:19], backend=backend)
    for x, y in zip(whole, part, strict=True):
        assert x[7:19].equal(y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_class_is_the_label_and_any_order_of_memory_is_the_same(backend):
    """``torch.stack([chosen, rejected]).T`` is how pairs are often made."""
    hidden, weight, labels, _ = Case((6,), 8, 23).tensors()
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    pairs, twice = torch.stack([labels, labels.roll(1)]).T, labels[:, None].expand(-1, 2)
    label, one, *several = (
        fused_logprobs(*leaves, x, backend=backend)
        for x in (labels, labels[:, None], pairs, pairs.contiguous(), twice, twice.contiguous())
    )
    torch.testing.assert_close(one._replace(logprob=one.logprob[:, 0]), label, **EXACT)
    upstream = torch.linspace(-1, 1, 12)
    for order in (upstream.view(6, 2), upstream.view(2, 6).T):  # of the upstream gradient's memory
        for other, contiguous in zip(several[::2], several[1::2], strict=True):
            torch.testing.assert_close(other, contiguous, **EXACT)
            found, exact = (
                torch.autograd.grad(x.logprob, leaves, order, retain_graph=True)
                for x in (other, contiguous)
            )
            torch.testing.assert_close(found, exact, **EXACT)
            wide = in_float64(*leaves)
            in_order = token_stats(*wide, twice if other is several[2] else pairs).logprob
            exact = torch.autograd.grad(in_order, wide, order.double())
            for x, y in zip(found, exact, strict=True):
                assert (x - y).norm() <= 1e-5 * y.norm()


def test_the_entropy_of_several_tiles_of_the_vocabulary():
    """Each tile sums with its own maximum, and the sums are moved to the largest."""
    hidden, weight = torch.randn(256, 8), torch.randn(70_000, 8)
    labels = torch.zeros(256, dtype=torch.int64)
    stats = fused_logprobs(hidden, weight, labels, backend="torch")
    eager, exact = (token_stats(*x, labels) for x in ((hidden, weight), in_float64(hidden, weight)))
    errs_like(stats.entropy, eager.entropy, exact.entropy)


# ---- errors ---------------------------------------------------------------------------------


def test_a_bad_class_is_named():
    hidden, weight, labels, _ = Case((6,), 8, 23).tensors()
    classes = labels[:, None].repeat(1, 4)
    for bad, ignored in ((23, -100), (-100, None)):
        classes[3, 2] = bad
        with pytest.raises(ValueError, match=f"got {bad} at flattened position {3 * 4 + 2}"):
            fused_logprobs(hidden, weight, classes, ignore_index=ignored)


def test_a_bad_class_is_nan_where_labels_are_not_read(monkeypatch):
    """A GPU does the same: the entry is NaN, and so are the token's log-probabilities."""
    hidden, weight = torch.randn(2, 4), torch.randn(7, 4)
    classes = torch.tensor([[1, 7], [-100, 3]])

    def unread(problem, classes, V):
        return classes != -100, classes.clamp(0, V - 1)

    monkeypatch.setattr(class_logits, "in_range", unread)
    z = class_logits.chosen_logits(Problem(hidden, weight, classes[:, 0]), classes)
    assert z.isnan().tolist() == [[False, True], [False, False]]
    assert z[1, 0] == 0


def test_what_is_no_temperature():
    given = Case((7,), 8, 23).tensors()[:3]
    t = torch.linspace(0.3, 2.5, 7)
    for change, error, message in (
        (t[:3], ValueError, r"temperature must be \(...\) = \(7,\), got \(3,\)"),
        (t.long(), TypeError, "temperature must be floats"),
        (t - 1, ValueError, r"temperature must be positive and finite, got -0\.69"),
        (t.requires_grad_(), ValueError, "temperature must not require grad"),
    ):
        with pytest.raises(error, match=message):
            fused_logprobs(*given, temperature=change)


def test_a_temperature_that_would_make_logits_infinite():
    h, w = torch.ones(2, 3), torch.ones(4, 3)
    for call in (
        lambda t: fused_logprobs(h, w, torch.tensor([0, 1]), softcap=5.0, temperature=t),
        lambda t: fused_kl(h, w, h, w, temperature=t),
    ):
        for cold in (1e-38, 1e-40):
            with pytest.raises(ValueError, match=rf"temperature must be .* 1e-30.* got {cold}"):
                call(cold)


def test_calls_that_wait_for_one_backward_do_not_depend_on_whether_logits_were_kept():
    hidden, weight = torch.randn(60, 4), torch.randn(40_000, 4, requires_grad=True)
    labels = torch.arange(60)

    def gradient(pieces, **options):
        parts = zip(hidden.chunk(pieces), labels.chunk(pieces), strict=True)
        loss = sum(fused_logprobs(h, weight, y, **options).logprob.sum() for h, y in parts)
        return torch.autograd.grad(loss, weight)[0]

    exact = gradient(1)
    torch.testing.assert_close(gradient(10), exact)
    torch.testing.assert_close(gradient(10, memory_budget=2**22), exact)


@pytest.mark.parametrize("backend", BACKENDS)
def test_classes_that_are_all_impossible_have_eagers_gradient(backend):
    """A bias of -inf excludes every class of a token: each still gets its own upstream gradient."""
    hidden, weight, _, _ = Case((6,), 16, 23).tensors()
    bias = torch.zeros(23).index_fill(0, torch.tensor([3, 7, 11, 20]), -torch.inf)
    labels = torch.randint(23, (6, 3), generator=torch.Generator().manual_seed(0))
    labels[2], labels[4] = torch.tensor([7, 3, 20]), torch.tensor([11, 11, 3])
    upstream = torch.linspace(0.5, 2, 18).view(6, 3)
    leaves = [x.detach().requires_grad_() for x in (hidden, weight, bias)]
    found = fused_logprobs(*leaves[:2], labels, bias=leaves[2], backend=backend).logprob
    wide = in_float64(*leaves)
    exact = (wide[0] @ wide[1].T + wide[2]).log_softmax(1).gather(1, labels)
    assert found.isneginf().equal(exact.isneginf())
    found = torch.autograd.grad(found, leaves, upstream)
    exact = torch.autograd.grad(exact, wide, upstream.double())
    for x, e in zip(found, exact, strict=True):
        assert (x - e).norm() <= 1e-5 * e.norm()
