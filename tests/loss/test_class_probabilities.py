"""Class probabilities as labels: against `F.cross_entropy` and the definition, and errors."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import EXACT, IN_FLOAT64, STATISTIC, logit_rounding
from support.coverage import counted
from torch._dynamo.testing import CompileCounterWithBackend

from fusedce import fused_ce, fused_cross_entropy, reference_ce
from fusedce.backends.held import Call
from fusedce.backends.plan import way_of_divergence

EVERYTHING = {"softcap": 5.0, "logit_scale": -0.7, "label_smoothing": 0.1, "z_loss": 0.05}


@dataclass(frozen=True)
class Given:
    """A head and class probabilities, drawn from numbers."""

    N: int = 9
    H: int = 12
    V: int = 131
    dtype: torch.dtype = torch.float32
    spread: float = 1.0  # of the logits
    sharpness: float = 1.0  # of the probabilities: a large one gives one class nearly all
    agree: bool = False  # the likeliest class of both is the same
    bias: bool = False
    class_weight: bool = False
    token_weight: bool = False
    seed: int = 0

    def tensors(self):
        """``hidden, weight, labels``, options; hidden states of weight 0 are NaN."""
        rng = torch.Generator().manual_seed(self.seed)

        def draw(*shape):
            return torch.randn(shape, generator=rng)

        hidden, weight = draw(self.N, self.H) / self.H**0.5 * self.spread, draw(self.V, self.H)
        logits = hidden @ weight.T if self.agree else draw(self.N, self.V)
        labels = (self.sharpness * logits).softmax(-1)
        options = {"bias": draw(self.V).to(self.dtype)} if self.bias else {}
        if self.class_weight:
            options["class_weight"] = draw(self.V).abs()
        if self.token_weight:
            w = draw(self.N) * (torch.rand(self.N, generator=rng) < 0.7)
            options["token_weight"] = w
            hidden[w == 0] = math.nan
        if self.dtype == torch.float64:
            labels = labels.double()
        return (hidden.to(self.dtype), weight.to(self.dtype), labels), options


def gradients(loss, tensors, options):
    """Gradients of the sum by hidden, weight and bias."""
    hidden, weight, labels = tensors
    leaves = {"hidden": hidden, "weight": weight} | (
        {"bias": options["bias"]} if "bias" in options else {}
    )
    leaves = {k: x.detach().requires_grad_() for k, x in leaves.items()}
    out = loss(**leaves, labels=labels, **{k: x for k, x in options.items() if k != "bias"})
    return out.detach(), torch.autograd.grad(out, list(leaves.values()))


def check(case, **options):
    tensors, more = case.tensors()
    options |= more

    def ours(**o):
        call = counted(fused_cross_entropy)
        return call(reduction="sum", chunk_tokens=4, **o)

    def eager(**o):
        return reference_ce(**o, dtype=case.dtype).loss_sum

    def exact(**o):
        wide = {
            k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for k, x in o.items()
        }
        return reference_ce(**wide).loss_sum

    loss, grads = gradients(ours, tensors, options)
    truth, exact_grads = gradients(exact, tensors, options)
    _, eager_grads = gradients(eager, tensors, options)
    acc = torch.float64 if case.dtype == torch.float64 else torch.float32
    assert loss.dtype == acc
    eps, out = torch.finfo(acc).eps, torch.finfo(case.dtype).eps
    size = (1 + 30 * case.spread) * 4
    for name in ("token_weight", "class_weight"):
        size *= max([1.0, *options.get(name, torch.ones(1)).abs().tolist()])
    size *= 1 + options.get("z_loss", 0) * 30 * case.spread
    assert abs(float(loss) - float(truth)) <= 8 * eps * size * (case.N + abs(float(truth)))
    for g, e, t in zip(grads, exact_grads, eager_grads, strict=True):
        assert g.dtype == case.dtype
        if not g.numel():
            continue
        e = e.double()
        error, of_eager = (float((x.double() - e).abs().nan_to_num().max()) for x in (g, t))
        bound = 2 * of_eager + 2 * out * float(e.abs().max()) + 16 * eps * size
        assert error <= bound, (error, bound, of_eager)
        assert g.isfinite().all()


@st.composite
def givens(draw, dtypes, max_vocabulary=300):
    return Given(
        N=draw(st.integers(0, 20)),
        H=draw(st.integers(1, 30)),
        V=draw(st.one_of(st.sampled_from([1, 2, 257]), st.integers(1, max_vocabulary))),
        dtype=draw(st.sampled_from(dtypes)),
        spread=draw(st.sampled_from([0.1, 1.0, 20.0])),
        sharpness=draw(st.sampled_from([0.0, 1.0, 30.0])),
        agree=draw(st.booleans()),
        bias=draw(st.booleans()),
        class_weight=draw(st.booleans()),
        token_weight=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


numbers = st.fixed_dictionaries(
    {},
    optional={
        "softcap": st.sampled_from([1.0, 30.0]),
        "logit_scale": st.sampled_from([0.25, -1.5]),
        "label_smoothing": st.sampled_from([0.1, 1.0]),
        "z_loss": st.sampled_from([1e-4, 0.3]),
    },
)


@settings(max_examples=60, deadline=None)
@given(givens([torch.float32, torch.bfloat16, torch.float16, torch.float64]), numbers)
def test_any_probabilities(case, options):
    check(case, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_options_at_once(dtype):
    case = Given(V=531, dtype=dtype, bias=True, class_weight=True, token_weight=True)
    check(case, **EVERYTHING)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_it_is_torchs_cross_entropy(reduction, weighted, smoothing):
    """Class weights do not enter the denominator of "mean" there."""
    tensors, options = Given(bias=True, class_weight=weighted).tensors()
    upstream = torch.linspace(-1, 2, 9) if reduction == "none" else torch.tensor(1.0)

    def ours(hidden, weight, labels, **o):
        loss = fused_cross_entropy(
            hidden, weight, labels, reduction=reduction,
            label_smoothing=smoothing, **o,
        )  # fmt: skip
        return (loss * upstream).sum()

    def theirs(hidden, weight, labels, bias, class_weight=None):
        loss = F.cross_entropy(
            F.linear(hidden, weight, bias), labels, class_weight, reduction=reduction,
            label_smoothing=smoothing,
        )  # fmt: skip
        return (loss * upstream).sum()

    for a, b in zip(
        gradients(ours, tensors, options), gradients(theirs, tensors, options), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["strided", "expanded"])
def test_class_weights_in_any_order_of_memory(name):
    (hidden, weight, labels), _ = Given(N=5).tensors()
    V = len(weight)
    wide = torch.rand(2 * V)
    class_weight = wide[::2] if name == "strided" else wide[:1].expand(V)
    got, expected = (
        fused_cross_entropy(hidden, weight, labels, class_weight=c, reduction="none")
        for c in (class_weight, class_weight.contiguous())
    )
    torch.testing.assert_close(got, expected, **EXACT)


def test_a_sure_and_right_class_does_not_cancel():
    """Probability 1 - 1e-6 of the class that has nearly all of the target, too."""
    (hidden, weight, _), _ = Given(N=4, V=50).tensors()
    top = (hidden @ weight.T).argmax(1)
    bias = torch.zeros(50)
    hidden = hidden[:1].expand(4, -1).contiguous()
    bias[top[0]] = 22.0
    labels = F.one_hot(top[:1].expand(4), 50).float()
    options = {"bias": bias}
    wide = (hidden.double(), weight.double(), labels.double())
    exact = reference_ce(*wide, bias=bias.double()).loss_sum
    assert exact < 1e-5  # near 0, as the docstring says
    loss, grads = gradients(
        lambda **o: fused_cross_entropy(**o, reduction="sum"),
        (hidden, weight, labels),
        options,
    )
    # 1 - p and every gradient have the relative error that the logits have as numbers
    rounding = 2 * logit_rounding(hidden, weight, bias)
    torch.testing.assert_close(loss.double(), exact, rtol=rounding, atol=0)
    _, exact_grads = gradients(
        lambda **o: reference_ce(**o).loss_sum, wide, {"bias": bias.double()}
    )
    for a, b in zip(grads, exact_grads, strict=True):
        # entries are sums over the classes, which nearly cancel in some
        atol = rounding * float(b.abs().max())
        torch.testing.assert_close(a.double(), b, rtol=rounding, atol=atol)


def test_indices_as_probabilities_are_the_same_loss():
    (hidden, weight, labels), _ = Given().tensors()
    y = labels.argmax(1)
    ours = fused_cross_entropy(hidden, weight, F.one_hot(y, 131).float(), label_smoothing=0.1)
    torch.testing.assert_close(ours, fused_cross_entropy(hidden, weight, y, label_smoothing=0.1))


def test_a_masked_class():
    """A logit of -inf adds 0 where its probability is 0, else the loss is infinite, as torch's."""
    (hidden, weight, labels), more = Given(bias=True).tensors()
    bias = more["bias"].clone()
    bias[7] = -math.inf
    without = labels.clone()
    without[:, 7] = 0
    finite = fused_cross_entropy(hidden, weight, without, bias=bias)
    exact = reference_ce(
        hidden.double(), weight.double(), without.double(), bias=bias.double()
    ).mean()
    torch.testing.assert_close(finite.double(), exact, rtol=STATISTIC, atol=0)
    assert fused_cross_entropy(hidden, weight, labels, bias=bias) == math.inf
    hidden[3] = math.nan
    assert fused_cross_entropy(hidden, weight, without, bias=bias).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_of_two_bytes(dtype):
    (hidden, weight, labels), _ = Given().tensors()
    labels = labels.to(dtype)
    loss = fused_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, fused_cross_entropy(hidden, weight, labels.float()))


def test_the_triton_backend_has_none():
    (hidden, weight, labels), _ = Given().tensors()
    with pytest.raises(RuntimeError, match="backend='triton' cannot run class probabilities"):
        fused_cross_entropy(hidden, weight, labels, backend="triton")
    with pytest.raises(ValueError, match="backend must be None, 'torch' or 'triton', got 'cuda'"):
        fused_cross_entropy(hidden, weight, labels, backend="cuda")


def test_leading_shapes_strides_and_no_position():
    (hidden, weight, labels), _ = Given(N=12).tensors()
    flat = fused_cross_entropy(hidden, weight, labels, reduction="none")
    wide = labels.new_zeros(12, 263)
    wide[:, ::2][:, :131] = labels
    for given_labels in (labels, wide[:, ::2][:, :131]):
        nested = fused_cross_entropy(
            hidden.view(3, 4, -1), weight, given_labels.view(3, 4, -1)
            if given_labels.is_contiguous() else given_labels.unflatten(0, (3, 4)),
            reduction="none",
        )  # fmt: skip
        torch.testing.assert_close(nested.flatten(), flat, **EXACT)
    hidden = hidden[:0].requires_grad_()
    loss = fused_cross_entropy(hidden, weight, labels[:0])
    loss.backward()
    assert loss == 0


BAD = {
    "shape": ({"labels": torch.ones(9, 130)}, ValueError, r"\(\.\.\., V\) = \(9, 131\)"),
    "tokens": ({"labels": torch.ones(8, 131)}, ValueError, r"must be \(\.\.\., V\)"),
    "wide": ({"labels": torch.ones(9, 131).double()}, TypeError, "float64 exactly where"),
    "grad": ({"labels": torch.ones(9, 131, requires_grad=True)}, ValueError, "require grad"),
    "ignore": ({"ignore_index": 0}, ValueError, "ignore_index must be negative"),
    "reduction": ({"reduction": "avg"}, ValueError, "reduction"),
    "budget": ({"memory_budget": 99}, ValueError, "memory_budget must be at least"),
    "indices": ({"labels": torch.ones(9)}, TypeError, "class indices"),
    "group": ({"process_group": object()}, TypeError, "process_group must be a process group"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name):
    (hidden, weight, labels), _ = Given().tensors()
    options, error, message = BAD[name]
    options = {"labels": labels} | options
    with pytest.raises(error, match=message):
        fused_cross_entropy(hidden, weight, **options)


def test_other_functions_name_the_one_that_takes_them():
    (hidden, weight, labels), _ = Given().tensors()
    with pytest.raises(TypeError, match="labels of fused_cross_entropy"):
        fused_ce(hidden, weight, labels)


@pytest.mark.parametrize("argument", [0, 1])
def test_gradients_of_each_sample(argument):
    rng = torch.Generator().manual_seed(0)
    h, w, t = (torch.rand(*s, generator=rng).double() for s in ((3, 6, 5), (9, 5), (3, 6, 9)))

    def of_samples(loss):
        return torch.func.vmap(torch.func.grad(loss, argument), (0, None, 0))(h, w, t)

    ours = of_samples(lambda h, w, t: fused_cross_entropy(h, w, t, label_smoothing=0.1))
    exact = of_samples(lambda h, w, t: F.cross_entropy(h @ w.T, t, label_smoothing=0.1))
    torch.testing.assert_close(ours, exact, **IN_FLOAT64)


def test_a_budget_makes_small_chunks():
    call = Call(4096, 4096, 50_000, 512, 4, 4, on_cpu=True, triton=False)
    free = way_of_divergence(call, None)
    for budget in (2**26, 2**28):
        way = way_of_divergence(call, None, memory_budget=budget)
        assert way.bytes <= budget < free.bytes + 2**28
    (hidden, weight, labels), _ = Given(N=200, V=3000).tensors()
    exact = fused_cross_entropy(hidden, weight, labels)
    ours = fused_cross_entropy(hidden, weight, labels, memory_budget=7 * 2**20)
    torch.testing.assert_close(ours, exact)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_once_for_all_lengths(reduction):
    def fn(hidden, weight, labels):
        return fused_cross_entropy(hidden, weight, labels, reduction=reduction).sum()

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=counter, fullgraph=True, dynamic=None)
    for n in range(3, 9):
        (hidden, weight, labels), _ = Given(N=n).tensors()
        leaves = [hidden.requires_grad_(), weight.requires_grad_()]
        ours = torch.autograd.grad(compiled(*leaves, labels), leaves)
        for a, b in zip(ours, torch.autograd.grad(fn(*leaves, labels), leaves), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 3
