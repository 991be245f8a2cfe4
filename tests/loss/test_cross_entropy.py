"""fused_cross_entropy against F.cross_entropy(F.linear(...)), for every rule torch has."""

import itertools

import pytest
import torch
from support.bounds import errs_like, in_float64
from support.oracle import cross_entropy
from support.params import slow

from fusedce import fused_cross_entropy

BACKENDS = ["torch", "triton"]
REDUCTIONS = ["none", "mean", "sum"]


def inputs(leading=(11,), H=12, V=37, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*leading, H, generator=rng).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=rng).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=rng).to(dtype).requires_grad_()
    labels = torch.randint(0, V, leading, generator=rng)
    return hidden, weight, bias, labels


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    ("smoothing", "weighted"),
    [(0.0, False), slow(0.0, True), slow(0.3, False), (0.3, True)],
)
def test_parity_with_torch(backend, reduction, smoothing, weighted):
    """1-D, 2-D and 3-D hidden; ignored: nothing, a negative number, a real class."""
    every = itertools.product([(), (11,), (3, 5)], [-100, -1, 2])
    for leading, ignore_index in itertools.islice(every, 0, None, 4 if backend == "triton" else 1):
        hidden, weight, bias, labels = inputs(leading)  # the interpreter takes each value once
        if leading:
            labels.view(-1)[::3] = ignore_index
        elif labels == ignore_index:
            continue
        c = torch.linspace(0.0, 2.0, 37) if weighted else None
        options = {
            "bias": bias, "reduction": reduction, "label_smoothing": smoothing,
            "class_weight": c, "ignore_index": ignore_index,
        }  # fmt: skip
        ours = fused_cross_entropy(hidden, weight, labels, backend=backend, **options)
        torchs = cross_entropy(hidden, weight, labels, **options)
        leaves = (hidden, weight, bias)
        wide = in_float64(*leaves)
        of_wide = options | {"bias": wide[2], "class_weight": None if c is None else c.double()}
        exact = cross_entropy(*wide[:2], labels, **of_wide)
        errs_like(ours, torchs, exact)
        upstream = torch.linspace(-1, 2, ours.numel()).view(ours.shape) if ours.dim() else None
        errs_like(
            torch.autograd.grad(ours, leaves, upstream),
            torch.autograd.grad(torchs, leaves, upstream),
            torch.autograd.grad(exact, wide, None if upstream is None else upstream.double()),
        )


def differ_at_most_as_eagers(leaves, labels, upstreams, **options):
    """Token losses and their gradients under several upstream ones, from one graph."""
    bias = {"bias": leaves[2]}
    ours = fused_cross_entropy(*leaves[:2], labels, reduction="none", **bias, **options)
    options = {"label_smoothing": options.get("label_smoothing", 0.0), "reduction": "none"}
    torchs = cross_entropy(*leaves[:2], labels, **bias, **options)
    wide = in_float64(*leaves)
    exact = cross_entropy(*wide[:2], labels, bias=wide[2], **options)
    errs_like(ours, torchs, exact)
    needed, of_exact = ([x for x in y if x.requires_grad] for y in (leaves, wide))
    for upstream in upstreams:
        errs_like(
            torch.autograd.grad(ours, needed, upstream, retain_graph=True),
            torch.autograd.grad(torchs, needed, upstream.to(torchs), retain_graph=True),
            torch.autograd.grad(exact, of_exact, upstream.double(), retain_graph=True),
        )
    return ours


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [slow(0.0), 0.1])
def test_token_losses_take_any_upstream(backend, dtype, smoothing):
    """Factors of many sizes and both signs, through a mask, and of 0, whose tokens have no part."""
    *leaves, labels = inputs((90,), 40, 333, dtype)
    sizes = 10.0 ** torch.linspace(-2, 2, 90)
    masked = torch.randn(90) * (torch.rand(90) < 0.5)
    ours = differ_at_most_as_eagers(
        leaves, labels, (sizes, masked, torch.zeros(90)), backend=backend, chunk_tokens=32,
        label_smoothing=smoothing,
    )  # fmt: skip
    assert ours.dtype == torch.float32
    grads = torch.autograd.grad(ours, leaves, masked)
    assert grads[0][masked == 0].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_of_upstream_0_is_never_looked_at(backend):
    hidden, weight, bias, labels = inputs()
    poisoned = hidden.detach().index_fill(0, torch.tensor(4), torch.inf).requires_grad_()
    losses = fused_cross_entropy(
        poisoned, weight, labels, bias=bias, reduction="none", backend=backend
    )
    assert not losses[4].isfinite()
    kept = losses[torch.arange(11) != 4].sum()
    for grad in torch.autograd.grad(kept, (poisoned, weight, bias)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("need", ["h", "w", "b", "wb"])
def test_token_losses_leave_frozen_inputs_alone(backend, need):
    *leaves, labels = inputs()
    for name, x in zip("hwb", leaves, strict=True):
        x.requires_grad_(name in need)
    differ_at_most_as_eagers(leaves, labels, [torch.linspace(-1, 2, 11)], backend=backend)


def test_the_mean_of_token_weights_keeps_the_count():
    hidden, weight, _, labels = inputs()
    w = torch.rand(11)
    w[3] = 0
    labels[5] = -100
    got = fused_cross_entropy(hidden, weight, labels, token_weight=w)
    each = cross_entropy(hidden, weight, labels, reduction="none")
    torch.testing.assert_close(got, (w * each).sum() / 10)
