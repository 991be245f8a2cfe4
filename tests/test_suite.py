"""The suite gives the same results on every machine and day, in any order."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from support.device import HIDING
from support.params import slow

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like",
         "randn_like", "randint_like"}  # fmt: skip


def draws_at_import(tree):
    """Lines outside of functions that draw from torch's own generator, which no test has seeded."""
    found = []

    def visit(node):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            return
        call = isinstance(node, ast.Call) and getattr(node.func, "attr", None) in DRAWS
        if call and "generator" not in {keyword.arg for keyword in node.keywords}:
            found.append(node.lineno)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def from_fresh_entropy(tree):
    """Lines that ask for an unseeded generator."""
    seeded = {"np.random.default_rng", "random.Random"}  # where a seed is given
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = ast.unparse(node.func)
            if not node.args if of in seeded else of.startswith("np.random.") or of == "torch.seed":
                yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_draw_is_left_to_chance(path):
    tree = ast.parse(path.read_text())
    assert draws_at_import(tree) == []
    assert list(from_fresh_entropy(tree)) == []


def test_hypothesis_draws_the_same_examples_every_day(request):
    fuzzing = request.config.getoption("--hypothesis-profile") == "fuzz"
    assert settings().derandomize != fuzzing
    assert settings().print_blob
    assert settings.get_profile("default").derandomize
    assert not settings.get_profile("fuzz").derandomize  # a profile inherits from the loaded one


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


SEES_A_GPU = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
"""


@pytest.mark.parametrize(
    "some",
    ["tests/kernels/test_input_grads.py", slow("tests/backends/triton/test_forward.py"),
     "tests/trainer/test_stock_trainer.py"],
)  # fmt: skip
def test_where_torch_sees_a_gpu_other_tests_are_interpreted(tmp_path, some):
    """They pass tensors of the CPU to the kernels, and no library in them may ask for a device."""
    (tmp_path / "sitecustomize.py").write_text(SEES_A_GPU)
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", *HIDING)}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not slow", some],
        cwd=TESTS.parent, env=env | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
