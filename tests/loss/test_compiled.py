"""torch.compile and torch.export: once for all lengths, symbolic sizes wherever numbers are."""

import io

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

from fusedce import (
    count_valid,
    fused_argmax,
    fused_ce,
    fused_cross_entropy,
    fused_kl,
    fused_kl_tokens,
    fused_logprobs,
    linear_cross_entropy,
    shift_labels,
)

pytestmark = pytest.mark.slow
H, V = 8, 13
LENGTHS = range(3, 15)


def with_argmax(h, w, y, **options):
    argmax = torch.empty_like(y)
    return fused_ce(h, w, y, argmax_out=argmax, **options).loss_sum + argmax.sum()


def statistics(h, w, y, **options):
    stats = fused_logprobs(h, w, y, temperature=0.7, **options)
    return (stats.logprob + stats.entropy * stats.lse).sum() + stats.argmax.sum()


def weighted(h, w, y, **options):
    token_weight = y.float() + 0.5
    return fused_ce(h, w, y, token_weight=token_weight, z_loss=0.1, **options).loss_sum


def monitored(h, w, y, **options):
    names = ("correct", "entropy", "z_loss")
    out = fused_ce(h, w, y, monitor=names, z_loss=0.1, **options)
    return out.loss_sum + sum(out.monitors.values())


def losses(h, w, y, **options):
    return fused_cross_entropy(h, w, y, reduction="none", **options).sum()


FUNCTIONS = {
    "sum": lambda h, w, y, **o: fused_ce(h, w, y, **o).loss_sum,
    "mean": lambda h, w, y, **o: fused_ce(h, w, y, **o).mean(),
    "mean over a size": lambda h, w, y, **o: fused_ce(h, w, y, **o).mean(h.shape[0]),
    "chunks of a size": lambda h, w, y, **o: (
        fused_ce(h, w, y, chunk_tokens=(h.shape[0] + 1) // 2, **o).loss_sum
    ),
    "weights": weighted,
    "capped smoothing": lambda h, w, y, **o: (
        fused_ce(h, w, y, softcap=3.0, label_smoothing=0.1, **o).loss_sum
    ),
    "argmax_out": with_argmax,
    "cross-entropy": lambda h, w, y, **o: fused_cross_entropy(h, w, y, **o),
    "none": losses,
    "peers": lambda h, w, y, **o: linear_cross_entropy(h, w, y, shift=1, **o),
    "class weights": lambda h, w, y, **o: fused_cross_entropy(
        h, w, y, class_weight=torch.linspace(0.5, 2, V), **o
    ),
    "logprobs": statistics,
    "argmax": lambda h, w, y, **o: fused_argmax(h, w, **o).sum(),
    "several classes": lambda h, w, y, **o: fused_logprobs(
        h, w, torch.stack([y, (y + 1) % V], -1), **o
    ).logprob.sum(),
    "divergence": lambda h, w, y, **o: fused_kl(
        h, w, h.detach() + 1, w.detach(), y, temperature=2.0, **o
    ).mean(),
    "divergences": lambda h, w, y, **o: fused_kl_tokens(
        h, w, h.detach() + 1, w.detach(), y, divergence="jsd", **o
    ).sum(),
    "monitored": monitored,
    "shift": lambda h, w, y, **o: shift_labels(y).sum() + count_valid(y),
}
VARIANTS = [
    *((name, "torch", None) for name in FUNCTIONS),
    *((name, "triton", None) for name in ("sum", "none", "argmax_out", "logprobs", "argmax")),
    *((name, "torch", True) for name in ("chunks of a size", "none", "logprobs", "divergences")),
]


def inputs(n):
    rng = torch.Generator().manual_seed(n)
    hidden = torch.randn(n, H, generator=rng).requires_grad_()
    weight = torch.randn(V, H, generator=rng).requires_grad_()
    return hidden, weight, torch.randint(V, (n,), generator=rng)


def compute(function, hidden, weight, labels):
    """The value, and the gradients where there are any."""
    out = function(hidden, weight, labels)
    return (out, *(torch.autograd.grad(out, (hidden, weight)) if out.requires_grad else ()))


@pytest.mark.parametrize(("name", "backend", "dynamic"), VARIANTS)
def test_three_compilations_for_twelve_lengths(name, backend, dynamic):
    def function(h, w, y):
        return FUNCTIONS[name](h, w, y, **({} if name == "shift" else {"backend": backend}))

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
    for n in LENGTHS[:: 3 if backend == "triton" else 1]:  # (the interpreter is slow)
        x = inputs(n)
        torch.testing.assert_close(compute(compiled, *x), compute(function, *x))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("name", FUNCTIONS)
def test_export_with_any_length(name):
    class Module(torch.nn.Module):
        def forward(self, hidden, weight, labels):
            return FUNCTIONS[name](hidden, weight, labels)

    N = torch.export.Dim("N", min=2, max=1000)
    example = tuple(x.detach() for x in inputs(5))
    program = torch.export.export(Module(), example, dynamic_shapes=({0: N}, None, {0: N}))
    torch.export.save(program, saved := io.BytesIO())
    saved.seek(0)
    loaded = torch.export.load(saved).module()
    for n in LENGTHS:
        x = tuple(x.detach() for x in inputs(n))
        torch.testing.assert_close(loaded(*x), Module()(*x))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("trace", [torch.jit.trace, make_fx], ids=["jit.trace", "make_fx"])
@pytest.mark.parametrize("name", ["mean", "statistics"])
def test_a_trace_keeps_no_value_of_its_example(name, trace):
    """A denominator above all."""
    hidden, weight, labels = (x.detach() for x in inputs(5))

    def function(h, y):
        if name == "mean":
            return fused_ce(h, weight, y).mean()
        return fused_logprobs(h, weight, y, temperature=h[:, 0].exp()).logprob.sum()

    example = hidden, labels
    traced = trace(function)(*example) if trace is make_fx else trace(function, example)
    others = hidden.flip(0), labels.clone().index_fill_(0, torch.tensor([1, 2]), -100)
    torch.testing.assert_close(traced(*others), function(*others))
