"""fused_cross_entropy against F.cross_entropy(F.linear(...)), for every rule torch has."""

import itertools

import pytest
import torch
from support.bounds import SAME_SUMS, errs_like, in_float64
from support.oracle import cross_entropy

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
    [(0.0, False), pytest.param(0.0, True, marks=pytest.mark.slow),
     pytest.param(0.3, False, marks=pytest.mark.slow), (0.3, True)],
)  # fmt: skip
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


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck_passes_with_every_option(reduction):
    hidden, weight, bias, labels = inputs((5,), 4, 9, torch.float64)
    labels[1] = -100
    c = torch.linspace(0.5, 2, 9, dtype=torch.float64)

    def f(h, w, b):
        return fused_cross_entropy(
            h, w, labels, bias=b, class_weight=c, reduction=reduction, softcap=2.0, z_loss=0.1,
            label_smoothing=0.2, logit_scale=0.7, chunk_tokens=2,
        )  # fmt: skip

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_token_losses_err_at_most_twice_as_torch(backend, dtype, smoothing):
    """Errors at most twice torch's own, under upstream gradients of many sizes and of 0."""
    hidden, weight, bias, labels = inputs((90,), 40, 333, dtype)
    upstream = 10.0 ** torch.linspace(-2, 2, 90)
    upstream[::5] = 0

    def run(fn, leaves, **options):
        losses = fn(*leaves[:2], labels, bias=leaves[2], label_smoothing=smoothing,
                    reduction="none", **options)  # fmt: skip
        return losses, *torch.autograd.grad(losses, leaves, upstream.to(losses.dtype))

    leaves = (hidden, weight, bias)
    ours = run(fused_cross_entropy, leaves, backend=backend, chunk_tokens=32)
    torchs = run(lambda *a, **k: cross_entropy(*a, **k).float(), leaves)
    exact = run(cross_entropy, [x.detach().double().requires_grad_() for x in leaves])
    assert ours[0].dtype == torch.float32
    eps = torch.finfo(dtype).eps
    for o, t, e in zip(ours, torchs, exact, strict=True):
        assert (o.double() - e).norm() <= 2 * (t.double() - e).norm() + eps / 4 * e.norm()
        assert e.norm() > 1
    assert ours[1][::5].eq(0).all()


def assert_close_in_float32(got, exact, inputs, factors):
    """``got``, gradients by hidden, weight and bias (or ``None``), against those in float64.

    A logit and the log-sum-exp have a rounding each of the largest logit's size, together
    ``eps * |z|``, and that is the relative error of a probability. The gradient of a hidden state
    adds rows of the head by probabilities whose sum is 1, that of the head adds hidden states by
    the tokens' factors. The sums are rounded as float32 results of the same terms are.
    """
    hidden, weight, bias = (x.detach().double() for x in inputs)
    z = (hidden @ weight.t() + bias).abs().max()
    each, total = factors.abs().max(), factors.abs().sum()
    sizes = each * weight.abs().max(), total * hidden.abs().max(), total
    for x, e, size in zip(got, exact, sizes, strict=True):
        if x is not None:
            atol = float(torch.finfo(torch.float32).eps * z * size)
            torch.testing.assert_close(x.double(), e, rtol=SAME_SUMS, atol=atol)


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_losses_take_any_upstream(backend):
    """Twice with other factors; through a mask; and tokens of upstream 0 are never looked at."""
    hidden, weight, bias, labels = inputs()
    losses = fused_cross_entropy(
        hidden, weight, labels, bias=bias, reduction="none", backend=backend
    )
    leaves = (hidden, weight, bias)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = cross_entropy(*wide[:2], labels, bias=wide[2], reduction="none")
    for upstream in (torch.randn(11), torch.randn(11) * (torch.rand(11) < 0.5), torch.zeros(11)):
        got = torch.autograd.grad(losses, leaves, upstream, retain_graph=True)
        expected = torch.autograd.grad(exact, wide, upstream.double(), retain_graph=True)
        assert_close_in_float32(got, expected, leaves, upstream)
    with torch.no_grad():
        poisoned = hidden.clone()
        poisoned[4] = float("inf")
    poisoned.requires_grad_()
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
    hidden, weight, bias, labels = inputs()
    leaves = dict(zip("hwb", (hidden, weight, bias), strict=True))
    for name, x in leaves.items():
        x.requires_grad_(name in need)
    wanted = [leaves[name] for name in need]
    ours = fused_cross_entropy(hidden, weight, labels, bias=bias, reduction="none", backend=backend)
    found = dict(zip(need, torch.autograd.grad(ours.square().sum(), wanted), strict=True))
    wide = [x.detach().double().requires_grad_() for x in leaves.values()]
    exact = cross_entropy(*wide[:2], labels, bias=wide[2], reduction="none")
    factors = 2 * exact.detach()
    expected = torch.autograd.grad(exact.square().sum(), wide)
    got = [found.get(name) for name in leaves]
    # The factors are losses, whose own error is that of a logit.
    of_factors = factors + 2
    assert_close_in_float32(got, expected, leaves.values(), of_factors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("N", [0, 5])
def test_nothing_valid_is_0_where_torch_says_nan(backend, reduction, weighted, N):
    hidden, weight, bias, labels = inputs((N,))
    labels.fill_(-100)
    with torch.no_grad():
        hidden.fill_(float("nan"))
    c = torch.rand(37) if weighted else None
    loss = fused_cross_entropy(
        hidden, weight, labels, bias=bias, class_weight=c, reduction=reduction, backend=backend,
        label_smoothing=0.1,
    )  # fmt: skip
    assert loss.eq(0).all()
    assert loss.shape == ((N,) if reduction == "none" else ())
    for grad in torch.autograd.grad(loss.sum(), (hidden, weight, bias)):
        assert grad.eq(0).all()
    if reduction == "mean":
        assert cross_entropy(hidden, weight, labels, bias=bias).isnan()


def test_the_mean_of_token_weights_keeps_the_count():
    hidden, weight, _, labels = inputs()
    w = torch.rand(11)
    w[3] = 0
    labels[5] = -100
    got = fused_cross_entropy(hidden, weight, labels, token_weight=w)
    each = cross_entropy(hidden, weight, labels, reduction="none")
    torch.testing.assert_close(got, (w * each).sum() / 10)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_own_samples_agree(backend):
    """Results equal torch's on its own samples for F.linear_cross_entropy with a linear head."""
    from torch.testing._internal.common_methods_invocations import op_db

    ops = [op for op in op_db if op.name == "nn.functional.linear_cross_entropy"]
    if not ops:
        pytest.skip("this torch has no F.linear_cross_entropy")
    taken = refused = 0
    for op in ops:
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))
        for sample in samples[:: 1 if backend == "torch" else 4]:  # (the interpreter is slow)
            hidden, (weight, target), options = sample.input, sample.args, dict(sample.kwargs)
            options.pop("options", None)
            options = {
                {"weight": "class_weight", "linear_bias": "bias"}.get(k, k): v
                for k, v in options.items()
            }
            if weight.dim() != 2:  # skip K-dimensional losses, which have no linear head
                with pytest.raises(ValueError, match="weight must be"):
                    fused_cross_entropy(hidden, weight, target, backend=backend, **options)
                refused += 1
                continue
            if target.requires_grad:
                with pytest.raises(ValueError, match="labels of class probabilities must not requ"):
                    fused_cross_entropy(hidden, weight, target, backend=backend, **options)
                refused, target = refused + 1, target.detach()
            if target.is_floating_point() and backend == "triton":
                with pytest.raises(RuntimeError, match="cannot run class probabilities"):
                    fused_cross_entropy(hidden, weight, target, backend=backend, **options)
                refused += 1
                continue
            wanted = op(sample.input, weight, target, **sample.kwargs)
            got = fused_cross_entropy(hidden, weight, target, backend=backend, **options)
            leaves = [hidden, weight] + ([options["bias"]] if "bias" in options else [])
            wide = in_float64(*leaves)
            kwargs = {k: in_float64(x)[0] for k, x in sample.kwargs.items()}
            if "bias" in options:
                kwargs["linear_bias"] = wide[2]
            exact = op(*wide[:2], *in_float64(target), **kwargs)
            errs_like(got, wanted, exact)
            upstream = torch.linspace(1, 2, got.numel()).view(got.shape)
            errs_like(
                torch.autograd.grad(got, leaves, upstream),
                torch.autograd.grad(wanted, leaves, upstream),
                torch.autograd.grad(exact, wide, upstream.double()),
            )
            taken += 1
    assert taken >= (30 if backend == "torch" else 8)
    assert refused
