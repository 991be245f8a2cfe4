"""Micro-batches that fail, are not differentiated, or are computed twice: right, or an error."""

import pytest
import torch
from support.bounds import EXACT, SAME_SUMS
from support.loops import (
    batches,
    distance,
    new_weight,
    out_of,
    run_streaming,
    run_window,
    weight_and_grad,
    windowed,
)
from torch.utils.checkpoint import checkpoint

from fusedce import LossAccumulator, fused_ce

WAYS = pytest.mark.parametrize("streaming", [False, True], ids=["window", "streaming"])


@pytest.mark.parametrize("by_hand", [False, True], ids=["acc.backward", "scale"])
@WAYS
def test_after_a_backward_that_raised_the_window_is_refused(streaming, by_hand):
    micro = batches([3, 5])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()

    def loop(more=True):
        for i, one in enumerate(micro[: 1 + more]):
            out = out_of(weight, one, fails=not i)
            backward = acc.scale(out).backward if by_hand else lambda out=out: acc.backward(out)
            if i:
                backward()
            else:
                with pytest.raises(ZeroDivisionError):
                    backward()

    for more in (True, False):  # noticed at the next micro-batch, or at the window's end
        sizes = [3, 5] if more else [3]
        with pytest.raises(RuntimeError, match="can only be dropped: a backward has raised"):
            windowed(acc, streaming, weight, sizes, lambda more=more: loop(more))
        acc.discard_window()
        weight.grad = None
    (run_streaming if streaming else run_window)(acc, weight, micro)
    assert distance(weight.grad, exact) <= SAME_SUMS
    assert acc.metrics()["n_tokens"] == 8


def test_a_later_backward_does_not_heal_one_that_raised():
    weight, acc = new_weight(), LossAccumulator()
    scaled = [acc.scale(out_of(weight, one, not i)) for i, one in enumerate(batches([3, 5]))]
    with pytest.raises(ZeroDivisionError):
        scaled[0].backward()
    scaled[1].backward()
    with pytest.raises(RuntimeError, match="can only be dropped"):
        acc.finish([weight])


@WAYS
def test_a_loss_that_is_never_differentiated_does_not_count(streaming):
    micro = batches([3, 5])
    weight, exact, _ = weight_and_grad(micro[1:])
    acc = LossAccumulator()

    def loop():
        acc.scale(out_of(weight, micro[0]))  # dropped
        acc.backward(out_of(weight, micro[1]))

    if streaming:
        windowed(acc, streaming, weight, None, loop)
        assert distance(weight.grad, exact) <= SAME_SUMS
        assert acc.metrics()["n_tokens"] == 5
    else:
        with pytest.raises(RuntimeError, match=r"2 .* were declared, 1 differentiated \(1 more"):
            windowed(acc, streaming, weight, [3, 5], loop)


def together(acc, weight, micro):
    first, second, third = (acc.scale(out_of(weight, one)) for one in micro)
    (first + third + second).backward()


def checkpointed(acc, weight, micro, reentrant=False):
    """The loss is computed twice."""
    for one in micro:
        checkpoint(
            lambda w, one=one: acc.scale(out_of(w, one)), weight, use_reentrant=reentrant
        ).backward()


def checkpointed_reentrant(acc, weight, micro):
    checkpointed(acc, weight, micro, reentrant=True)


@pytest.mark.parametrize("loop", [together, checkpointed, checkpointed_reentrant])
@WAYS
def test_each_loss_counts_once_in_the_order_of_scale(streaming, loop):
    micro = batches([3, 5, 2])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    windowed(acc, streaming, weight, [3, 5, 2], lambda: loop(acc, weight, micro))
    assert distance(weight.grad, exact) <= SAME_SUMS
    assert acc.metrics()["n_tokens"] == 10


@pytest.mark.parametrize("counts", [None, [3, 1], [3]])
def test_a_loss_differentiated_twice_counts_twice(counts):
    weight, exact, _ = weight_and_grad(batches([3]))
    acc = LossAccumulator()

    def loop():
        scaled = acc.scale(out_of(weight, batches([3])[0]))
        scaled.backward(retain_graph=True)
        scaled.backward()

    if counts is None:
        windowed(acc, True, weight, None, loop)
        assert distance(weight.grad, exact) <= SAME_SUMS  # both of them, over twice the tokens
        assert acc.metrics()["n_tokens"] == 6
    else:  # it is named as a cause
        with pytest.raises(RuntimeError, match=r"differentiated twice .*counts twice"):
            windowed(acc, False, weight, counts, loop)


def test_a_loss_of_a_window_that_was_closed_is_refused():
    micro, weight, acc = batches([3, 2]), new_weight(), LossAccumulator()
    late = acc.scale(out_of(weight, micro[0]))
    acc.backward(out_of(weight, micro[1]))
    acc.finish([weight])
    before = weight.grad.clone()
    with pytest.raises(RuntimeError, match="after the window that has scaled it was closed"):
        late.backward()
    torch.testing.assert_close(weight.grad, before, **EXACT)


def test_gradients_of_inputs_alone_are_no_training():
    """A pipeline runs such a backward to learn shapes."""
    weight, acc = torch.nn.Parameter(new_weight().detach()), LossAccumulator()
    hidden, labels = batches([3])[0]
    hidden.requires_grad_()
    torch.autograd.grad(acc.scale(fused_ce(hidden, weight, labels)), hidden)
    with pytest.raises(RuntimeError, match="nothing to finish"):
        acc.finish([weight])
