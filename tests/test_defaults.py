"""No result depends on torch's default dtype and device.

Models are built and trained inside ``torch.set_default_dtype(torch.bfloat16)``, and scripts of
physics set float64. A buffer that takes such a dtype is half or twice as large as the library
that writes into it believes.
"""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from support.bounds import EXACT

import fusedce
from fusedce import fused_ce, fused_cross_entropy, fused_kl, fused_kl_tokens, fused_logprobs

PACKAGE = Path(fusedce.__file__).parent
ROOMS = (
    "contract", "loss", "autograd", "backends", "head", "accumulate", "agreement.py", "recipes.py",
)  # fmt: skip
FLOATING = {"empty", "zeros", "ones", "full", "rand", "randn", "eye", "linspace"}
WHOLE = {"tensor", "as_tensor", "scalar_tensor", "arange", "randint"}  # dtype of their values


def factories(path):
    """Calls of ``torch.<factory>``: line, name and keywords."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in FLOATING | WHOLE
        ):
            yield node.lineno, node.func.attr, {k.arg for k in node.keywords}, node.args


def test_every_new_tensor_names_its_dtype_and_device():
    found, missing = 0, []
    for room in ROOMS:
        files = [PACKAGE / room] if room.endswith(".py") else sorted((PACKAGE / room).rglob("*.py"))
        for path in files:
            for line, name, given, args in factories(path):
                found += 1
                of_a_tensor = name == "as_tensor" and not isinstance(args[0], ast.Constant)
                needs = ({"dtype"} if name in FLOATING else set()) | (
                    set() if of_a_tensor else {"device"}
                )
                if needs - given and None not in given:  # (None: `**options`)
                    lacks = ", ".join(sorted(needs - given))
                    missing.append(f"{path.relative_to(PACKAGE)}:{line} torch.{name} lacks {lacks}")
    assert found > 50
    assert not missing, "\n".join(missing)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


N, H, V = 37, 24, 83


def stats_loss(hidden, weight, labels, **options):
    stats = fused_logprobs(hidden, weight, labels, temperature=0.7, **options)
    return (stats.logprob - 0.1 * stats.entropy).sum()


LOSSES = {
    "sum": lambda x, **o: fused_ce(*x.head, **o).mean(),
    "options": lambda x, **o: fused_ce(
        *x.head, label_smoothing=0.1, z_loss=1e-3, monitor=("correct",), **o
    ).mean(),
    "budget": lambda x, **o: fused_ce(*x.head, memory_budget=2**23, **o).mean(),
    "none": lambda x, **o: fused_cross_entropy(*x.head, reduction="none", **o).square().sum(),
    "class_weight": lambda x, **o: fused_cross_entropy(
        *x.head, class_weight=x.class_weight, label_smoothing=0.1, **o
    ),
    "logprobs": lambda x, **o: stats_loss(*x.head, **o),
    "kl": lambda x, **o: fused_kl(*x.head[:2], *x.teacher, temperature=0.7, **o).mean(),
    "kl_tokens": lambda x, **o: fused_kl_tokens(
        *x.head[:2], *x.teacher, divergence="jsd", temperature=0.7, **o
    ).sum(),
    "probabilities": lambda x, **o: fused_cross_entropy(
        *x.head[:2], x.targets.to(x.head[0].dtype), **o
    ),
}


class Inputs:
    """Leaves of one dtype, made anew with the same values each time."""

    def __init__(self, dtype):
        rng = torch.Generator().manual_seed(1)

        def draw(*shape):
            return torch.randn(shape, generator=rng, dtype=torch.float32)

        hidden, weight = draw(N, H).to(dtype), (draw(V, H) / 3).to(dtype)
        labels = torch.randint(V, (N,), generator=rng)
        labels[::7] = -100
        self.head = hidden.requires_grad_(), weight.requires_grad_(), labels
        self.teacher = draw(N, H).to(dtype), (draw(V, H) / 3).to(dtype)
        self.class_weight = draw(V).abs()
        self.targets = draw(N, V).softmax(-1)


def results(loss, dtype):
    inputs = Inputs(dtype)
    value = LOSSES[loss](inputs, backend="torch")
    value.backward()
    return value.detach(), inputs.head[0].grad, inputs.head[1].grad


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_default_dtype_changes_no_bit(loss, dtype, default):
    right = results(loss, dtype)
    with default_dtype(default):
        found = results(loss, dtype)
    for expected, got in zip(right, found, strict=True):
        torch.testing.assert_close(got, expected, **EXACT)
