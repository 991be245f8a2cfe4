"""Divergences from a teacher: against their definition, near equality, and errors."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import STATISTIC, errs_like, in_float64, logit_rounding
from support.pairs import EVERYTHING, Pair, check_pair
from support.params import slow

from fusedce import fused_ce, fused_kl, fused_kl_tokens, reference_kl
from fusedce.contract.checks import DTYPES
from fusedce.contract.problem import KINDS
from fusedce.testing import draw_numbers

BACKENDS = ("torch", "triton")


# The interpreter takes a second for each kind: `make test` takes one of them.
KINDS_AND_BACKENDS = [
    *((kind, "torch") for kind in KINDS), slow("forward", "triton"), slow("reverse", "triton"),
    ("jsd", "triton"),
]  # fmt: skip


def ours(backend):
    return partial(fused_kl, backend=backend, chunk_tokens=4)


def summed_by_token(*tensors, **options):
    """The same sum from the losses of the tokens: backward computes the logits again."""
    tokens = fused_kl_tokens(*tensors, **options)
    return tokens.sum(), (tensors[4] != -100).sum()


# ---- random pairs -------------------------------------------------------------------------------

NUMBERS: dict[str, tuple[float, ...]] = {
    "temperature": (0.5, 2.0),
    "softcap": (1.0, 30.0),
    "teacher_softcap": (5.0,),
    "logit_scale": (0.25, -1.5),
    "teacher_logit_scale": (3.0,),
    "ce_weight": (0.3, -1.0),
    "beta": (0.0, 0.1, 1.0),
}


@st.composite
def pairs(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    max_vocabulary: int = 300,
) -> Pair:
    """Strategy of :class:`Pair`."""
    chosen = draw_numbers(draw, NUMBERS, NUMBERS)
    chosen["divergence"] = draw(st.sampled_from(KINDS), label="divergence")
    vocabularies = st.one_of(st.sampled_from([1, 2, 257]), st.integers(1, max_vocabulary))
    return Pair(
        N=draw(st.integers(0, 20), label="N"),
        H=draw(st.integers(1, 30), label="H"),
        teacher_H=draw(st.integers(1, 30), label="teacher_H"),
        V=draw(vocabularies, label="V"),
        dtype=draw(st.sampled_from(dtypes)),
        ignored=draw(st.sampled_from([0.0, 0.4, 1.0])),
        spread=draw(st.sampled_from([0.1, 1.0, 20.0])),
        bias=draw(st.booleans(), label="bias"),
        token_weight=draw(st.booleans(), label="token_weight"),
        options=chosen,
        seed=draw(st.integers(0, 2**16)),
    )


# ---- against the definition ---------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(pairs())
def test_any_pair_torch(pair):
    check_pair(ours("torch"), pair)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(pairs(), st.sampled_from([*["torch"] * 7, "triton"]), st.none() | st.integers(1, 9))
def test_any_pair_token_by_token(pair, backend, chunk_tokens):
    backend = "torch" if pair.dtype == torch.float64 else backend
    check_pair(partial(summed_by_token, backend=backend, chunk_tokens=chunk_tokens), pair)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(pairs(dtypes=(torch.float32, torch.bfloat16, torch.float16), max_vocabulary=600))
def test_any_pair_triton(pair):
    check_pair(ours("triton"), pair)


@pytest.mark.parametrize(
    ("factor", "words"), [("loss", "loss_sum"), ("gradient", "hidden"), ("count", "n_valid")]
)
def test_the_comparison_sees_errors(factor, words):
    def wrong(*args, **options):
        total, n = fused_kl(*args, **options)
        if factor == "count":
            return total, n + 1
        if factor == "loss":
            return total + 1e-3, n
        return total.detach() * 1e-3 + total * (1 - 1e-3), n

    with pytest.raises(AssertionError, match=words):
        check_pair(wrong, Pair())


@pytest.mark.parametrize(("kind", "backend"), KINDS_AND_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_options_at_once(kind, dtype, backend):
    options = EVERYTHING | {"divergence": kind}
    pair = Pair(V=531, dtype=dtype, ignored=0.3, bias=True, token_weight=True, options=options)
    check_pair(ours(backend), pair)


EXAMPLES = {
    # with logits of 100 its rounding is 4e-6 of each probability, times a divergence of 50
    "a rounded log-sum-exp does not scale the mean": Pair(
        N=16, H=3, teacher_H=23, V=257, spread=20.0, seed=25, options={"divergence": "reverse"}
    ),
    # of two classes, whose tokens nearly cancel; with AMX their products are of bfloat16
    "the gradient of a bias is summed before it is rounded": Pair(
        N=10, H=9, teacher_H=19, V=2, dtype=torch.bfloat16, ignored=0.4, spread=0.1, bias=True,
        token_weight=True, options={"teacher_logit_scale": 3.0, "divergence": "reverse"}, seed=199,
    ),
    "a teacher of another dtype": Pair(teacher_dtype=torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name in EXAMPLES for backend in BACKENDS],
)
def test_examples(name, backend):
    for loss in (ours(backend), partial(summed_by_token, backend=backend)):
        check_pair(loss, EXAMPLES[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beta", [1e-8, 1e-4, 0.05])
def test_a_mixture_with_hardly_any_of_one_distribution(backend, beta):
    """The mixture of a class is the smaller probability, which 1 + (p - 1) would have lost."""
    hidden, weight = torch.tensor([[20.0, 0.0]]), torch.eye(2)

    def loss_and_gradient(loss, dtype, **options):
        h = hidden.to(dtype, copy=True).requires_grad_()
        out = loss(
            h, weight.to(dtype), hidden.flip(1).to(dtype), weight.to(dtype),
            divergence="jsd", beta=beta, **options,
        ).loss_sum  # fmt: skip
        out.backward()
        return out.double(), h.grad[0, 1].double()

    found = loss_and_gradient(fused_kl, torch.float32, backend=backend)
    # logits are exact; a gap g between log-probabilities is rounded to g * eps
    rounding = 32 * 20 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        found, loss_and_gradient(reference_kl, torch.float64), rtol=rounding, atol=0
    )


@pytest.mark.parametrize(("kind", "backend"), KINDS_AND_BACKENDS)
def test_nearly_equal_distributions_do_not_cancel(kind, backend):
    """1e-6 nats: what rounding the logits costs, and no more; no token is below 0."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, 32, generator=rng) / 32**0.5
    weight = torch.randn(1200, 32, generator=rng)
    apart = (1.4e-3 if kind != "jsd" else 2.8e-3) * torch.randn(1200, generator=rng)
    args = (hidden, weight, hidden, weight)
    exact = reference_kl(*in_float64(*args), divergence=kind, teacher_bias=apart.double())
    assert 3e-7 < exact.mean() < 3e-6  # the inputs are nearly equal, but not quite
    ours = fused_kl(*args, divergence=kind, teacher_bias=apart, backend=backend)
    # roundings of logits of size 1, relative to the distance of both, which is squared
    rounding = 2 * torch.finfo(torch.float32).eps / float(apart.square().mean().sqrt())
    torch.testing.assert_close(ours.loss_sum.double(), exact.loss_sum, rtol=rounding, atol=0)
    tokens = fused_kl_tokens(*args, divergence=kind, teacher_bias=apart, backend=backend)
    assert (tokens > 0).all()
    same = fused_kl_tokens(*args, divergence=kind, backend=backend)
    assert same.abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_logits_far_above_the_first_tile(kind):
    """Their exponentials leave float32's range, relative to the maximum of the first tile.

    Rounding logits of 160 costs several percent of divergences of 1e-7 nats, by luck more or less:
    the errors of many sums are taken together. Eager code, which subtracts log-probabilities of the
    logits' size, errs some 20 times as much.
    """
    sums = {"ours": [], "eager": [], "exact": []}
    for seed in range(12):
        rng = torch.Generator().manual_seed(seed)
        hidden = torch.rand(3, 4, generator=rng) + 0.5
        weight = torch.zeros(20000, 4)  # more than two tiles of 8192 classes
        weight[15000:15003] = 40.0 + torch.rand(3, 4, generator=rng)
        args = (hidden, weight, hidden + 1e-3, weight)
        for name, loss, inputs in (
            ("ours", partial(fused_kl, backend="torch"), args),
            ("eager", partial(reference_kl, dtype=torch.float32), args),
            ("exact", reference_kl, in_float64(*args)),
        ):
            sums[name].append(loss(*inputs, divergence=kind).loss_sum)
    errs_like(*(torch.stack(x) for x in sums.values()), times=0.25, roundings=0)


@pytest.mark.parametrize(("kind", "backend"), KINDS_AND_BACKENDS)
def test_differences_of_logits_are_not_those_of_log_probabilities(kind, backend):
    """Each token within its logits' rounding, where they are far smaller than their log-sum-exp."""
    rng = torch.Generator().manual_seed(0)
    hidden = 0.01 * torch.randn(100, 8, generator=rng)
    weight = torch.randn(200, 8, generator=rng)
    apart = 1.4e-3 * torch.randn(200, generator=rng)
    exact = torch.stack([
        reference_kl(*in_float64(h, weight, h, weight), divergence=kind,
                     teacher_bias=apart.double()).loss_sum
        for h in hidden.split(1)
    ])  # fmt: skip
    ours = fused_kl_tokens(
        hidden, weight, hidden, weight, divergence=kind, teacher_bias=apart, backend=backend
    )
    # that of the bias is the largest: eps times its largest entry, about 3 of its mean size
    rounding = 2 * logit_rounding(hidden, weight, apart) / float(apart.square().mean().sqrt())
    torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_class(kind, backend):
    """A class at -inf for both adds 0; at -inf for one it adds infinity, or the limit."""
    (hidden, weight, there, head, _), more = Pair(bias=True, V=40).tensors()
    for of_student, of_teacher in ((True, True), (True, False), (False, True)):
        options = {k: x.clone() for k, x in more.items()}
        options["bias"][7] = -math.inf if of_student else 0
        options["teacher_bias"][7] = -math.inf if of_teacher else 0
        args = (hidden, weight, there, head)
        ours = fused_kl(*args, divergence=kind, backend=backend, **options).loss_sum
        exact = reference_kl(
            *in_float64(*args), divergence=kind, **{k: x.double() for k, x in options.items()}
        ).loss_sum
        rounding = logit_rounding(hidden, weight) + logit_rounding(there, head)
        close = {"rtol": STATISTIC, "atol": len(hidden) * rounding}
        torch.testing.assert_close(ours.double(), exact, **close)
        infinite = (kind, of_student, of_teacher) in (
            ("forward", True, False), ("reverse", False, True),
        )  # fmt: skip
        assert ours.isinf() == infinite


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize(("logit", "temperature"), [(-30.0, 1.0), (-100.0, 1.0), (-30.0, 2.0)])
def test_a_class_excluded_by_one_head_is_infinite_however_little_the_other_gives(
    kind, logit, temperature, backend
):
    """A probability of 1e-15 times a large finite number was 4e14, one of 1e-44 nearly 0."""
    (hidden, weight, there, head, _), more = Pair(bias=True, V=40, spread=0.1).tensors()
    excludes, gives = more["bias"], more["teacher_bias"]
    if kind == "reverse":
        excludes, gives = gives, excludes
    excludes[7], gives[7] = -math.inf, logit
    options = {"divergence": kind, "backend": backend, "temperature": temperature, **more}
    assert fused_kl(hidden, weight, there, head, **options).loss_sum == math.inf
    gives[7] = -1e5  # of probability 0
    assert fused_kl(hidden, weight, there, head, **options).loss_sum.isfinite()
    gives[7] = -math.inf  # a soft-cap lifts it
    options["softcap" if kind == "reverse" else "teacher_softcap"] = 40.0
    assert fused_kl(hidden, weight, there, head, **options).loss_sum == math.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_a_valid_position_is_seen(backend):
    (hidden, weight, there, head, labels), _ = Pair().tensors()
    for x in (hidden, there):
        kept = x[2].clone()
        x[2] = math.nan
        assert fused_kl(hidden, weight, there, head, labels, backend=backend).loss_sum.isnan()
        x[2] = kept
    assert fused_kl(hidden, weight, there, head, labels, backend=backend).loss_sum.isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_have_gradients_of_their_own(kind, backend):
    pair = Pair(ignored=0.3, bias=True, V=300)
    (hidden, weight, *rest), more = pair.tensors()
    upstream = torch.randn(pair.N, generator=torch.Generator().manual_seed(1))
    upstream[1] = 0
    options = {"divergence": kind, "backend": backend} | more
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    losses = fused_kl_tokens(*leaves, *rest, **options)
    ours = torch.autograd.grad((losses * upstream).sum(), leaves)
    assert losses[rest[-1] == -100].eq(0).all()
    weighed = fused_kl(*leaves, *rest, token_weight=upstream, **options)
    for a, b in zip(ours, torch.autograd.grad(weighed.loss_sum, leaves), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close((losses * upstream).sum(), weighed.loss_sum)
    batched = fused_kl_tokens(
        leaves[0].view(3, 3, -1), leaves[1], rest[0].view(3, 3, -1), rest[1], rest[2].view(3, 3),
        **options,
    )  # fmt: skip
    assert batched.shape == (3, 3)


@pytest.mark.parametrize(("beta", "kind"), [(0.0, "forward"), (1.0, "reverse")])
def test_a_mixture_with_none_of_one_distribution_is_the_limit(beta, kind):
    """As in TRL; the formula gives 0."""
    args = Pair().tensors()[0][:4]
    exact = fused_kl(*args, divergence=kind).loss_sum
    assert fused_kl(*args, divergence="jsd", beta=beta).loss_sum == exact


def test_cross_entropy_beside_it_is_the_ordinary_one():
    (*args, labels), _ = Pair(ignored=0.3).tensors()
    hidden, weight = args[:2]
    both = fused_kl(*args, labels, temperature=3.0, ce_weight=0.5).loss_sum
    alone = fused_kl(*args, labels, temperature=3.0).loss_sum
    torch.testing.assert_close(both - alone, 0.5 * fused_ce(hidden, weight, labels).loss_sum)


@pytest.mark.parametrize("backend", ["torch", slow("triton")])
@pytest.mark.parametrize("monitor", [("correct",), ("entropy",), ("correct", "entropy")])
def test_monitored_sums_are_the_students_at_temperature_1(backend, monitor):
    """Those of ``fused_ce``; loss and gradients are what they are without."""
    (*args, labels), options = Pair(ignored=0.3, token_weight=True).tensors()
    options |= {"backend": backend, "softcap": 5.0}
    leaves = [x.requires_grad_() for x in args[:2]]
    options["temperature"] = 3.0
    out, plain = (fused_kl(*args, labels, monitor=names, **options) for names in (monitor, ()))
    del options["temperature"]
    of_ce = fused_ce(*leaves, labels, monitor=monitor, **options)
    assert out.monitors.keys() == of_ce.monitors.keys() == set(monitor)
    for name, value in out.monitors.items():
        assert not value.requires_grad
        torch.testing.assert_close(value, of_ce.monitors[name], rtol=STATISTIC, atol=0)
    torch.testing.assert_close(tuple(out), tuple(plain), rtol=0, atol=0)
    grads = (torch.autograd.grad(x.mean(), leaves) for x in (out, plain))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_the_teacher_gets_no_gradient_and_a_frozen_student_none():
    (*args, labels), _ = Pair().tensors()
    leaves = [x.requires_grad_() for x in args]
    for frozen in (False, True):
        leaves[1].requires_grad_(not frozen)
        given = [x for x in leaves if x.requires_grad]
        loss = fused_kl(*leaves, labels).mean()
        grads = torch.autograd.grad(loss, given, allow_unused=True)
        assert [x is not None for x in grads] == [True, *[True][frozen:], False, False]


BAD = {
    "longer teacher": (lambda a, o: a.__setitem__(3, a[3].repeat(2, 1)), r"teacher_weight\[:131\]"),
    "shorter teacher": (lambda a, o: a.__setitem__(3, a[3][:9]), r"pass weight\[:9\]"),
    "teacher's H": (lambda a, o: a.__setitem__(3, a[3][:, 1:]), r"teacher_weight must be \(V, H"),
    "teacher's tokens": (lambda a, o: a.__setitem__(2, a[2][1:]), r"\(9,\), got \(8,\)"),
    "no labels": (lambda a, o: (a.__setitem__(4, None), o.update(ce_weight=1.0)), "labels must"),
    "accuracy of nothing": (
        lambda a, o: (a.__setitem__(4, None), o.update(monitor=("correct",))),
        "labels must be given with monitor 'correct'",
    ),
    "z-loss": (lambda a, o: o.update(monitor=("z_loss",)), "monitor must hold names out of"),
    "a name for names": (lambda a, o: o.update(monitor="correct"), "monitor must be a tuple"),
    "label": (lambda a, o: a[4].__setitem__(3, 131), "got 131 at flattened position 3"),
    "fp64 teacher": (lambda a, o: a.__setitem__(2, a[2].double()), "teacher_hidden must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name):
    tensors, _ = Pair().tensors()
    args, options = list(tensors), {}
    spoil, message = BAD[name]
    spoil(args, options)
    with pytest.raises((TypeError, ValueError), match=message):
        fused_kl(*args, **options)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_a_mean_over_nearly_a_power_of_two_tokens_is_not_shrunk(kind):
    """Of bfloat16 hidden states times 1 / 511, nearly all would be rounded in one direction."""
    rng = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(511, 64, generator=rng).bfloat16() for _ in range(2))
    weight, other = (torch.randn(300, 64, generator=rng).div(8).bfloat16() for _ in range(2))

    def gradient(hidden, weight, teacher, other):
        weight = weight.detach().requires_grad_()
        loss = fused_kl(hidden, weight, teacher, other, divergence=kind, backend="torch")
        return torch.autograd.grad(loss.mean(), weight)[0].double()

    given = hidden, weight, teacher, other
    found, exact = gradient(*given), gradient(*(x.double() for x in given))
    assert abs(((found - exact) * exact).sum() / exact.square().sum()) < 5e-4


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_label_that_both_heads_exclude_costs_infinity_and_has_its_gradient(
    temperature, dtype, backend
):
    """The cross-entropy's: the divergence is of the other classes."""
    rng = torch.Generator().manual_seed(0)
    hidden, there = (torch.randn(3, 16, generator=rng).to(dtype) for _ in range(2))
    weight = torch.randn(37, 16, generator=rng).to(dtype).requires_grad_()
    bias = torch.zeros(37).index_fill(0, torch.tensor([3]), -torch.inf).to(dtype)
    labels = torch.tensor([3, 5, 36])
    options = {"ce_weight": 0.5, "temperature": temperature}

    def of(loss, *given, **more):
        h, w, t, w_t, b = given
        out = loss(h, w, t, w_t, labels, bias=b, teacher_bias=b, **options, **more).loss_sum
        return out, torch.autograd.grad(out, w)[0]

    given = hidden, weight, there, weight.detach(), bias
    wide = [x.detach().double() for x in given]
    exact, expected = of(reference_kl, wide[0], wide[1].requires_grad_(), *wide[2:])
    found, gradient = of(fused_kl, *given, backend=backend)
    _, eager = of(reference_kl, *given, dtype=torch.float32)
    assert found == exact == torch.inf
    errs_like(gradient, eager, expected)
    errs_like(gradient[3], eager[3], expected[3])
