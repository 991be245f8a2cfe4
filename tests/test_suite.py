"""The suite gives the same results on every machine and day, in any order."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from support.device import HIDING
from support.params import slow

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "rand_like",
         "randn_like", "randint_like"}  # fmt: skip


def named(path):
    return str(path.relative_to(TESTS))


def imports(tree):
    """The modules that a file imports, dotted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


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


EVERY_FILE = pytest.mark.parametrize("path", FILES, ids=named)


@EVERY_FILE
def test_no_test_imports_another(path):
    names = imports(ast.parse(path.read_text()))
    assert [name for name in names if name.split(".")[-1].startswith("test_")] == []


@EVERY_FILE
def test_no_draw_is_left_to_chance(path):
    tree = ast.parse(path.read_text())
    assert draws_at_import(tree) == []
    assert list(from_fresh_entropy(tree)) == []


def test_a_draw_left_to_chance_is_found():
    drawn = "H = torch.randn(3)\nclass A:\n    x = [torch.rand(2)]\ndef f(): torch.randn(3)"
    assert draws_at_import(ast.parse(drawn)) == [1, 3]
    unseeded = "np.random.shuffle(x)\nnp.random.default_rng()\nnp.random.default_rng(3)"
    assert list(from_fresh_entropy(ast.parse(unseeded))) == [1, 2]


FROM_0 = torch.rand(6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("again", [1, 2])
def test_every_test_starts_from_the_same_seed(again):
    assert torch.rand(6).equal(FROM_0)


def test_hypothesis_draws_the_same_examples_every_day(request):
    fuzzing = request.config.getoption("--hypothesis-profile") == "fuzz"
    assert settings().derandomize != fuzzing
    assert settings().print_blob
    assert settings.get_profile("default").derandomize
    assert not settings.get_profile("fuzz").derandomize  # a profile inherits from the loaded one


def test_the_interpreters_products_do_not_depend_on_other_rows():
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("compiled, not interpreted, here")
    from support.interpreter import product

    rng = torch.Generator().manual_seed(0)
    a, b, d = (
        torch.randn(*shape, generator=rng).numpy() for shape in ((32, 48), (48, 64), (32, 64))
    )
    whole = product(a, b, d)
    # 49 additions, in another order
    exact, size = a.astype(float) @ b + d, abs(a).astype(float) @ abs(b) + abs(d)
    assert (abs(whole - exact) <= 49 * np.finfo(a.dtype).eps * size).all()
    for rows in (slice(3, 4), slice(5, 20)):
        assert (product(a[rows], b, d[rows]) == whole[rows]).all()


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


@pytest.mark.parametrize(
    ("gpu", "fails", "said"),
    [(False, "", "passed"), (True, "", "passed"), (True, "tests/gpu", "FAILED"),
     (False, "tests/compiled", "FAILED")],
)  # fmt: skip
def test_the_last_line_of_make_test_names_all_parts(tmp_path, gpu, fails, said):
    """With stand-ins for the interpreter that looks for a GPU, and for pytest."""
    for name, script in (
        ("python", f"exit {0 if gpu else 1}"),
        ("pytest", f'case " $* " in *" {fails or "nothing"} "*) exit 1;; esac'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    stamp = tmp_path / "installed"
    stamp.touch()
    run = subprocess.run(
        ["make", "test", f"BIN={tmp_path}", f"STAMP={stamp}"],
        cwd=TESTS.parent, capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
    )  # fmt: skip
    last = run.stdout.strip().splitlines()[-1]
    assert (run.returncode == 0) == (said == "passed"), run.stdout + run.stderr
    assert last.startswith(f"== test: {said}")
    for part, folder in (("quick", ""), ("compiled", "tests/compiled"), ("gpu", "tests/gpu")):
        found = "FAILED" if fails and folder == fails else "passed"
        assert f"{part} {'not here' if part == 'gpu' and not gpu else found}" in last
