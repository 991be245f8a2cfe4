"""Per-token statistics and their gradients as they are compiled, against float64."""

import functools

import pytest
import torch
from support import oracle
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
from support.token_stats import compare

import fusedce
from fusedce.backends import plan
from fusedce.backends.triton import sum_grads, vocab_tiles
from fusedce.testing import Case, check

BOTH = ("hidden", "weight")


@ARCHS
@TWO_BYTES
def test_statistics_and_gradients(on, arch, dtype):
    gpu = on(arch)
    compare(Case((24,), 72, 515, dtype, ignored=0.2), "triton")
    names = {launch.kernel for launch in gpu.launches}
    assert names >= {"walk_kernel", "merge_stats_kernel", "token_grad_kernel"}


@ARCHS
def test_statistics_with_options(on, arch):
    on(arch)
    compare(Case((24,), 40, 300, BF16, with_bias=True, options=OPTIONS), "triton", 0.7, 10)


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
    kernel = "token_grad_kernel" if fn is by_tiles else "exp_tile_kernel"
    tiles = 3 + (fn is by_budget and dtype is BF16)  # one more of the frequent labels
    assert gpu.ran(kernel) == 3 * tiles  # of 40 tokens, more than 32 have a label


@ARCHS
@TWO_BYTES
@pytest.mark.parametrize("through", ["logprob", "entropy", "lse"])
def test_gradients_of_several_classes_of_a_token(on, small_tiles, arch, dtype, through):
    """One of them twice, some ignored; in several tiles; through one output alone."""
    on(arch)
    compare(Case((24,), 72, 515, dtype, ignored=0.1), "triton", "each", K=5, through=(through,))


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
