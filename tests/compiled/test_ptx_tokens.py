"""Per-token statistics and their gradients as they are compiled, against float64."""

import functools

import pytest
import torch
from support import oracle
from support.bounds import logit_rounding
from support.compiled import (
    ARCHS,
    BF16,
    FIRST_ARCH,
    FP16,
    FP32,
    OPTIONS,
    TWO_BYTES,
    assert_same_bits_in_every_order,
)

import fusedce
from fusedce.backends import plan
from fusedce.backends.triton import sum_grads, vocab_tiles
from fusedce.testing import Case, check

BOTH = ("hidden", "weight")


def compare(case, temperature=1.0, chunk_tokens=None, mean=False):
    """Statistics to fp32's rounding, gradients to a few roundings of their own dtype."""
    hidden, weight, labels, bias = case.tensors()
    hidden = hidden.nan_to_num()
    exact_inputs = [x.double().requires_grad_() for x in (hidden, weight)]
    inputs = [x.requires_grad_() for x in (hidden, weight)]
    ours = fusedce.fused_logprobs(
        *inputs, labels, bias=bias, temperature=temperature, chunk_tokens=chunk_tokens,
        mean_logit=mean, backend="triton", **case.options,
    )  # fmt: skip
    wide = None if bias is None else bias.double()
    exact = oracle.token_stats(
        *exact_inputs, labels, bias=wide, temperature=temperature, **case.options
    )
    slope = abs(case.options.get("logit_scale", 1.0)) / temperature
    of_logits = 2 * max(slope, 1.0) * logit_rounding(hidden, weight, bias)
    close = {"rtol": of_logits, "atol": of_logits}
    for name in ("logprob", "entropy", "lse"):
        a, b = getattr(ours, name), getattr(exact, name)
        torch.testing.assert_close(a.double(), b, **close)
    z = oracle.finished_logits(*exact_inputs, wide, **case.options)
    taken = z.gather(1, ours.argmax.clamp(min=0)[:, None])[:, 0]
    valid = labels != -100
    assert (taken >= z.amax(1) - of_logits)[valid].all()
    assert ours.argmax[~valid].eq(-1).all()
    if mean:
        exact_mean = torch.where(valid, (z / temperature).mean(1), 0)
        torch.testing.assert_close(ours.mean_logit.double(), exact_mean, **close)
    factors = torch.linspace(-1, 1, len(labels), dtype=torch.float64)

    def of(stats):
        return (factors * stats.logprob.double() + 0.1 * stats.entropy.double()).sum()

    rounding = max(4 * torch.finfo(case.dtype).eps, 4 * of_logits)
    found, wanted = (
        torch.autograd.grad(of(ours), inputs),
        torch.autograd.grad(of(exact), exact_inputs),
    )
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() <= rounding * b.norm()


@ARCHS
@TWO_BYTES
def test_statistics_and_gradients(on, arch, dtype):
    gpu = on(arch)
    compare(Case((24,), 72, 515, dtype, ignored=0.2))
    names = {launch.kernel for launch in gpu.launches}
    assert names >= {"walk_kernel", "merge_stats_kernel", "token_grad_kernel"}


@ARCHS
def test_statistics_with_options(on, arch):
    on(arch)
    compare(Case((24,), 40, 300, BF16, with_bias=True, options=OPTIONS), 0.7, 10)


@ARCHS
def test_a_row_has_the_same_statistics_in_every_batch(on, arch):
    gpu = on(arch)
    hidden, weight, labels, _ = Case((140,), 72, 515, BF16).tensors()

    def stats(rows):
        return fusedce.fused_logprobs(hidden[rows], weight, labels[rows], backend="triton")

    whole = stats(torch.arange(140))
    gpu.timing, gpu.order = "random", 1
    for rows in (torch.randperm(140), torch.tensor([71])):
        for a, b in zip(stats(rows), whole, strict=True):
            assert a.equal(b[rows])


by_tiles = functools.partial(oracle.by_token, backend="triton")
by_budget = functools.partial(fusedce.fused_ce, backend="triton")


@pytest.fixture
def small_tiles(monkeypatch):
    """Blocks of 16 tokens by tiles of 192 classes, so that there are several of both."""

    monkeypatch.setattr(
        sum_grads, "choose_plan", lambda call, **_: plan.tiled_chunks(call, 16, 192)
    )
    monkeypatch.setattr(vocab_tiles, "plan_tiles", lambda call, **_: plan.by_tiles(call, 16, 192))


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [("sm_90", BF16), ("sm_90", FP16), ("sm_90", FP32), ("sm_80", BF16)],
    ids=["sm_90 bf16", "sm_90 fp16", "sm_90 fp32", "sm_80 bf16"],
)
@pytest.mark.parametrize("fn", [by_tiles, by_budget])
def test_backward_by_tiles_of_the_vocabulary(on, small_tiles, arch, dtype, fn):
    gpu = on(arch)
    check(fn, Case((40,), 72, 515, dtype, requires_grad=BOTH, ignored=0.2, logits="peaked"))
    assert gpu.ran("token_grad_kernel") == 3 * 3  # of 40 tokens, more than 32 have a label


@FIRST_ARCH
@pytest.mark.parametrize(
    "options", [OPTIONS, {"label_smoothing": 0.1, "z_loss": 0.1}], ids="+".join
)
def test_backward_by_tiles_with_options(on, small_tiles, arch, options):
    on(arch)
    weighted = "z_loss" in options
    check(by_tiles, Case((24,), 40, 300, BF16, requires_grad=(*BOTH, "bias"), ignored=0.2,
                         with_bias=True, options=options, token_weight=weighted,
                         class_weight=weighted))  # fmt: skip


@ARCHS
@TWO_BYTES
@pytest.mark.parametrize("through", ["logprob", "entropy", "lse"])
def test_gradients_of_several_classes_of_a_token(on, small_tiles, arch, dtype, through):
    """One of them twice, one ignored; in several tiles; through one output alone."""
    on(arch)
    hidden, weight, labels, _ = Case((24,), 72, 515, dtype).tensors()
    classes = (labels.clamp(min=0)[:, None] + torch.tensor([0, 7, 300, 7, 514])) % 515
    classes[::3, 2] = -100
    factors = torch.linspace(-1, 1, classes.numel(), dtype=torch.float64).view(24, 5)

    def gradients(function, *leaves, **options):
        stats = function(*leaves, classes, **options)
        out = getattr(stats, through).double().view(24, -1)
        return torch.autograd.grad((factors[:, : out.shape[1]] * out).sum(), leaves)

    leaves = [x.requires_grad_() for x in (hidden, weight)]
    found = gradients(fusedce.fused_logprobs, *leaves, backend="triton")
    exact = gradients(oracle.token_stats, *(x.detach().double().requires_grad_() for x in leaves))
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).norm() <= 2 * torch.finfo(dtype).eps * b.norm()


def test_tiles_depend_neither_on_the_order_of_ctas_nor_on_when_copies_land(on, small_tiles):
    gpu = on("sm_90")
    inputs = Case((40,), 72, 515, BF16, logits="peaked").tensors()[:3]

    def gradients():
        hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
        loss, _ = by_tiles(hidden, weight, inputs[2])
        return torch.autograd.grad(loss, (hidden, weight))

    assert_same_bits_in_every_order(gpu, gradients)


@FIRST_ARCH
def test_a_nan_logit_is_nan_in_every_statistic(on, arch):
    """A maximum of a GPU drops NaN."""
    on(arch)
    hidden, weight, labels, _ = Case((20,), 64, 600, BF16).tensors()
    weight[20] = torch.nan
    found = fusedce.fused_logprobs(hidden, weight, labels, mean_logit=True, backend="triton")
    for x in (found.logprob, found.entropy, found.lse, found.mean_logit):
        assert x.isnan().all()


@pytest.mark.slow
@ARCHS
@pytest.mark.parametrize("option", [False, True])
def test_blocks_of_statistics_with_several_tiles(on, arch, option):
    gpu = on(arch)
    walks = gpu.row.two_bytes
    name = "stats_with_options" if option else "stats"
    blocks = getattr(walks, name)._replace(MAX_SPLITS=1)
    gpu.row = gpu.row._replace(two_bytes=walks._replace(**{name: blocks}))
    compare(Case((140,), 200, 3 * blocks.BLOCK_V + 5, BF16, options=OPTIONS if option else {}))
