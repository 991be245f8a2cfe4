"""Gradients in bfloat16 err at most as much as eager code with float32 logits does.

``PYTHONPATH=tests:bench python tests/loss/test_gradient_errors.py`` writes the table of
docs/accuracy.md.
"""

import math
import statistics
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.bounds import STATISTIC
from support.oracle import finished_logits, token_stats
from support.params import QUICK_ON_TORCH

from fusedce import fused_ce, fused_cross_entropy, fused_kl, fused_logprobs, reference_ce
from fusedce.backends.torch import logit_tiles, sum_grads

BACKENDS = ("torch", "triton")
SIZES = {"torch": (96, 64, 400), "triton": (32, 32, 300)}  # N, H, V; one is interpreted
LOGITS = {"flat": 1.0, "peaked": 6.0, "sharp": 20.0}  # sharp: a class has all the probability
NOISE = 1.05
"""Two norms of 300 or more independent errors differ by sqrt(2 / 600), 5%, of themselves."""
TWICE = 2**0.5
"""Two roundings over one."""


def draw(logits="flat", shared=0.0, size=SIZES["torch"], seed=0):
    """``hidden, weight, bias`` in bfloat16, labels, and a generator for what options need.

    ``shared`` is the mean cosine of two rows of the head.
    """
    (N, H, V), rng = size, torch.Generator().manual_seed(seed)
    weight, mean = torch.randn(V, H, generator=rng), torch.randn(H, generator=rng)
    weight = weight * math.sqrt(1 - shared) + mean * math.sqrt(shared)
    weight = (weight / H**0.5).bfloat16()
    hidden = (LOGITS[logits] * torch.randn(N, H, generator=rng)).bfloat16()
    labels = torch.randint(V, (N,), generator=rng)
    if logits != "flat":  # most of them are as predicted
        right = torch.rand(N, generator=rng) < 0.6
        labels = torch.where(right, (hidden.double() @ weight.double().t()).argmax(1), labels)
    bias = torch.randn(V, generator=rng).bfloat16()
    return hidden, weight, bias, labels, rng


def eager_ce(h, w, b, y, *, z_loss=0.0, logit_scale=1.0, softcap=None, token_weight=1.0,
             class_weight=None, label_smoothing=0.0):  # fmt: skip
    z = finished_logits(h, w, b, softcap, logit_scale)
    c = None if class_weight is None else class_weight.to(z)
    loss = F.cross_entropy(z, y, weight=c, label_smoothing=label_smoothing, reduction="none")
    loss = (loss + z_loss * z.logsumexp(1) ** 2) * torch.as_tensor(token_weight).to(z)
    return loss.sum() / (len(y) if c is None else c[y].sum())


def eager_kl(h, w, b, th, divergence):
    p = finished_logits(th.to(h.dtype), w.detach(), b.detach()).log_softmax(1)
    q = finished_logits(h, w, b).log_softmax(1)
    m = torch.logaddexp(p, q) - math.log(2)
    pairs = {"forward": [(q, p)], "reverse": [(p, q)], "jsd": [(m, p), (m, q)]}[divergence]
    parts = [F.kl_div(x, y, log_target=True, reduction="sum") for x, y in pairs]
    return sum(parts) / len(parts) / len(h)


def losses(y, V, H, rng):
    """``name, ours, eager`` of every option, and of losses by token; functions of the inputs."""
    N = len(y)
    options = {
        "plain": {},
        "label_smoothing": {"label_smoothing": 0.1},
        "z_loss": {"z_loss": 1e-3},
        "softcap": {"softcap": 15.0},
        "logit_scale": {"logit_scale": 0.7},
        "token_weight": {"token_weight": torch.rand(N, generator=rng) + 0.1},
        "class_weight": {"class_weight": torch.rand(V, generator=rng) + 0.5},
        "label_smoothing, softcap": {"label_smoothing": 0.1, "softcap": 15.0},
        "z_loss, logit_scale": {"z_loss": 1e-3, "logit_scale": 0.7},
        "several chunks": {"chunk_tokens": N // 3},
    }

    def cross_entropy(h, w, b, **options):
        return fused_cross_entropy(h, w, y, bias=b, **options)

    for name, given in options.items():
        of_all = {k: x for k, x in given.items() if k != "chunk_tokens"}
        yield name, partial(cross_entropy, **given), partial(eager_ce, y=y, **of_all)
    u, several = torch.rand(N, generator=rng) / N, torch.randint(V, (N, 8), generator=rng)
    several[:, 0] = y
    of_several = torch.rand(N, 8, generator=rng) / N

    def statistic(stats, h, w, b, *, name, labels, factors, **options):
        return (getattr(stats(h, w, labels, bias=b, **options), name) * factors).sum()

    for name, given in (
        ("log-probabilities", {"name": "logprob"}),
        ("log-probabilities, temperature", {"name": "logprob", "temperature": 0.7}),
        ("labels (..., K)", {"name": "logprob", "labels": several, "factors": of_several}),
        ("entropy", {"name": "entropy"}),
        ("lse", {"name": "lse"}),
    ):
        given = {"labels": y, "factors": u} | given
        yield name, *(partial(statistic, x, **given) for x in (fused_logprobs, token_stats))
    th = torch.randn(N, H, generator=rng).bfloat16()

    def divergence(h, w, b, **options):
        teacher = {"teacher_weight": w.detach(), "teacher_bias": b.detach()}
        return fused_kl(h, w, th.to(h.dtype), labels=y, bias=b, **teacher, **options).mean()

    for kind in ("forward", "reverse", "jsd"):
        given = {"divergence": kind}
        yield f"fused_kl, {kind}", partial(divergence, **given), partial(eager_kl, th=th, **given)


def gradients(loss, inputs, dtype, **options):
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    return torch.autograd.grad(loss(*leaves, **options), leaves)


def errors(ours, eager, inputs, backend):
    """``(ours, eager's)`` for each gradient, over the error of rounding the exact one once."""
    exact = gradients(eager, inputs, torch.float64)
    got = gradients(ours, inputs, torch.bfloat16, backend=backend)
    theirs = gradients(eager, inputs, torch.bfloat16)
    return [
        tuple(float((t.double() - e).norm() / (e.bfloat16().double() - e).norm()) for t in (x, y))
        for x, y, e in zip(got, theirs, exact, strict=True)
    ]


@pytest.mark.parametrize("shared", [0.0, 0.94])
@pytest.mark.parametrize("logits", LOGITS)
def test_torch_errs_at_most_as_eager(logits, shared):
    check("torch", logits, shared)


@pytest.mark.slow
@pytest.mark.parametrize(("logits", "shared"), [("flat", 0.0), ("peaked", 0.9), ("sharp", 0.9)])
def test_triton_errs_at_most_as_eager(logits, shared):
    check("triton", logits, shared)


def within(ours, eager, inputs, backend="torch", name=""):
    """Each gradient errs at most as much as eager's."""
    for ratio, of_eager in errors(ours, eager, inputs, backend):
        assert ratio <= NOISE * of_eager, (name, ratio, of_eager)


def check(backend, logits, shared, only=""):
    _, H, V = size = SIZES[backend]
    *inputs, labels, rng = draw(logits, shared, size)
    for name, ours, eager in losses(labels, V, H, rng):
        if only in name:
            within(ours, eager, inputs, backend, name)


@pytest.mark.parametrize("logits", ["flat", "sharp"])
def test_triton_errs_at_most_as_eager_by_token(logits):
    check("triton", logits, 0.9, "log-probabilities")


@pytest.mark.parametrize(
    "name", ["label_smoothing", "label_smoothing, softcap", "log-probabilities"]
)
def test_labels_entries_are_not_rounded_on_their_own(name):
    """Rows of the head share a mean, and the labels' entries take nearly all of it away again."""
    *inputs, labels, rng = draw("flat", 0.9)
    _, H, V = SIZES["torch"]
    ((ours, eager),) = [x[1:] for x in losses(labels, V, H, rng) if x[0] == name]
    for ratio, _ in errors(ours, eager, inputs, "torch"):
        assert ratio <= 1.3


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_hidden_states_that_share_a_mean_do_no_harm(shared, label_smoothing):
    """Those of a class add up in the weight's gradient, and its label's is taken away from them."""
    hidden, weight, bias, labels, _ = draw(shared=shared, size=(512, 64, 64))
    within(
        lambda h, w, b, backend: fused_ce(
            h, w, labels, bias=b, label_smoothing=label_smoothing, backend=backend
        ).mean(),
        partial(eager_ce, y=labels, label_smoothing=label_smoothing),
        ((hidden / 10**0.5 + 0.9**0.5).bfloat16(), weight, bias),
    )


def by_tiles_of_100(monkeypatch):
    monkeypatch.setattr("fusedce.backends.plan.tile_classes", lambda *_: 100)
    monkeypatch.setattr(sum_grads, "is_one_tile", lambda *_, **__: False)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("shift", [300.0, -300.0])
def test_logits_far_from_zero(monkeypatch, shift, tiles):
    """The exponentials' reference is not 0 there."""
    if tiles:
        by_tiles_of_100(monkeypatch)
    hidden, weight, _, labels, _ = draw("peaked")
    within(
        lambda h, w, b, backend: fused_ce(h, w, labels, bias=b, backend=backend).mean(),
        partial(eager_ce, y=labels),
        (hidden, weight, torch.full((len(weight),), shift).bfloat16()),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("height", [25.0, 60.0, 200.0, 2000.0])
@pytest.mark.parametrize("masked", [False, True])
def test_a_logit_far_above_the_first_reference(monkeypatch, dtype, height, masked):
    """It is found where the sample did not look: at a class of the third tile, of some tokens."""
    monkeypatch.setattr(logit_tiles, "SAMPLE", 2)
    by_tiles_of_100(monkeypatch)
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 32, generator=rng), torch.randn(430, 32, generator=rng) / 6
    hidden[:, 0] = torch.where(torch.arange(40) % 3 == 0, 1.0, 0.0)
    weight[:, 0] = 0
    weight[277, 0] = height
    weight[301, 0] = height - 1
    bias = torch.zeros(430)
    if masked:
        bias[:150] = -torch.inf
    labels = torch.randint(150, 430, (40,), generator=rng)
    labels[0], labels[3] = 277, 301
    inputs = [x.to(dtype) for x in (hidden, weight, bias)]

    def gradients(loss, kind, **options):
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        out = loss(*leaves[:2], labels, bias=leaves[2], **options)
        return [out.loss_sum.detach(), *torch.autograd.grad(out.loss_sum / 40, leaves)]

    exact = gradients(reference_ce, torch.float64)
    got = gradients(fused_ce, dtype, backend="torch")
    with torch.no_grad():
        evaluated = fused_ce(*inputs[:2], labels, bias=inputs[2], backend="torch").loss_sum
    for loss in (got[0], evaluated):
        torch.testing.assert_close(loss.double(), exact[0], rtol=2 * STATISTIC, atol=0)
    # float32 logits of this size are rounded; bfloat16 gradients are, and their factors before
    half = torch.finfo(torch.bfloat16).eps / 2
    most = 1e-6 * max(height / 30, 1) if dtype == torch.float32 else TWICE * half
    for x, e in zip(got[1:], exact[1:], strict=True):
        assert (x.double() - e).norm() <= most * e.norm()


def test_a_sum_needs_no_guess_of_its_factor():
    """Nobody divides it: a head's gradient is made with the factor 1, not that of a mean."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 16, generator=rng).bfloat16()
    weight = torch.randn(50, 16, generator=rng).bfloat16().requires_grad_()
    y = torch.tensor([4, 9, 30])
    (found,) = torch.autograd.grad(fused_cross_entropy(hidden, weight, y, reduction="sum"), weight)
    wide = weight.detach().double().requires_grad_()
    exact = F.cross_entropy(hidden.double() @ wide.T, y, reduction="sum")
    (exact,) = torch.autograd.grad(exact, wide)
    narrow = weight.detach().requires_grad_()
    eager = F.cross_entropy(F.linear(hidden, narrow).float(), y, reduction="sum")
    most = (torch.autograd.grad(eager, narrow)[0].double() - exact).norm()
    assert (found.double() - exact).norm() <= most


# ---- the factor of a mean is folded in before the rounding --------------------------------------


@pytest.mark.parametrize("backend", QUICK_ON_TORCH)
def test_the_factor_of_a_mean_costs_no_rounding(backend):
    *inputs, labels, _ = draw(size=SIZES[backend])
    labels[: len(labels) // 5] = -100

    def mean(h, w, b, backend):
        return fused_cross_entropy(h, w, labels, bias=b, backend=backend)

    exact = gradients(partial(mean, backend="torch"), inputs, torch.float64)
    got = gradients(partial(mean, backend=backend), inputs, torch.bfloat16)
    for x, e in zip(got, exact, strict=True):
        once = (e.bfloat16().double() - e).norm()
        assert (x.double() - e).norm() <= (1 + TWICE) / 2 * once


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_factor_costs_a_rounding(backend):
    *inputs, labels, _ = draw(size=SIZES[backend])

    def other(h, w, b, backend):
        return fused_ce(h, w, labels, bias=b, backend=backend).loss_sum * 5.0

    def eager(*x):
        return eager_ce(*x, labels) * (5.0 * len(labels))

    for ratio, of_eager in errors(other, eager, inputs, backend):
        assert ratio <= NOISE * math.hypot(of_eager, 1)


# ---- the table of the page -----------------------------------------------------------------------


def table():
    """Errors at the 99th percentile, ours and eager's, by loss and backend."""
    found = {}
    for backend in BACKENDS:
        _, H, V = size = SIZES[backend]
        for logits in LOGITS:
            for shared in (0.0, 0.5, 0.9):
                *inputs, labels, rng = draw(logits, shared, size)
                for name, ours, eager in losses(labels, V, H, rng):
                    row = found.setdefault(name, {of: ([], []) for of in BACKENDS})
                    for pair in errors(ours, eager, inputs, backend):
                        for one, x in zip(row[backend], pair, strict=True):
                            one.append(x)
    return {
        name: [
            f(x)
            for backend in BACKENDS
            for x in row[backend]
            for f in (statistics.median, lambda x: statistics.quantiles(x, n=100)[98])
        ]
        for name, row in found.items()
    }


def write():
    from lib.results import stamp
    from support.interpreter import as_on_hardware

    page = Path(__file__).resolve().parents[2] / "docs" / "accuracy.md"
    begin, end = "<!-- gradient errors -->\n", "<!-- end -->"
    torch.set_num_threads(1)
    with as_on_hardware():
        found = table()
    columns = [f"{of}, {what}" for of in BACKENDS for what in ("ours", "eager")]
    rows = [f"| | {' | '.join(columns)} |", "|---" * 5 + "|"]
    for name, x in found.items():
        cells = [f"{a:.2f}, {b:.2f}" for a, b in zip(x[::2], x[1::2], strict=True)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows += ["", "{date}, commit {commit}".format(**stamp())]
    head, rest = page.read_text().split(begin)
    page.write_text(f"{head}{begin}" + "\n".join(rows) + "\n" + end + rest.split(end, 1)[1])


if __name__ == "__main__":
    write()
