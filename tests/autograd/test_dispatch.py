"""The way that each loss takes, and the number of calls of its backend."""

import pytest
import torch

import fusedce
from fusedce.autograd import dispatch, sums, tokens
from fusedce.backends.choose import get_backend


@pytest.fixture
def inputs():
    hidden = torch.randn(9, 6, requires_grad=True)
    return hidden, torch.randn(13, 6, requires_grad=True), torch.arange(9)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "softcap": 2.0}])
def test_the_backend_is_resolved_once_and_kept_in_backward(inputs, options, monkeypatch):
    """Backward runs where forward ran, whatever the default there would be."""
    resolved, used = [], []

    def resolve(backend, hidden):
        resolved.append(backend)
        return "torch"

    def backend_of(name):
        used.append(name)
        return get_backend(name)

    monkeypatch.setattr(dispatch, "resolve_backend", resolve)
    for module in (sums, tokens):
        monkeypatch.setattr(module, "get_backend", backend_of)
    out = fusedce.fused_ce(*inputs, backend=None, **options)
    (out.loss_sum * 3).backward()
    assert resolved == [None]
    assert len(used) > 1
    assert set(used) == {"torch"}


@pytest.mark.parametrize("grad", [True, False])
def test_argmax_comes_from_the_one_pass_there_is(inputs, grad, monkeypatch):
    argmax, strided = torch.full((9,), 7), torch.full((9, 2), 7)[:, 0]
    passes = []
    backend = get_backend("torch")

    def count(name):
        original = getattr(backend, name)

        def call(*arguments):
            passes.append(name)
            return original(*arguments)

        monkeypatch.setattr(backend, name, call)

    count("loss_and_grads")
    count("token_stats")
    with torch.set_grad_enabled(grad):
        for out in (argmax, strided):
            fusedce.fused_ce(*inputs, argmax_out=out)
    assert passes == ["loss_and_grads" if grad else "token_stats"] * 2
    hidden, weight, _ = inputs
    assert argmax.equal((hidden @ weight.T).argmax(-1))
    assert argmax.equal(strided)
