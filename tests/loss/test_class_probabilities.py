"""Class probabilities as labels: against `F.cross_entropy` and the definition, and errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import EXACT, STATISTIC, logit_rounding

from fusedce import fused_cross_entropy, reference_ce
from fusedce.contract.divergence import OF_TARGETS
from fusedce.testing import Case, assert_within, cases

EVERY = ("bias", "token_weight", "class_weight", *sorted(OF_TARGETS))
PLAIN = Case((9,), 12, 131)


def inputs(case=PLAIN, sharpness=1.0, agree=False):
    """``hidden, weight, labels``, options; hidden states of weight 0 are NaN.

    ``sharpness``: a large one gives one class nearly all; ``agree``: that class is the likeliest.
    """
    hidden, weight, _, bias = case.tensors()
    hidden, weights = hidden.nan_to_num(), case.weights()
    rng = torch.Generator().manual_seed(case.seed + 2)
    shape = (*case.leading, case.V)
    logits = hidden.float() @ weight.float().T if agree else torch.randn(shape, generator=rng)
    labels = (sharpness * logits).softmax(-1)
    labels = labels.double() if case.dtype == torch.float64 else labels
    if case.token_weight:
        hidden[weights["token_weight"] == 0] = math.nan
    options = case.options | weights | ({} if bias is None else {"bias": bias})
    return (hidden, weight, labels), options


def gradients(loss, tensors, options, dtype=None):
    """The sum, and its gradients by hidden, weight and bias."""
    *leaves, labels = tensors
    leaves = [x for x in (*leaves, options.get("bias")) if x is not None]
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
    options = options | ({"bias": leaves[2]} if len(leaves) > 2 else {})
    out = loss(*leaves[:2], labels, **options)
    return out.detach(), torch.autograd.grad(out, leaves)


def summed(*tensors, **options):
    return fused_cross_entropy(*tensors, reduction="sum", **options)


def reference(*tensors, **options):
    return reference_ce(*tensors, **options).loss_sum


def check(case, **how):
    """Bounds are those of `fusedce.testing.check`: a rounding of the logits, and of the result."""
    tensors, options = inputs(case, **how)
    loss, grads = gradients(summed, tensors, options | {"chunk_tokens": 4})
    of_eager = gradients(reference, tensors, options | {"dtype": case.dtype})
    wide = (*tensors[:2], tensors[2].double())
    truth, exact_grads = gradients(reference, wide, options, torch.float64)
    acc = torch.promote_types(case.dtype, torch.float32)
    assert loss.dtype == acc
    assert [x.dtype for x in grads] == [case.dtype] * len(grads)
    h, w = (x.detach().double().nan_to_num().abs().reshape(-1, case.H) for x in tensors[:2])
    eps, slope = torch.finfo(acc).eps, abs(options.get("logit_scale", 1.0))
    size = h @ w.T + options.get("bias", torch.zeros(case.V)).double().abs()
    condition = 1 + slope * (float(size.max()) if len(h) else 0.0)
    amplitude = 1 + 2 * options.get("z_loss", 0.0) * condition
    for x in case.weights().values():
        amplitude *= max([1.0, *x.flatten().tolist()])
    of_token = 4 * eps * (condition + math.log(case.V)) * amplitude
    assert_within("loss", loss, of_eager[0], truth, of_token * max(len(h), 1), case)
    for x, y, e, size in zip(
        grads, of_eager[1], exact_grads, (4 * w.max(), h.sum(0).max(), len(h)), strict=False
    ):
        floor = 16 * eps * condition * amplitude * slope * float(size)
        floor += 2 * torch.finfo(case.dtype).eps * float(e.abs().max()) if e.numel() else 0
        assert_within("gradient", x, y, e, floor, case)


@settings(max_examples=60, deadline=None)
@given(cases(options=EVERY, max_tokens=20), st.sampled_from([0.0, 1.0, 30.0]), st.booleans())
def test_any_probabilities(case, sharpness, agree):
    check(case, sharpness=sharpness, agree=agree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_options_at_once(dtype):
    options = {"softcap": 5.0, "logit_scale": -0.7, "label_smoothing": 0.1, "z_loss": 0.05}
    weights = {"with_bias": True, "class_weight": True, "token_weight": True}
    check(Case((9,), 12, 531, dtype, **weights, options=options))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_it_is_torchs_cross_entropy(reduction, weighted, smoothing):
    """Class weights do not enter the denominator of "mean" there."""
    tensors, options = inputs(Case((9,), 12, 131, with_bias=True, class_weight=weighted))
    how = {"reduction": reduction, "label_smoothing": smoothing}
    upstream = torch.linspace(-1, 2, 9) if reduction == "none" else torch.tensor(1.0)

    def ours(*tensors, **o):
        return (fused_cross_entropy(*tensors, **how, **o) * upstream).sum()

    def theirs(hidden, weight, labels, bias, class_weight=None):
        loss = F.cross_entropy(F.linear(hidden, weight, bias), labels, class_weight, **how)
        return (loss * upstream).sum()

    torch.testing.assert_close(*(gradients(f, tensors, options) for f in (ours, theirs)))


@pytest.mark.parametrize("name", ["strided", "expanded"])
def test_class_weights_in_any_order_of_memory(name):
    tensors, _ = inputs()
    wide = torch.rand(2 * 131)
    class_weight = wide[::2] if name == "strided" else wide[:1].expand(131)
    got, expected = (
        fused_cross_entropy(*tensors, class_weight=c, reduction="none")
        for c in (class_weight, class_weight.contiguous())
    )
    torch.testing.assert_close(got, expected, **EXACT)


def test_a_sure_and_right_class_does_not_cancel():
    """Probability 1 - 1e-6 of the class that has nearly all of the target, too."""
    hidden, weight, _ = (x[:50] for x in inputs()[0])
    hidden, bias = hidden[:1].expand(4, -1).contiguous(), torch.zeros(50)
    top = (hidden @ weight.T).argmax(1)
    bias[top[0]] = 22.0
    tensors, options = (hidden, weight, F.one_hot(top, 50).float()), {"bias": bias}
    wide = [x.double() for x in tensors]
    exact, exact_grads = gradients(reference, wide, options, torch.float64)
    assert exact < 1e-5  # near 0, as the docstring says
    loss, grads = gradients(summed, tensors, options)
    # 1 - p and every gradient have the relative error that the logits have as numbers
    rounding = 2 * logit_rounding(hidden, weight, bias)
    torch.testing.assert_close(loss.double(), exact, rtol=rounding, atol=0)
    for a, b in zip(grads, exact_grads, strict=True):
        # entries are sums over the classes, which nearly cancel in some
        atol = rounding * float(b.abs().max())
        torch.testing.assert_close(a.double(), b, rtol=rounding, atol=atol)


def test_a_masked_class():
    """A logit of -inf adds 0 where its probability is 0, else the loss is infinite, as torch's."""
    (hidden, weight, labels), _ = inputs()
    bias = torch.zeros(131).index_fill(0, torch.tensor(7), -math.inf)
    without = labels.index_fill(1, torch.tensor(7), 0)
    finite = fused_cross_entropy(hidden, weight, without, bias=bias)
    wide = (x.double() for x in (hidden, weight, without))
    exact = reference_ce(*wide, bias=bias.double()).mean()
    torch.testing.assert_close(finite.double(), exact, rtol=STATISTIC, atol=0)
    assert fused_cross_entropy(hidden, weight, labels, bias=bias) == math.inf
    little = labels.index_fill(1, torch.tensor(7), 1e-30)
    assert fused_cross_entropy(hidden, weight, little, bias=bias) == math.inf
    hidden[3] = math.nan
    assert fused_cross_entropy(hidden, weight, without, bias=bias).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_of_two_bytes_in_any_order_of_memory(dtype):
    (hidden, weight, labels), _ = inputs()
    labels = labels.to(dtype).t().contiguous().t()
    loss = fused_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, fused_cross_entropy(hidden, weight, labels.float()))


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
    "Triton": ({"backend": "triton"}, RuntimeError, "'triton' cannot run class probabilities"),
    "backend": ({"backend": "cuda"}, ValueError, "backend must be None, 'torch' or 'triton'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name):
    (hidden, weight, labels), _ = inputs()
    options, error, message = BAD[name]
    options = {"labels": labels} | options
    with pytest.raises(error, match=message):
        fused_cross_entropy(hidden, weight, **options)
