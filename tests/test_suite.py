"""The suite gives the same results on every machine and day, in any order."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent


JITTERED = """
import torch
from fusedce import fused_ce
from support import jitter

torch.manual_seed(0)
a, b = torch.randn(20, 300), torch.randn(300, 30)
labels = torch.randint(30, (20,))

def products():
    yield a @ b
    yield torch.addmm(torch.ones(30), a, b)
    yield a[None] @ b[None]
    yield a @ b[:, 0]
    yield a.double() @ b.double()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        given = [x.to(dtype).requires_grad_() for x in (a, b.t())]
        loss = fused_ce(*given, labels, chunk_tokens=7).loss_sum
        yield loss.detach()
        yield from torch.autograd.grad(loss, given)

plain = list(products())
jitter.install(3)
for i, (x, y) in enumerate(zip(plain, products(), strict=True)):
    error = (x - y).norm() / x.norm()
    assert error <= 300 * torch.finfo(x.dtype).eps  # as many terms are summed
    assert x.ndim == 0 or not x.equal(y), f"product {i} is summed as before"
for x, y in zip(products(), products(), strict=True):
    assert x.equal(y), "the order is one for each size"
"""


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="jitter needs torch 2.9")
def test_jitter_changes_the_order_of_every_product():
    run = subprocess.run(
        [sys.executable, "-c", JITTERED],
        env=os.environ | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
