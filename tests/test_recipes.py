"""Losses made of log-probabilities: values and gradients equal those of eager code on logits."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.bounds import STATISTIC, errs_like, in_float64
from support.oracle import token_stats

from fusedce import fused_kl, fused_logprobs, fused_topk, recipes

BACKENDS = ["torch", "triton"]
EPS = torch.finfo(torch.float32).eps
B, T, H, V, K = 4, 5, 8, 23, 6


def inputs(seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, T, H, generator=rng).requires_grad_()
    weight = torch.randn(V, H, generator=rng).requires_grad_()
    labels = torch.randint(V, (B, T), generator=rng)
    labels[:, 0] = -100  # a prompt
    labels[2, 3:] = -100  # a shorter answer
    return hidden, weight, labels


def check(ours, eager, leaves, **bound):
    """``eager`` is a function of the leaves, whose errors in float32 are measured too.

    Several losses are one vector, each of leaves of its own.
    """
    wide = in_float64(*leaves)
    theirs, exact = eager(*leaves), eager(*wide)
    errs_like(ours, theirs, exact, **bound)
    of_ours = torch.autograd.grad(ours.sum(), leaves, retain_graph=True)
    of_theirs, of_exact = (
        torch.autograd.grad(loss.sum(), x) for loss, x in ((theirs, leaves), (exact, wide))
    )
    errs_like(of_ours, of_theirs, of_exact, **bound)


GRPO = {
    "token": {},
    "sequence": {"normalisation": "sequence"},
    "dr_grpo": {"normalisation": "dr_grpo", "max_length": 9},
    "gspo": {"ratio": "sequence", "normalisation": "sequence"},
    "cispo": {"kind": "cispo"},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GRPO)
def test_grpo(backend, name):
    """Of four draws: a loss of terms of both signs may be far closer than its terms by luck."""
    losses, references, leaves = [], [], []
    for seed in range(4):
        of_draw, eager, of_leaves = grpo(name, backend, seed)
        losses.append(of_draw)
        references.append(eager)
        leaves += of_leaves

    def eager(*leaves):
        pairs = zip(leaves[::2], leaves[1::2], strict=True)
        return torch.stack([f(*pair) for f, pair in zip(references, pairs, strict=True)])

    check(torch.stack(losses), eager, leaves)


def grpo(name, backend, seed):
    """The loss, that of eager code as a function of hidden states and head, and these."""
    hidden, weight, labels = inputs(seed)
    labels[3] = -100  # an answer without tokens
    used = labels != -100
    stats = fused_logprobs(hidden, weight, labels, backend=backend)
    logprob, *_ = token_stats(hidden, weight, labels)
    rng = torch.Generator().manual_seed(2 + seed)
    sampled, reference = (
        logprob.detach() + spread * torch.randn(B, T, generator=rng) for spread in (0.3, 0.1)
    )
    advantage = torch.randn(B, generator=rng)
    ours = recipes.grpo_loss(
        stats.logprob, sampled, advantage, used.long(), clip=(0.1, 0.2), reference=reference,
        kl=0.05, entropy=stats.entropy, entropy_bonus=0.01, **GRPO[name],
    )  # fmt: skip

    def eager(hidden, weight):
        logprob, entropy, *_ = token_stats(hidden, weight, labels)
        log_ratio, lengths = logprob - sampled, used.sum(1).clamp(min=1)
        if name == "gspo":
            log_ratio = ((log_ratio * used).sum(1) / lengths)[:, None].expand(B, T)
        ratio, a = log_ratio.exp(), advantage[:, None]
        gain = torch.min(ratio * a, torch.clamp(ratio, 0.9, 1.2) * a)
        if name == "cispo":
            gain = ratio.clamp(max=1.2).detach() * a * logprob
        penalty = (reference - logprob).exp() - (reference - logprob) - 1
        losses = -(gain - 0.05 * penalty + 0.01 * entropy) * used
        if name in ("sequence", "gspo"):
            return (losses.sum(1) / lengths).mean()
        return losses.sum() / (B * 9 if name == "dr_grpo" else used.sum())

    assert ((logprob - sampled).exp()[used] > 1.2).any()  # some are clipped
    expected = {"token": used.sum(), "cispo": used.sum(), "dr_grpo": 36}.get(name, B)
    assert (ours.n_valid.dtype, ours.n_valid) == (torch.int64, expected)
    return ours.mean(), eager, (hidden, weight)


@pytest.mark.parametrize("apart", [0.0, 0.1, 0.5, 80.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [-2.0, -1.0, 0.0, 1.5])
def test_grpo_of_policies_far_apart(apart, advantage):
    """An exponential that overflows leaves clipped tokens alone: no gradient of 0 * inf."""
    used = torch.ones(1, 2, dtype=torch.bool)
    for kl in (0.0, 0.1):
        logprob = torch.tensor([[-1.0, -1.0 - apart]], requires_grad=True)
        sampled = torch.tensor([[-1.0 - apart, -1.0]])
        reference = logprob.detach() - apart
        ours = recipes.grpo_loss(
            logprob, sampled, torch.tensor([advantage]), used, reference=reference, kl=kl
        ).loss_sum
        r = (logprob.detach() - sampled).double().exp()
        rises = (r <= 1.2) if advantage > 0 else (r >= 0.8)
        counts = rises if advantage else torch.zeros_like(rises)
        r_used = torch.where(counts, r, r.clamp(0.8, 1.2))
        d = (reference - logprob.detach()).double()
        exact = (-r_used * advantage + kl * (d.expm1() - d)).sum()
        slope = torch.where(counts, -r * advantage, 0.0) - kl * d.expm1()
        # an exponential errs by the rounding of its argument: 88 at most, where it is finite
        close = {"rtol": 100 * EPS, "atol": 4 * EPS}
        torch.testing.assert_close(ours, exact.float(), **close)
        found = torch.autograd.grad(ours, logprob)[0]
        torch.testing.assert_close(found, slope.float(), **close)


def log_odds(mean):
    return mean - (1 - mean.exp()).log()


# name: (options, log-ratio or log-probability of an answer, loss of a pair)
PAIRS = {
    "sigmoid": ({"beta": 0.3}, "ratio", lambda c, r: -F.logsigmoid(0.3 * (c - r))),
    "hinge": ({"beta": 0.3}, "ratio", lambda c, r: torch.relu(1 - 0.3 * (c - r))),
    "apo_zero": (
        {"beta": 0.3}, "ratio", lambda c, r: 1 - torch.sigmoid(0.3 * c) + torch.sigmoid(0.3 * r)
    ),
    "apo_down": (
        {"beta": 0.3}, "ratio",
        lambda c, r: torch.sigmoid(0.3 * c) + 1 - torch.sigmoid(0.3 * (c - r)),
    ),
    "cpo": ({"beta": 0.3}, "sum", lambda c, r: -F.logsigmoid(0.3 * (c - r))),
    "simpo": ({"beta": 2.0, "gamma": 0.7}, "mean", lambda c, r: -F.logsigmoid(2 * (c - r) - 0.7)),
    "orpo": (
        {"beta": 0.2}, "mean", lambda c, r: -0.2 * F.logsigmoid(log_odds(c) - log_odds(r))
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs(backend, smoothing, name):
    hidden, weight, labels = inputs()
    options, of, loss_of_pair = PAIRS[name]
    if smoothing and (of != "ratio" and name != "cpo"):
        pytest.skip("smoothed as CPO is, or not at all")
    frozen, frozen_weight, _ = inputs(1)
    lengths = (labels != -100).sum(-1)
    policy = fused_logprobs(hidden, weight, labels, backend=backend).logprob.sum(-1)
    with torch.no_grad():
        reference = fused_logprobs(frozen, frozen_weight, labels, backend=backend).logprob.sum(-1)
    if of == "ratio":
        ours = recipes.dpo_loss(policy, reference, kind=name, label_smoothing=smoothing, **options)
    elif name == "orpo":
        ours = recipes.orpo_loss(policy / lengths, **options)
    else:
        policy = policy / lengths if of == "mean" else policy
        ours = recipes.cpo_loss(policy, label_smoothing=smoothing, **options)

    def eager(hidden, weight):
        found = token_stats(hidden, weight, labels)[0].sum(-1)
        if of == "ratio":
            of_frozen = (x.to(hidden.dtype) for x in (frozen, frozen_weight))
            found = found - token_stats(*of_frozen, labels)[0].sum(-1).detach()
        elif of == "mean":
            found = found / lengths
        c, r = found[:2], found[2:]
        return ((1 - smoothing) * loss_of_pair(c, r) + smoothing * loss_of_pair(r, c)).mean()

    assert ours.n_valid == 2
    check(ours.mean(), eager, (hidden, weight))


def test_odds_of_a_sure_answer_are_finite():
    policy = torch.tensor([0.0, -1e-30, -1.0, 0.0], requires_grad=True)
    loss = recipes.orpo_loss(policy).mean()
    assert loss.isfinite()
    assert torch.autograd.grad(loss, policy)[0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_kto(backend):
    hidden, weight, labels = inputs()
    reference = token_stats(*inputs(1)[:2], labels)[0].sum(-1).detach()
    desirable = torch.tensor([True, False, False, True])
    policy = fused_logprobs(hidden, weight, labels, backend=backend).logprob.sum(-1)
    for divergence in (torch.tensor(0.7), torch.tensor(-0.7)):
        ours = recipes.kto_loss(
            policy, reference, desirable.long(), divergence, beta=0.2, undesirable_weight=1.5
        )
        at_least_0 = max(divergence.item(), 0)

        def eager(hidden, weight, d=at_least_0):
            r = token_stats(hidden, weight, labels)[0].sum(-1) - reference
            good, bad = 1 - torch.sigmoid(0.2 * (r - d)), 1 - torch.sigmoid(0.2 * (d - r))
            return (good[desirable].sum() + 1.5 * bad[~desirable].sum()) / B

        check(ours.mean(), eager, (hidden, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_scaled(backend):
    hidden, weight, labels = inputs()
    used = labels != -100
    logprob = fused_logprobs(hidden, weight, labels, backend=backend).logprob

    def eager(hidden, weight):
        found = token_stats(hidden, weight, labels)[0]
        return -(found.exp().detach() * found)[used].sum() / used.sum()

    ours = recipes.token_scaled_loss(logprob, used.float())  # numbers are a mask, too
    assert ours.n_valid.equal(used.sum())
    check(ours.mean(), eager, (hidden, weight))


def warped(z, top_k, top_p):
    """Logits as transformers' TopKLogitsWarper and TopPLogitsWarper leave them."""
    if top_k is not None:
        z = z.masked_fill(z < z.topk(top_k).values[..., -1:], -torch.inf)
    in_order, at = z.sort(descending=False)
    gone = in_order.softmax(-1).cumsum(-1) <= 1 - top_p
    gone[..., -1] = False
    return z.masked_fill(gone.scatter(-1, at, gone), -torch.inf)


@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("top_p", [0.1, 0.7, 1.0])
def test_filtered_sampling(top_k, top_p):
    hidden, weight, labels = inputs()
    z = warped(F.linear(hidden.detach(), weight.detach()), top_k, top_p)
    sampled = torch.distributions.Categorical(logits=z).sample().where(labels != -100, labels)
    top = fused_topk(hidden, weight, V if top_k is None else 6)
    logprob = fused_logprobs(hidden, weight, sampled).logprob
    ours = recipes.filtered_logprob(logprob, sampled, top, top_k=top_k, top_p=top_p)

    def eager(hidden, weight):
        full = F.linear(hidden, weight)
        log_p = full.masked_fill(z == -torch.inf, -torch.inf).log_softmax(-1)
        found = log_p.gather(-1, sampled.clamp(min=0)[..., None])[..., 0]
        return found.where(sampled != -100, 0).sum()

    check(ours.sum(), eager, (hidden, weight), roundings=64)  # terms of both signs; V of them


def test_a_filter_whose_set_is_not_known_is_nan_and_a_class_beyond_it_is_kept():
    hidden, weight, labels = inputs()
    top = fused_topk(hidden, weight, 3)
    logprob = fused_logprobs(hidden, weight, labels).logprob
    unknown = recipes.filtered_logprob(logprob, labels, top, top_p=0.999)
    few = top.logprob.exp().sum(-1) < 0.999
    assert (unknown.isnan() == (few & (labels != -100))).all()
    assert few.any()
    least = F.linear(hidden, weight).argmin(-1)
    logprob = fused_logprobs(hidden, weight, least).logprob
    found = recipes.filtered_logprob(logprob, least, top, top_k=3)
    with_it = torch.cat([top.logprob, logprob[..., None]], -1).logsumexp(-1)
    torch.testing.assert_close(found, logprob - with_it)
    for options, words in (
        ({"top_k": 4}, r"top_k must be in \[1, K\] with K=3"), ({"top_p": 0.0}, "top_p must be in"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            recipes.filtered_logprob(logprob, least, top, **options)
    with pytest.raises(ValueError, match=r"must be \(\.\.\.\) of top"):
        recipes.filtered_logprob(logprob[:1], least[:1], top)
    least[0, 0] = -100
    assert recipes.filtered_logprob(logprob, least, top)[0, 0] == 0


def distilled(k=K):
    hidden, weight, _ = inputs()
    of_teacher = torch.randn(B, T, V, generator=torch.Generator().manual_seed(3))
    teacher, classes = of_teacher.log_softmax(-1).topk(k)
    classes[0, 1] = -100
    return hidden, weight, classes, teacher


def eager_distillation(hidden, weight, classes, teacher, temperature=1.0):
    """The tail is summed class by class."""
    log_p = (F.linear(hidden, weight) / temperature).log_softmax(-1)
    total = 0.0
    rows = (x.flatten(0, -2) for x in (log_p, classes, teacher))
    for z, chosen, t in zip(*rows, strict=True):
        keep = chosen != -100
        if not keep.any():
            continue
        q, log_q = t[keep].to(z).exp(), t[keep].to(z)
        total = total + (q * (log_q - z[chosen[keep]])).sum()
        rest = torch.ones(len(z), dtype=torch.bool)
        rest[chosen[keep]] = False
        q_tail = 1 - q.sum()
        if rest.any() and q_tail > 1e-6:  # (0 but for rounding where all classes are given)
            total = total + q_tail * (q_tail.log() - z[rest].logsumexp(-1))
    return total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("k", [1, K, V])
def test_distillation_from_the_likeliest_classes(backend, temperature, k):
    hidden, weight, classes, teacher = distilled(k)
    if k > 1:
        classes[1, 2, 1:] = -100
    ours = recipes.distillation_loss(
        hidden, weight, classes, teacher, temperature=temperature, backend=backend
    )
    assert ours.n_valid == B * T - 1
    # All classes of a teacher in float32 leave a tail of up to eps a token, times its logarithm.
    bound = {"roundings": -math.log(EPS)} if k == V else {}
    check(
        ours.loss_sum, lambda *x: eager_distillation(*x, classes, teacher, temperature),
        (hidden, weight), **bound,
    )  # fmt: skip


@ranks.together()
def test_distillation_over_ranks(rank):
    """The tail holds classes of both ranks."""
    hidden, weight, classes, teacher = distilled()
    whole = recipes.distillation_loss(hidden, weight, classes, teacher, temperature=2.0)
    d_hidden, d_weight = torch.autograd.grad(whole.loss_sum, (hidden, weight))
    rows = (slice(0, 9), slice(9, V + 2))[rank]  # the last two are padding
    part = torch.cat([weight, torch.full((2, H), 99.0)])[rows].detach().requires_grad_()
    for backend in BACKENDS:
        loss = recipes.distillation_loss(
            hidden, part, classes, teacher, temperature=2.0, backend=backend,
            process_group=dist.group.WORLD, vocab_size=V,
        )  # fmt: skip
        found = torch.autograd.grad(loss.loss_sum, (hidden, part))
        assert loss.n_valid == whole.n_valid
        torch.testing.assert_close(loss.loss_sum, whole.loss_sum)
        expected = d_hidden, torch.cat([d_weight, torch.zeros(2, H)])[rows]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spread", [1, 8])
@pytest.mark.parametrize("apart", [0.0, 1e-3])
def test_a_student_near_its_teacher_is_never_below_0(spread, apart):
    """Sure tokens leave a tail that float32 does not see."""
    rng = torch.Generator().manual_seed(0)
    hidden = spread * torch.randn(40, 24, generator=rng)
    weight = torch.randn(300, 24, generator=rng) / 24**0.5
    z = hidden.double() @ weight.double().T
    z_teacher = z + apart * torch.randn(40, 300, generator=rng).double()
    teacher, classes = z_teacher.log_softmax(-1).topk(20)
    log_p = z.log_softmax(-1).gather(1, classes)
    p, q = (torch.cat([x.exp(), 1 - x.exp().sum(1, keepdim=True)], 1) for x in (log_p, teacher))
    exact = (q * (q.log() - p.log())).sum(1)
    for row in range(40):
        i = slice(row, row + 1)
        loss = recipes.distillation_loss(hidden[i], weight, classes[i], teacher[i]).loss_sum
        # half a unit of the logits and of their log-sum-exp, where the tail is below that rounding
        noise = (1 + float(z[row].abs().max())) * EPS / 2
        assert 0 <= loss <= 1.01 * exact[row] + noise


def exact_tail(hidden, weight, classes, teacher):
    """Loss and gradient by ``hidden (N, H)``, in float64."""
    hidden = hidden.detach().double().requires_grad_()
    loss = eager_distillation(hidden, weight.double(), classes, teacher)
    return loss.detach(), torch.autograd.grad(loss, hidden)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sure", [1.0, 10.0, 18.0, 30.0, 80.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sure_student_learns_of_the_tail(backend, sure, dtype):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("float64 is of the torch backend")
    hidden = torch.tensor([[sure]], dtype=dtype, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [0.0]], dtype=dtype)
    classes, teacher = torch.tensor([[0]]), torch.tensor([[0.6]], dtype=torch.float64).log()
    loss = recipes.distillation_loss(hidden, weight, classes, teacher, backend=backend).loss_sum
    exact, slope = exact_tail(hidden, weight, classes, teacher)
    torch.testing.assert_close(loss.double(), exact, rtol=STATISTIC, atol=0)
    found = torch.autograd.grad(loss, hidden)[0].double()
    # an exponential errs by the rounding of its argument of up to 80, or the result's rounding
    rtol = {torch.bfloat16: 2.0**-8, torch.float32: 160 * EPS, torch.float64: 1e-9}[dtype]
    torch.testing.assert_close(found, slope, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1, 4, 16])
@pytest.mark.parametrize("k", [1, 2, 12, 24])
def test_a_tail_of_noise_does_not_scale_the_gradient(k, spread, dtype):
    """Where rounding is larger than the tail, the gradient is bounded; elsewhere it is exact."""
    rng = torch.Generator().manual_seed(1)
    hidden = (spread * torch.randn(40, 12, generator=rng)).to(dtype).requires_grad_()
    weight = torch.randn(24, 12, generator=rng).to(dtype)
    classes = F.linear(hidden, weight).topk(k).indices
    of_teacher = torch.randn(40, 24, generator=rng, dtype=torch.float64).log_softmax(1)
    teacher = of_teacher.gather(1, classes)
    loss = recipes.distillation_loss(hidden, weight, classes, teacher).loss_sum
    (found,) = torch.autograd.grad(loss, hidden)
    assert found.isfinite().all()
    if k == 24:  # no tail: the gradient is that of the divergence
        z = F.linear(hidden.double(), weight.double())
        slope = (z.softmax(1) - of_teacher.exp()) @ weight.double()
    else:
        _, slope = exact_tail(hidden, weight, classes, teacher)
    eps, z = torch.finfo(dtype).eps, F.linear(hidden.double(), weight.double())
    p = z.softmax(1).gather(1, classes)
    tail = 1 - p.sum(1) if k < 24 else torch.ones(40)
    seen = tail > 2**14 * eps
    error, size = (found - slope).norm(dim=1), slope.norm(dim=1)
    assert seen.any() or spread * k > 16
    # rounding logits of 160 is 1% of the smallest such tail
    assert not (error > 0.01 * size)[seen].any()
    # elsewhere the rounding of the logits is scaled by no more than the tail that is taken, which
    # is at least the rounding of the known classes' probabilities
    noise = 4 * eps * torch.special.entr(p).sum(1)
    q_tail = (1 - teacher.exp().sum(1)).clamp(min=0)
    scaled = eps * z.abs().amax(1) * q_tail / torch.maximum(tail, noise)
    largest = float(weight.norm(dim=1).max())
    assert (error <= 2 * largest * (1 + scaled)).all()
    if k == 1:  # one class has no others to round
        assert (error <= 4 * eps * z.abs().max() * size).all()


def test_token_scaled_of_an_impossible_token_is_its_limit():
    logprob = torch.tensor([-0.5, -torch.inf, -200.0], requires_grad=True)
    loss = recipes.token_scaled_loss(logprob, torch.ones(3, dtype=torch.bool)).loss_sum
    p = torch.exp(torch.tensor(-0.5))
    torch.testing.assert_close(loss, 0.5 * p)
    (found,) = torch.autograd.grad(loss, logprob)
    torch.testing.assert_close(found, torch.stack([-p, 0 * p, 0 * p]))


X, ROW, ANSWERS = torch.zeros(2, 3), torch.zeros(3), torch.zeros(2)
CLASS = torch.zeros(2, 1, dtype=torch.int64)
OF_GRPO = {"logprob": X, "sampled": X, "advantage": ANSWERS, "used": X == 0}
OF_KTO = {"policy": ROW, "reference": ROW, "desirable": ROW == 0, "divergence": torch.tensor(0.0)}
# A mask (T,) beside (B, T) counted its tokens once for all answers: half the denominator.
BROADCAST = [
    ("used", torch.ones(3)), ("used", torch.ones(2, 1)), ("sampled", ROW),
    ("sampled", torch.zeros(2, 1)), ("reference", torch.zeros(1, 3)), ("entropy", ROW),
    ("advantage", torch.ones(3)), ("advantage", torch.ones(1)), ("advantage", torch.ones(2, 1)),
]  # fmt: skip
REFUSED = [  # a loss, its arguments, and the words of its error
    *[
        (recipes.grpo_loss, OF_GRPO | {name: x, "kl": 0.1 * (name == "reference")},
         rf"{name} must be .*\(2.*logprob.*got \({len(x)},")
        for name, x in BROADCAST
    ],
    *[
        (recipes.kto_loss, OF_KTO | {name: OF_KTO[name].expand(3)[:, None]},
         rf"^{name} must be \(.*got \(3, 1\)")
        for name in ("reference", "desirable", "divergence")
    ],
    *[
        (recipes.grpo_loss, OF_GRPO | options, words)
        for options, words in (
            ({"kl": 0.1}, "reference must be given with kl"),
            ({"entropy_bonus": 0.1}, "entropy must be given with entropy_bonus"),
            ({"normalisation": "dr_grpo"}, "max_length must be given with 'dr_grpo' alone"),
            ({"max_length": 3}, "max_length must be given with 'dr_grpo' alone"),
            ({"normalisation": "batch"}, "normalisation must be one of 'token'"),
            ({"ratio": "batch"}, "ratio must be one of 'token'"),
            ({"kind": "ppo"}, "kind must be one of 'clipped'"),
            ({"used": [1, 1]}, "used must be a tensor, got list"),
        )
    ],
    (recipes.dpo_loss, {"policy": ANSWERS, "reference": ANSWERS, "kind": "ipo"}, "kind must be"),
    (recipes.cpo_loss, {"policy": ROW}, r"policy must be \(2 B,\)"),
    (recipes.orpo_loss, {"policy": ROW}, r"policy must be \(2 B,\)"),
    (recipes.dpo_loss, {"policy": ROW, "reference": ROW}, r"policy must be \(2 B,\)"),
    (recipes.dpo_loss, {"policy": torch.zeros(4), "reference": ANSWERS},
     r"reference must be \(4,\), as policy, got \(2,\)"),
    (recipes.token_scaled_loss, {"logprob": X, "used": ANSWERS == 0},
     r"used must be \(2, 3\), as logprob, got \(2,\)"),
    (recipes.distillation_loss, {"hidden": X, "weight": X, "classes": CLASS[:, 0], "teacher": ROW},
     r"classes and teacher must be \(..., K\)"),
    (recipes.distillation_loss,
     {"hidden": X, "weight": X, "classes": CLASS, "teacher": X[:, :1], "ignore_index": None},
     "ignore_index must be an int, got None"),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "arguments", "words"), REFUSED)
def test_what_is_missing_or_would_broadcast_is_named(loss, arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        loss(**arguments)


RIGHT = {
    recipes.grpo_loss: OF_GRPO | {"reference": X, "entropy": X, "kl": 0.1, "entropy_bonus": 0.1},
    recipes.dpo_loss: {"policy": ANSWERS, "reference": ANSWERS},
    recipes.cpo_loss: {"policy": ANSWERS},
    recipes.orpo_loss: {"policy": ANSWERS},
    recipes.kto_loss: OF_KTO,
    recipes.token_scaled_loss: {"logprob": X, "used": X == 0},
    recipes.distillation_loss: {
        "hidden": X, "weight": X, "classes": CLASS, "teacher": X[:, :1], "bias": ANSWERS,
    },
    recipes.filtered_logprob: {
        "logprob": ANSWERS, "labels": CLASS[:, 0], "top": fused_topk(X, X, 2), "top_k": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("loss", RIGHT, ids=lambda loss: loss.__name__)
def test_what_is_no_tensor_is_named(loss):
    loss(**RIGHT[loss])
    for name, right in RIGHT[loss].items():
        if isinstance(right, torch.Tensor):
            for wrong in ("three", right.tolist(), right.numpy()):
                if (loss, name) == (recipes.kto_loss, "divergence") and wrong != "three":
                    continue  # may be a number
                with pytest.raises(TypeError, match=f"^{name} must (be a|hold a .*) tensor"):
                    loss(**RIGHT[loss] | {name: wrong})


@pytest.mark.parametrize("fill", [float("inf"), -float("inf"), float("nan"), -1e4])
def test_tokens_that_are_not_used_hold_anything(fill):
    """Samplers pad with what they like; neither loss nor gradients see it."""
    used = torch.tensor([[True, True, False], [True, False, False]])
    found = []
    for padding in (0.0, fill):
        logprob, entropy, sampled, reference = (
            torch.linspace(-3, -0.5 - i, 6).view(2, 3).masked_fill(~used, padding) for i in range(4)
        )
        logprob.requires_grad_()
        grpo = recipes.grpo_loss(
            logprob, sampled, torch.tensor([1.0, -1.0]), used,
            reference=reference, kl=0.1, entropy=entropy, entropy_bonus=0.01,
        )  # fmt: skip
        loss = grpo.mean() + recipes.token_scaled_loss(logprob, used).mean()
        found.append((loss.detach(), *torch.autograd.grad(loss, logprob)))
    torch.testing.assert_close(found[1], found[0])


def test_the_divergence_of_kto_may_be_a_number():
    policy, reference = torch.tensor([-3.0, -2.0]), torch.tensor([-2.5, -2.5])
    desirable = torch.tensor([True, False])
    for number in (0.0, 0.25, 1):
        given = recipes.kto_loss(policy, reference, desirable, torch.tensor(float(number)))
        assert recipes.kto_loss(policy, reference, desirable, number).mean() == given.mean()
    with pytest.raises(ValueError, match=r"divergence must be \(\), one number, got \(2,\)"):
        recipes.kto_loss(policy, reference, desirable, policy)
    whole = recipes.kto_loss(policy, reference, desirable, torch.zeros(1, 1))
    assert whole.loss_sum == recipes.kto_loss(policy, reference, desirable, 0).loss_sum
    by_token = [x.expand(3, 2) for x in (policy, reference, desirable)]
    with pytest.raises(ValueError, match=r"policy must be \(B,\), .* got \(3, 2\)"):
        recipes.kto_loss(*by_token, 0)


def test_what_is_infinite_is_not_a_large_number():
    """As the divergence over all classes, of which these are all."""
    h, bias = torch.eye(3), torch.tensor([0.0, 0.0, -math.inf])
    teacher, classes = h.log_softmax(-1).topk(3)
    out = recipes.distillation_loss(h, h, classes, teacher, bias=bias)
    assert out.loss_sum == fused_kl(h, h, h, h, bias=bias).loss_sum == math.inf


def test_a_token_without_advantage_has_no_loss():
    sure, one = torch.tensor([[-math.inf, -1.0]]), torch.ones(1, 2)
    for kind in ("cispo", "clipped"):
        out = recipes.grpo_loss(sure, -one, torch.tensor([[0.0, 1.0]]), one, kind=kind)
        assert out.loss_sum.isfinite(), kind


def test_probabilities_of_a_teacher_are_no_log_probabilities():
    """They would be a loss of some hundred nats."""
    hidden, weight = torch.randn(3, 8), torch.randn(11, 8)
    teacher, classes = torch.randn(3, 11).softmax(-1).topk(4)
    with pytest.raises(ValueError, match=r"teacher must be log-probabilities, at most 0, got 0\."):
        recipes.distillation_loss(hidden, weight, classes, teacher)
    ignored = torch.full_like(classes, -100)
    assert recipes.distillation_loss(hidden, weight, ignored, teacher).n_valid == 0
    right = recipes.distillation_loss(hidden, weight, classes, teacher.log())
    rounded = recipes.distillation_loss(hidden, weight, classes, teacher.log().bfloat16())
    assert 0 < float(right.loss_sum) == pytest.approx(float(rounded.loss_sum), rel=0.1)
