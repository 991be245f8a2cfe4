"""The compiled forward kernel has the values of the interpreted tests, and no hazard."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.bounds import STATISTIC, in_float64
from support.compiled import (
    ARCHS,
    BF16,
    FIRST_ARCH,
    FP32,
    OPTIONS,
    assert_same_bits_in_every_order,
)
from support.oracle import finished_logits

import fusedce
from fusedce.backends.triton import archs
from fusedce.backends.triton.forward import loss
from fusedce.contract.problem import Problem
from fusedce.testing import Case

ROOT = Path(__file__).parents[2]
OF_LSE = {"rtol": STATISTIC, "atol": STATISTIC}


def case(N, H, V, dtype=BF16, **more):
    return Case((N,), H, V, dtype, requires_grad=(), **more)


def lse_of(hidden, weight, labels, blocks=None, **options):
    """Each row's statistics from the kernel, 7 where there is no label; loss and count too."""
    lse = torch.full((len(labels),), 7.0)
    total, n_valid = loss(Problem(hidden, weight, labels, **options), blocks=blocks, lse=lse)
    return lse, total, n_valid


def exact_lse(hidden, weight, bias=None, **options):
    return finished_logits(*in_float64(hidden, weight, bias), **options).logsumexp(1)


def in_blocks(gpu, dtype=BF16, **fields):
    """The architecture's row with other blocks of the forward kernel."""
    name = "four_bytes" if dtype == FP32 else "two_bytes"
    walks = getattr(gpu.row, name)
    chosen = {k: getattr(walks, k)._replace(**fields) for k in ("forward", "forward_with_options")}
    gpu.row = gpu.row._replace(**{name: walks._replace(**chosen)})


# ---- values -----------------------------------------------------------------------------------


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


def every_choice():
    """``(architecture, element size, blocks)`` of each row for compiled runs."""
    for name in ("sm_90", "sm_80"):
        for size in (2, 4):
            walks = archs.BY_NAME[name].walks(size)
            for blocks in dict.fromkeys(filter(None, walks[:6])):
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


@pytest.mark.parametrize("timing", ["early", "random"])
@ARCHS
def test_bits_depend_neither_on_the_order_of_ctas_nor_on_when_copies_land(on, arch, timing):
    gpu = on(arch)
    in_blocks(gpu, MAX_SPLITS=3)
    hidden, weight, labels, _ = case(170, 72, 1000, ignored=0.1).tensors()
    assert (labels != -100).sum() > 128  # two row blocks
    hidden = hidden.nan_to_num()
    assert_same_bits_in_every_order(gpu, lambda: lse_of(hidden, weight, labels), timing)


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


def test_the_script_of_the_readme_runs():
    page = (ROOT / "tests" / "ptx" / "README.md").read_text()
    (script,) = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "walk_kernel" in done.stdout
