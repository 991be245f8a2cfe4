"""The compiled forward kernel has the values of the interpreted tests, and no hazard."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.bounds import STATISTIC
from support.compiled import (
    ARCHS,
    BF16,
    DTYPES,
    FIRST_ARCH,
    FP32,
    OPTIONS,
    TWO_BYTES,
    assert_same_bits_in_every_order,
    skip_one_known_step,
)

import fusedce
from fusedce.backends.triton import archs
from fusedce.backends.triton import forward as forward_of
from fusedce.backends.triton.forward import loss
from fusedce.contract.problem import Problem
from fusedce.kernels.tile import LOG2E
from fusedce.testing import Case, check

ROOT = Path(__file__).parents[2]
OF_LSE = {"rtol": STATISTIC, "atol": STATISTIC}


def forward(hidden, weight, labels, **options):
    return fusedce.fused_ce(hidden, weight, labels, backend="triton", **options)


def case(N, H, V, dtype=BF16, **more):
    return Case((N,), H, V, dtype, requires_grad=(), **more)


def lse_of(hidden, weight, labels, blocks=None, **options):
    """Each row's statistics from the kernel, 7 where there is no label; loss and count too."""
    lse = torch.full((len(labels),), 7.0)
    total, n_valid = loss(Problem(hidden, weight, labels, **options), blocks=blocks, lse=lse)
    return lse, total, n_valid


def exact_lse(hidden, weight, bias=None, softcap=None, logit_scale=1.0):
    z = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    z = z * logit_scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)).logsumexp(1)


def in_blocks(gpu, dtype=BF16, **fields):
    """The architecture's row with other blocks of the forward kernel."""
    name = "four_bytes" if dtype == FP32 else "two_bytes"
    walks = getattr(gpu.row, name)
    chosen = {k: getattr(walks, k)._replace(**fields) for k in ("forward", "forward_with_options")}
    gpu.row = gpu.row._replace(**{name: walks._replace(**chosen, narrow_up_to=0)})


# ---- values -----------------------------------------------------------------------------------


@ARCHS
@TWO_BYTES
def test_values_are_those_of_the_reference(on, arch, dtype):
    """H is no multiple of a block, V of nothing."""
    gpu = on(arch)
    check(forward, case(140, 200, 515, dtype, ignored=0.2))
    assert gpu.ran("walk_kernel") == 1
    text = gpu.texts["walk_kernel"]
    assert ("cp.async.bulk.tensor" in text) == ("wgmma.mma_async" in text) == (arch == "sm_90")


@ARCHS
@pytest.mark.parametrize("tf32", [False, True], ids=["ieee", "tf32"])
def test_fp32_values(on, arch, tf32):
    gpu = on(arch)
    gpu.tf32 = tf32
    hidden, weight, labels, _ = case(130, 72, 130, FP32).tensors()
    if tf32:  # inputs that lose nothing
        hidden, weight = ((x.view(torch.int32) & ~0x1FFF).view(FP32) for x in (hidden, weight))
    lse, total, _ = lse_of(hidden, weight, labels)
    torch.testing.assert_close(lse.double(), exact_lse(hidden, weight), **OF_LSE)
    exact = fusedce.reference_ce(hidden, weight, labels).loss_sum
    torch.testing.assert_close(total.double(), exact, rtol=STATISTIC, atol=0)
    assert ("tf32" in gpu.texts["walk_kernel"]) == tf32


def test_values_without_tma(on):
    gpu = on("sm_90")
    in_blocks(gpu, DESCRIPTOR=False, MAX_SPLITS=2)
    check(forward, case(140, 136, 600, ignored=0.2))
    text = gpu.texts["walk_kernel"]
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor" not in text


@ARCHS
def test_values_with_options(on, arch):
    gpu = on(arch)
    in_blocks(gpu, MAX_SPLITS=2)
    check(forward, case(40, 72, 600, with_bias=True, options=OPTIONS))


@ARCHS
@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_rows_at_odd_addresses(on, arch, name):
    """By the stride they could be loaded 16 bytes at a time, by their address they cannot."""
    on(arch)
    hidden, weight, labels, _ = case(20, 72, 300).tensors()
    shifted = {"hidden": hidden, "weight": weight}
    x = shifted[name]
    shifted[name] = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    lse, _, _ = lse_of(**shifted, labels=labels)
    torch.testing.assert_close(lse.double(), exact_lse(hidden, weight), **OF_LSE)


@pytest.mark.slow
@ARCHS
@DTYPES
@pytest.mark.parametrize(
    ("N", "H", "V"),
    [
        (1, 8, 2), (9, 64, 1), (70, 8, 64), (128, 64, 257), (129, 64, 256), (129, 128, 255),
        (40, 64, 512), (70, 328, 300), (70, 65, 333), (70, 33, 130), (20, 1, 127),
    ],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_sizes(on, arch, dtype, N, H, V, options):
    """Aligned and not, full and nearly full tiles, one step of H and several."""
    skip_one_known_step(arch, dtype, H, options)
    on(arch)
    if dtype == FP32:  # one lane multiplies one number at a time
        N, V = min(N, 40), min(V, 140)
    ignored = 0.3 if N > 1 else 0.0
    check(forward, case(N, H, V, dtype, ignored=ignored, with_bias=bool(options), options=options))


def every_choice():
    """``(architecture, element size, blocks)`` of each row for compiled runs."""
    for name in ("sm_90", "sm_80"):
        for size in (2, 4):
            walks = archs.BY_NAME[name].walks(size)
            for blocks in dict.fromkeys((*walks[:6], walks.forward_narrow)):
                if blocks is None:
                    continue
                yield pytest.param(name, size, blocks, id=f"{name}-{size}-{tuple(blocks)}")


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "size", "blocks"), list(every_choice()))
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_every_choice_of_blocks(on, arch, size, blocks, options):
    """Several tiles a split, rows and columns left over, H in several steps."""
    on(arch)
    dtype = BF16 if size == 2 else FP32
    V = 4 * blocks.BLOCK_V - 3
    hidden, weight, labels, _ = case(blocks.BLOCK_N + 12, 200, V, dtype).tensors()
    if size == 4:
        hidden, weight = hidden[:40, :72].contiguous(), weight[:, :72].contiguous()
        labels = labels[:40]
    lse, total, _ = lse_of(hidden, weight, labels, blocks._replace(MAX_SPLITS=2), **options)
    torch.testing.assert_close(lse.double(), exact_lse(hidden, weight, **options), **OF_LSE)
    exact = fusedce.reference_ce(hidden, weight, labels, **options).loss_sum
    torch.testing.assert_close(total.double(), exact, rtol=STATISTIC, atol=0)


# ---- bits -------------------------------------------------------------------------------------


@ARCHS
@pytest.mark.parametrize(("dtype", "H"), [(BF16, 72), (FP32, 33)], ids=["bf16", "fp32 unaligned"])
def test_a_row_has_the_same_bits_wherever_it_stands(on, arch, dtype, H):
    """A token's loss is the same in another order and alone."""
    gpu = on(arch)
    in_blocks(gpu, dtype, MAX_SPLITS=2)
    hidden, weight, labels, _ = case(140, H, 130 if dtype == FP32 else 600, dtype).tensors()
    lse, _, _ = lse_of(hidden, weight, labels)
    order = torch.randperm(140)
    mixed, _, _ = lse_of(hidden[order], weight, labels[order])
    assert mixed.equal(lse[order])
    alone, _, _ = lse_of(hidden[71:72], weight, labels[71:72])
    assert alone.equal(lse[71:72])


@ARCHS
def test_a_row_beside_one_that_rises_has_the_same_bits(on, arch):
    """Row 3 has a logit 200 nats above its first tile."""
    gpu = on(arch)
    in_blocks(gpu, MAX_SPLITS=1)
    hidden, weight, labels, _ = case(20, 64, 600).tensors()
    far = hidden.clone()
    far[3] = 200 * weight[599] / weight[599].float().square().sum()
    lse, _, _ = lse_of(hidden, weight, labels)
    again, _, _ = lse_of(far, weight, labels)
    torch.testing.assert_close(again.double(), exact_lse(far, weight), **OF_LSE)
    others = torch.arange(20) != 3
    assert again[others].equal(lse[others])


@pytest.mark.parametrize("timing", ["early", "random"])
@ARCHS
def test_bits_depend_neither_on_the_order_of_ctas_nor_on_when_copies_land(on, arch, timing):
    gpu = on(arch)
    in_blocks(gpu, MAX_SPLITS=3)
    hidden, weight, labels, _ = case(170, 72, 1000, ignored=0.1).tensors()
    assert (labels != -100).sum() > 128  # two row blocks
    hidden = hidden.nan_to_num()
    assert_same_bits_in_every_order(gpu, lambda: lse_of(hidden, weight, labels), timing)


def row_losses(hidden, weight, labels):
    """Losses of single rows in float64, from the statistics that the kernel leaves of each."""
    with mock.patch.object(forward_of, "walk", side_effect=forward_of.walk) as walk:
        loss(Problem(hidden, weight, labels))
    partials = walk.call_args.kwargs["maxima"].double()
    references, sums = partials[:-1].chunk(2)
    others = (references / LOG2E.value + sums.log()).logsumexp(0)
    return torch.nn.functional.softplus(others - partials[-1])


@ARCHS
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_a_row_errs_no_more_whatever_the_gap_to_its_first_tile(on, arch, splits, spread):
    """A class of the last tile stands up to 100 nats above the first tile, the label 2 more.

    Each of 384 gaps is the sum of two bfloat16 numbers, and every logit a float32 number. The other
    logits are random: equal ones would all be rounded alike where they are added to a larger sum.
    """
    gpu = on(arch)
    in_blocks(gpu, MAX_SPLITS=splits)
    gaps = torch.linspace(0, 60, 320).tolist() + torch.linspace(61, 100, 64).tolist()
    gaps = ((torch.tensor(gaps) + 0.1 * torch.rand(384)) * 512).round() / 512
    weight = torch.zeros(600, 64, dtype=BF16)
    weight[:, 2] = (spread * torch.randn(600) - 1).mul(512).round() / 512
    weight[550:552, 2] = 0
    weight[550:552, :2] = 1.0
    weight[551, 3] = 2.0
    hidden = torch.zeros(384, 64, dtype=BF16)
    hidden[:, 0] = gaps
    hidden[:, 1] = gaps - hidden[:, 0]
    hidden[:, 2:4] = 1.0
    labels = torch.full((384,), 551)
    z = hidden.double() @ weight.double().T
    others = z.clone().index_fill_(1, labels[:1], -torch.inf).logsumexp(1)
    exact = torch.nn.functional.softplus(others - z[:, 551])
    error = (row_losses(hidden, weight, labels) / exact - 1).abs()
    # four roundings: of the logit, an exponential, its sum and the logarithm
    worst = float(gaps[error.argmax()])
    assert error.max() <= 4 * torch.finfo(FP32).eps, (float(error.max()), worst)


# ---- what is not finite, and what is out of range -----------------------------------------------


INF, NAN, ALL = torch.inf, torch.nan, slice(None)
CHANGES = {  # places of the inputs, and the values put there
    "row of nan": [("hidden", 7, NAN)],
    "row of inf": [("hidden", 7, 0.0), ("hidden", (7, 0), INF), ("weight", (ALL, 0), 0.5)],
    "class of inf": [("bias", 300, INF), ("labels", 4, 300), ("labels", 5, 301)],
    "first tile masked": [("bias", slice(256), -INF), ("labels", ALL, 300)],
    "everything masked": [("bias", ALL, -INF)],
    "one class masked": [("bias", 300, -INF), ("labels", ALL, 5)],
    "class far above": [("bias", 550, 300.0)],
    "class of nan": [("weight", 20, NAN)],
    "nothing to predict": [("labels", ALL, -100)],
}


@pytest.mark.parametrize("change", CHANGES)
@FIRST_ARCH
def test_what_is_not_finite_is_as_in_torch(on, arch, change):
    """In three tiles."""
    gpu = on(arch)
    in_blocks(gpu, MAX_SPLITS=1)
    hidden, weight, labels, _ = case(20, 64, 600).tensors()
    bias = torch.zeros(600, dtype=BF16)
    inputs = {"hidden": hidden, "weight": weight, "labels": labels, "bias": bias}
    for name, place, value in CHANGES[change]:
        inputs[name][place] = value
    bias = bias if bias.any() else None
    lse, total, n_valid = lse_of(hidden, weight, labels, bias=bias)
    valid = labels != -100
    exact = exact_lse(hidden, weight, bias)[valid]
    torch.testing.assert_close(lse[valid].double(), exact, **OF_LSE, equal_nan=True)
    assert lse[~valid].eq(7).all()
    assert n_valid == valid.sum()
    reference = fusedce.reference_ce(hidden, weight, labels, bias=bias).loss_sum
    torch.testing.assert_close(total.double(), reference, rtol=STATISTIC, atol=0, equal_nan=True)


def test_a_bad_label_reads_nothing_out_of_bounds(on):
    on("sm_90")
    hidden, weight, labels, _ = case(20, 64, 600).tensors()
    labels[5] = 600
    lse, total, n_valid = lse_of(hidden, weight, labels)
    assert total.isnan()
    assert n_valid < 0
    assert lse.isnan().nonzero().tolist() == [[5]]


def test_the_script_of_the_developers_page_runs():
    page = (ROOT / "docs" / "kernels.md").read_text()
    (script,) = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "walk_kernel" in done.stdout
