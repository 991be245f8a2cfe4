"""Arguments in a wrong place: the error says what they look like."""

from types import SimpleNamespace

import pytest
import torch

from fusedce import LossAccumulator, fused_ce, fused_cross_entropy, fused_logprobs
from fusedce.contract.labels import bad_label_code

BACKENDS = ["torch", "triton"]
FUNCTIONS = [fused_ce, fused_cross_entropy, fused_logprobs]
H, V = 8, 13


def inputs(*leading):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(*leading, H, generator=rng).requires_grad_()
    weight = torch.randn(V, H, generator=rng).requires_grad_()
    return hidden, weight, torch.randint(V, leading, generator=rng)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("leading", [(4,), (2, 5)])
def test_a_weight_given_first(function, leading):
    hidden, weight, labels = inputs(*leading)
    with pytest.raises(ValueError, match="hidden and weight look swapped"):
        function(weight, hidden, labels)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_logits_given_as_hidden(function):
    hidden, weight, labels = inputs(2, 5)
    with pytest.raises(ValueError, match=r"hidden looks like logits .*weight.T"):
        function(hidden @ weight.T, weight, labels)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_modules_and_outputs_given_as_tensors(function):
    hidden, weight, labels = inputs(4)
    with pytest.raises(TypeError, match=r"weight must be a tensor, got Linear: pass head\.weight"):
        function(hidden, torch.nn.Linear(H, V), labels)
    output = SimpleNamespace(last_hidden_state=hidden)
    with pytest.raises(TypeError, match=r"got SimpleNamespace: pass output\.last_hidden_state"):
        function(output, weight, labels)
    output = SimpleNamespace(logits=hidden @ weight.T, hidden_states=None)
    with pytest.raises(TypeError, match=r"pass the hidden states, output\.hidden_states\[-1\]"):
        function(output, weight, labels)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_labels_of_a_wrong_kind(function):
    hidden, weight, labels = inputs(4)
    with pytest.raises(TypeError, match=r"torch\.uint8: pass labels\.long\(\)"):
        function(hidden, weight, labels.to(torch.uint8))
    with pytest.raises(TypeError, match=r"class probabilities are as large as the logits"):
        function(hidden, weight, torch.rand(4, V))
    with pytest.raises(TypeError, match=r"class indices, got torch.float32$"):
        function(hidden, weight, labels.float())
    with pytest.raises(ValueError, match="labels must have the leading shape"):  # shapes first
        function(hidden, weight, labels[:3].float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [2**31, 2**40, -(2**40), V, -1])
def test_a_bad_label_is_named_with_its_own_value(backend, value):
    hidden, weight, labels = inputs(4)
    labels[2] = value
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match=f"got {value} at flattened position 2"):
            function(hidden, weight, labels, backend=backend)


def test_a_code_that_cannot_hold_the_value_says_so():
    acc = LossAccumulator()
    with pytest.raises(ValueError, match="got 2147483647 or beyond at flattened position 5"):
        acc.add((torch.tensor(float("nan")), torch.tensor(bad_label_code(5, 2**40))))
        acc.metrics()


# ---- masks, and labels that all count --------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64]
)
def test_token_weights_of_any_dtype(backend, dtype):
    hidden, weight, labels = inputs(6)
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    expected = fused_ce(hidden, weight, labels, token_weight=mask.float()).loss_sum
    loss = fused_ce(hidden, weight, labels, token_weight=mask.to(dtype), backend=backend).loss_sum
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight))
    )
    each = fused_cross_entropy(
        hidden, weight, labels, reduction="none", token_weight=mask.to(dtype), backend=backend
    )
    assert each[mask == 0].eq(0).all()
    torch.testing.assert_close(each.sum(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_class_weights_of_any_dtype(backend):
    hidden, weight, labels = inputs(6)
    c = torch.arange(V) % 3 * 6000  # whose sum leaves fp16
    for dtype in (torch.int64, torch.float16):
        torch.testing.assert_close(
            fused_cross_entropy(
                hidden, weight, labels, class_weight=c.to(dtype), label_smoothing=0.1,
                backend=backend,
            ),
            torch.nn.functional.cross_entropy(
                hidden @ weight.T, labels, c.float(), label_smoothing=0.1
            ),
        )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_no_label_is_ignored(backend, dtype):
    hidden, weight, labels = inputs(6)
    labels = labels.to(dtype)
    out = fused_ce(hidden, weight, labels, ignore_index=None, backend=backend)
    assert out.n_valid == 6
    torch.testing.assert_close(out.loss_sum, fused_ce(hidden, weight, labels).loss_sum)
    for bad in (-100, torch.iinfo(dtype).min):
        labels[2] = bad
        with pytest.raises(ValueError, match=r"0 <= label < V=13: got -\d+ at flattened position"):
            fused_ce(hidden, weight, labels, ignore_index=None, backend=backend)
