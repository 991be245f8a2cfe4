"""The module and the function in peers' order of arguments: the same loss by another import."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import EXACT

import fusedce
from fusedce import FusedLinearCrossEntropyLoss, fused_cross_entropy, linear_cross_entropy
from fusedce.testing import OPTIONS, cases

H, V = 8, 13


def inputs(*leading):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(*leading, H, generator=rng).requires_grad_()
    weight = torch.randn(V, H, generator=rng).requires_grad_()
    bias = torch.randn(V, generator=rng).requires_grad_()
    labels = torch.randint(V, leading, generator=rng)
    labels.view(-1)[1] = -100
    return hidden, weight, bias, labels


def test_the_modules_class_weights_move_with_it():
    module = FusedLinearCrossEntropyLoss(class_weight=torch.ones(V))
    assert module.to("meta").class_weight.device.type == "meta"
    assert not module.state_dict()
    assert "label_smoothing=0.0" in repr(module)


def assert_same_bits(got, expected):
    """NaN included: class weights that are all 0 have no mean."""
    torch.testing.assert_close(got, expected, **EXACT, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(
    case=cases(options=(*OPTIONS, "class_weight"), max_vocabulary=100),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    shift=st.sampled_from([False, True, 2, 3]),
)
def test_any_call_gives_the_bits_of_ours(case, reduction, shift):
    """The function and the module call ours: their values and gradients are the same bits."""
    hidden, weight, labels, bias = case.tensors()
    options = case.options | case.weights() | {"reduction": reduction, "backend": "torch"}
    shift = min(shift, max(labels.shape[-1] - 1, 0)) if labels.dim() else 0
    ignore_index = case.options.get("ignore_index", -100)

    def run(function):
        leaves = [x.detach().requires_grad_() for x in (hidden, weight, bias) if x is not None]
        loss = function(*leaves[:2], bias=leaves[2] if bias is not None else None)
        return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]

    def moved(h, w, bias):
        aligned, rest = labels, dict(options)
        if shift:
            aligned = fusedce.shift_labels(labels, offset=int(shift), ignore_index=ignore_index)
            if "token_weight" in rest:
                rest["token_weight"] = rest["token_weight"].roll(-int(shift), -1)
        loss = fused_cross_entropy(h, w, aligned, bias=bias, **rest)
        return loss.roll(int(shift), -1) if reduction == "none" and shift else loss

    def peers(h, w, bias):
        return linear_cross_entropy(h, w, labels, bias=bias, shift=shift, **options)

    def module(h, w, bias):
        rest = {k: v for k, v in options.items() if k != "token_weight"}
        loss = FusedLinearCrossEntropyLoss(**rest)
        return loss(w, h, labels, bias, token_weight=options.get("token_weight"))

    hidden = hidden.nan_to_num()  # a shift makes other positions the ignored ones
    for got, expected in zip(run(peers), run(moved), strict=True):
        assert_same_bits(got, expected)
    if not shift:
        for got, expected in zip(run(module), run(moved), strict=True):
            assert_same_bits(got, expected)


def test_a_shift_that_cannot_be():
    hidden, weight, _, labels = inputs(2, 6)
    for shift in (-1, 6):
        with pytest.raises(ValueError, match=r"shift must be in \[0, T\) with T=6"):
            linear_cross_entropy(hidden, weight, labels, shift=shift)
    with pytest.raises(ValueError, match="ignore_index must be an int with shift"):
        linear_cross_entropy(hidden, weight, labels.clamp(min=0), shift=1, ignore_index=None)
