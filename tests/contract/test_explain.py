"""Errors for arguments in a wrong place say which argument they look like."""

from types import SimpleNamespace

import pytest
import torch

from fusedce import fused_ce, fused_cross_entropy, fused_logprobs

BACKENDS = ["torch", "triton"]
FUNCTIONS = [fused_ce, fused_cross_entropy, fused_logprobs]
H, V = 8, 13


def inputs(*leading):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(*leading, H, generator=rng).requires_grad_()
    weight = torch.randn(V, H, generator=rng).requires_grad_()
    return hidden, weight, torch.randint(V, leading, generator=rng)


MISTAKES = {
    "weight first": (lambda f, h, w, y: f(w, h, y), "hidden and weight look swapped"),
    "logits": (lambda f, h, w, y: f(h @ w.T, w, y), r"hidden looks like logits .*weight.T"),
    "class weights first": (
        lambda f, h, w, y: f(h, w[:, 0], y),
        r"got \(13,\)\. It is the head's; weights of classes are class_weight=",
    ),
    "the order of F.cross_entropy": (
        lambda f, h, w, y: f(h, y, w[:, 0]),
        "weight looks like labels: the order is hidden, weight, labels",
    ),
    "labels, then the weight": (lambda f, h, w, y: f(h, y, w), "weight looks like labels"),
    "logits and labels": (
        lambda f, h, w, y: f(h @ w.T, y),
        r"not labels was given. It takes no logits: .*\(hidden, head.weight, labels\)",
    ),
    "logits and labels by name": (
        lambda f, h, w, y: f(h @ w.T, labels=y),
        "not weight was given. It takes no logits",
    ),
    "weight twice": (
        lambda f, h, w, y: f(h, w, y, weight=w[:, 0]),
        r"takes the head's weight \(V, H\) .*Weights of classes are class_weight=",
    ),
    "a module": (
        lambda f, h, w, y: f(h, torch.nn.Linear(H, V), y),
        r"weight must be a tensor, got Linear: pass head\.weight",
    ),
    "an output": (
        lambda f, h, w, y: f(SimpleNamespace(last_hidden_state=h), w, y),
        r"got SimpleNamespace: pass output\.last_hidden_state",
    ),
    "an output with logits": (
        lambda f, h, w, y: f(SimpleNamespace(logits=h @ w.T, hidden_states=None), w, y),
        r"or output\.hidden_states\[-1\] of one called with output_hidden_states",
    ),
    "states of all layers": (
        lambda f, h, w, y: f((h, h), w, y),
        r"hidden must be a tensor, got tuple: pass the last of its tensors, hidden\[-1\]",
    ),
    "uint8 labels": (
        lambda f, h, w, y: f(h, w, y.to(torch.uint8)),
        r"torch\.uint8: pass labels\.long\(\)",
    ),
    "labels of floats": (lambda f, h, w, y: f(h, w, y.float()), r"indices, got torch.float32$"),
    "labels of floats, cut": (  # shapes first
        lambda f, h, w, y: f(h, w, y[:, :3].float()),
        "labels must have the leading shape",
    ),
    "dtypes differ": (
        lambda f, h, w, y: f(h, w.char(), y),
        r"weight must have the dtype of hidden torch.float32, or another of .*, got torch.int8",
    ),
    "labels are cut": (
        lambda f, h, w, y: f(h, w, y[:, 1:]),
        r"\(2, 5\), got \(2, 4\)\. .*pass both uncut, with fusedce.shift_labels\(labels\)",
    ),
    "hidden is cut": (
        lambda f, h, w, y: f(h[:, :-1], w, y),
        r"\(2, 4\), got \(2, 5\)\. .*pass both uncut, with fusedce.shift_labels\(labels\)",
    ),
    "labels are flat": (
        lambda f, h, w, y: f(h, w, y.reshape(-1)),
        r"got \(10,\)\. .*pass labels.reshape\(hidden.shape\[:-1\]\)",
    ),
    "hidden is flat": (
        lambda f, h, w, y: f(h.reshape(-1, H), w, y),
        r"got \(2, 5\)\. .*pass labels.reshape\(hidden.shape\[:-1\]\)",
    ),
    "numpy": (
        lambda f, h, w, y: f(h, w, y.numpy()),
        r"labels must be a tensor, got ndarray: pass torch.as_tensor\(labels\)",
    ),
    "a list": (
        lambda f, h, w, y: f(h, w, y.tolist()),
        r"labels must be a tensor, got list: pass torch.as_tensor\(labels\)",
    ),
    "sparse": (
        lambda f, h, w, y: f(h.detach().to_sparse(), w, y),
        r"hidden must be a dense tensor, got torch.sparse_coo",
    ),
    "nested": (
        lambda f, h, w, y: f(torch.nested.as_nested_tensor([h[0], h[1, :3]]), w, y),
        r"hidden must be a dense tensor, got a nested one",
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_common_mistake_gets_its_remedy(function, name):
    mistake, words = MISTAKES[name]
    with pytest.raises((TypeError, ValueError), match=words):
        mistake(function, *inputs(2, 5))


@pytest.mark.parametrize("function", [fused_ce, fused_logprobs])
def test_labels_that_are_probabilities_are_another_functions(function):
    hidden, weight, _ = inputs(4)
    with pytest.raises(TypeError, match=r"probabilities are labels of fused_cross_entropy"):
        function(hidden, weight, torch.rand(4, V))


@pytest.mark.parametrize("function", [fused_ce, fused_cross_entropy])
def test_one_hot_labels_are_named(function):
    hidden, weight, labels = inputs(2, 5)
    one_hot = torch.nn.functional.one_hot(labels, V)
    with pytest.raises(ValueError, match=r"labels look one-hot: pass labels\.argmax\(-1\)"):
        function(hidden, weight, one_hot)


def test_a_sum_is_not_formatted_as_a_number():
    out = fused_ce(*inputs(2, 5))
    with pytest.raises(TypeError, match=r"cannot be formatted by '\.3f'.*Use \.mean\(\)"):
        f"{out:.3f}"
    for text in (f"{out}", str(out), repr(2 * out)):
        assert "n_valid=tensor(10); .mean() is the loss per token" in text


def test_a_grad_scaler_gets_a_loss_and_no_sum():
    out = fused_ce(*inputs(2, 5))
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(TypeError, match=r"a LossSum has two fields.*scaler\.scale\(acc\.scale"):
        scaler.scale(out)
    assert scaler.scale(out.mean()).item() == pytest.approx(out.mean().item() * 2**16)


@pytest.mark.parametrize("name", ["loss", "detach", "cpu", "requires_grad"])
def test_what_a_loss_has_and_a_sum_has_not(name):
    out = fused_ce(*inputs(2, 5))
    with pytest.raises(AttributeError, match=rf"a LossSum has no {name}.*Use \.mean\(\)"):
        getattr(out, name)
    assert not hasattr(out, "shape")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [2**31, 2**40, -(2**40), V, -1])
def test_a_bad_label_is_named_with_its_own_value(backend, value):
    hidden, weight, labels = inputs(4)
    labels[2] = value
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match=f"got {value} at flattened position 2"):
            function(hidden, weight, labels, backend=backend)


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_argmax_out_that_shares_its_memory_is_named(backend):
    shared = torch.zeros(1, 5, dtype=torch.int64).expand(2, 5)
    with pytest.raises(ValueError, match="argmax_out must have memory of its own"):
        fused_ce(*inputs(2, 5), argmax_out=shared, backend=backend)
