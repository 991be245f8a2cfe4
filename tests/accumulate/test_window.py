"""Windows in one process equal the big batch, or are refused.

Micro-batches may fail, never be differentiated, or be computed twice.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import EXACT, SAME_SUMS, STATISTIC
from support.loops import (
    V,
    a_loss,
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

from fusedce import LossAccumulator, LossMeter, LossSum, count_valid, fused_ce

WAYS = pytest.mark.parametrize("streaming", [False, True], ids=["window", "streaming"])
RUNS = pytest.mark.parametrize("run", [run_window, run_streaming])


# ---- right --------------------------------------------------------------------------------------


@st.composite
def epochs(draw):
    """Windows of micro-batches of valid tokens: the last window of an epoch may be shorter."""
    accumulation = draw(st.integers(1, 6), label="accumulation steps")
    windows = []
    for _ in range(draw(st.integers(1, 3), label="epochs")):
        sizes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=2 * accumulation))
        windows += [sizes[i : i + accumulation] for i in range(0, len(sizes), accumulation)]
    return windows


@RUNS
@settings(max_examples=40, deadline=None)
@given(windows=epochs())
def test_any_split_is_the_big_batch(run, windows):
    acc = LossAccumulator()
    tokens, losses = 0, 0.0
    for i, sizes in enumerate(windows):
        micro = batches(sizes, i)
        weight, exact, loss = weight_and_grad(micro)
        run(acc, weight, micro)
        assert distance(weight.grad, exact) <= SAME_SUMS
        tokens, losses = tokens + sum(sizes), losses + loss * sum(sizes)
    m = acc.metrics()
    assert (m["n_tokens"], m["n_windows"]) == (tokens, len(windows))
    if tokens:
        assert m["loss"] == pytest.approx(losses / tokens, rel=STATISTIC)
        assert m["perplexity"] == pytest.approx(math.exp(m["loss"]))
    else:
        assert math.isnan(m["loss"])


@RUNS
def test_the_host_reads_a_windows_numbers_at_its_end_alone(run, monkeypatch):
    """The test double reports reads of values, each of which on a GPU would wait."""
    looks = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def look(self, *args, _name=name, _original=original, **kwargs):
            looks.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, look)
    weight, micro = new_weight(), batches([4, 0, 9])
    outs = [((h @ weight.T).sum(), (y != -100).sum()) for h, y in micro]  # these read no count
    counts = [int(count_valid(y, offset=0)) for _, y in micro]
    acc, meter = LossAccumulator([weight]), LossMeter()

    def loop():
        for out in outs:
            acc.backward(out)
            looks.clear() if out is outs[0] else None  # the message of the window's opening
        assert looks == []

    windowed(acc, run is run_streaming, None, counts, loop)
    assert looks
    looks.clear()
    meter.update(outs[0])
    assert looks == []
    assert acc.metrics()["n_tokens"] == 13
    assert looks == []
    assert meter.compute()["n_tokens"] == 4
    assert looks


def test_on_empty():
    with pytest.raises(RuntimeError, match="no valid token"):
        with LossAccumulator(on_empty="raise").window([0]):
            pass
    acc, weight = LossAccumulator(on_empty="skip"), new_weight()
    for sizes in ([0], [2]):
        for run in (run_window, run_streaming):
            run(acc, weight, batches(sizes))
            assert acc.should_step == bool(sizes[0])
            # An optimizer with momentum would move on a gradient of zeros.
            assert (weight.grad is None) == (not sizes[0] and run is run_streaming)
    run_streaming(LossAccumulator(), weight, batches([0, 0]))
    torch.testing.assert_close(weight.grad, torch.zeros(V, 8), **EXACT)


# ---- micro-batches, and where a window begins and ends ------------------------------------------


def test_what_needs_a_closed_window():
    acc, weight = LossAccumulator(), new_weight()
    acc.backward(a_loss(2, weight))
    for action in (acc.metrics, acc.state_dict, lambda: acc.window([1]).__enter__()):
        with pytest.raises(RuntimeError, match="1 micro-batches since the last finish"):
            action()
    acc.discard_window()
    with acc.window([2]):
        acc.backward(a_loss(2, weight))
        for action, words in (
            (lambda: acc.finish([weight]), "finish is for streaming"),
            (acc.discard_window, "leave the `with` block"),
            (lambda: acc.window([2]).__enter__(), "1 of 1 declared micro-batches"),
        ):
            with pytest.raises(RuntimeError, match=words):
                action()
    assert acc.metrics(reset=True)["n_tokens"] == 2
    with pytest.raises(ZeroDivisionError):
        with acc.window([2]):
            acc.backward(a_loss(2, weight))
            raise ZeroDivisionError
    assert acc.metrics()["n_tokens"] == 0


def test_a_window_is_entered():
    acc, weight = LossAccumulator(), new_weight()
    for use in (
        lambda: acc.backward(a_loss(2, weight)),
        lambda: acc.finish([weight]),
        acc.metrics,
        acc.state_dict,
    ):
        window = acc.window([2])
        with pytest.raises(RuntimeError, match=r"not entered: write `with acc.window\(counts\):`"):
            use()
        acc.discard_window()
    for _ in range(2):  # the same counts again
        weight.grad = None
        with window:
            acc.backward(a_loss(2, weight))
    run_window(acc, weight, batches([2]))
    assert acc.metrics()["n_tokens"] == 6


# ---- micro-batches that fail, are not differentiated, or are computed twice ----------------------


@pytest.mark.parametrize("last", [False, True])
@WAYS
def test_a_loss_that_is_never_differentiated_is_named(streaming, last):
    micro, weight = batches([3, 5]), new_weight()
    acc = LossAccumulator()

    def loop():
        for i, one in enumerate(micro):
            if i == last:
                acc.scale(out_of(weight, one))  # dropped
            else:
                acc.backward(out_of(weight, one))

    words = "1 of 2 losses were passed to scale.*and no backward"
    if not streaming:
        words = r"2 .* were declared, 1 differentiated \(1 more scaled"
    with pytest.raises(RuntimeError, match=words):
        windowed(acc, streaming, weight, [3, 5], loop)
    acc.discard_window()
    weight.grad = None
    windowed(acc, streaming, weight, [3], lambda: acc.backward(out_of(weight, micro[0])))
    assert acc.metrics()["n_tokens"] == 3


def test_a_loss_more_than_declared_is_named():
    micro, weight, acc = batches([3, 5]), new_weight(), LossAccumulator()
    with pytest.raises(RuntimeError, match="1 of 2 losses were passed to scale"):
        with acc.window([5]):
            acc.scale(out_of(weight, micro[0]))
            acc.backward(out_of(weight, micro[1]))


def together(acc, weight, micro):
    first, second, third = (acc.scale(out_of(weight, one)) for one in micro)
    (first + third + second).backward()


def checkpointed(reentrant, acc, weight, micro):
    """The loss is computed twice."""
    for one in micro:
        checkpoint(
            lambda w, one=one: acc.scale(out_of(w, one)), weight, use_reentrant=reentrant
        ).backward()


@pytest.mark.parametrize(
    "loop", [together, partial(checkpointed, False), partial(checkpointed, True)]
)
@WAYS
def test_each_loss_counts_once_in_the_order_of_scale(streaming, loop):
    micro = batches([3, 5, 2])
    weight, exact, _ = weight_and_grad(micro)
    acc = LossAccumulator()
    windowed(acc, streaming, weight, [3, 5, 2], lambda: loop(acc, weight, micro))
    assert distance(weight.grad, exact) <= SAME_SUMS
    assert acc.metrics()["n_tokens"] == 10


def in_halves(loss, weights):
    loss.backward(inputs=weights[:1], retain_graph=True)
    loss.backward(inputs=weights[1:])


def as_gradients(loss, weights):
    for weight, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


def probed(loss, weights):
    torch.autograd.grad(loss, weights, retain_graph=True)
    loss.backward()


def with_a_graph(loss, weights):
    loss.backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("backward", [in_halves, probed, with_a_graph])
@WAYS
def test_every_way_to_differentiate_a_loss_is_right(streaming, backward):
    """It counts once, when a backward first adds to gradients."""
    micro = batches([3, 5])
    weights = [new_weight(), torch.ones(1, requires_grad=True)]
    acc = LossAccumulator(weights)

    def loss(one):
        logits = one[0] @ (weights[0] * weights[1]).T  # fused_ce has no second derivative
        return LossSum(F.cross_entropy(logits, one[1], reduction="sum"), (one[1] >= 0).sum())

    exact = torch.autograd.grad(sum(loss(one) for one in micro).mean(), weights)

    def loop():
        for one in micro:
            backward(acc.scale(loss(one)), weights)

    windowed(acc, streaming, None, [3, 5], loop)
    for weight, grad in zip(weights, exact, strict=True):
        assert distance(weight.grad, grad) <= SAME_SUMS
    assert acc.metrics()["n_tokens"] == 8


@WAYS
def test_gradients_that_are_added_by_hand_need_an_accumulator_that_does_not_watch(streaming):
    weight, micro = new_weight(), batches([3, 5])
    _, exact, _ = weight_and_grad(micro)
    for watch in (False, True):
        weight.grad = None
        acc = LossAccumulator([weight], watch=watch)

        def loop(acc=acc):
            for one in micro:
                as_gradients(acc.scale(out_of(weight, one)), [weight])

        if watch:
            with pytest.raises(RuntimeError, match="no backward has added their gradients"):
                windowed(acc, streaming, None, [3, 5], loop)
        else:
            windowed(acc, streaming, None, [3, 5], loop)
            assert distance(weight.grad, exact) <= SAME_SUMS


def test_a_loss_of_a_window_that_was_closed_is_refused():
    micro, weight, acc = batches([3, 2]), new_weight(), LossAccumulator()
    late = acc.scale(out_of(weight, micro[0]))
    acc.backward(out_of(weight, micro[1]))
    acc.discard_window()
    before = weight.grad.clone()
    with pytest.raises(RuntimeError, match="after the window that has scaled it was closed"):
        late.backward()
    torch.testing.assert_close(weight.grad, before, **EXACT)


def test_gradients_of_inputs_alone_are_no_training():
    weight = new_weight()
    acc, (hidden, labels) = LossAccumulator([weight]), batches([3])[0]
    hidden.requires_grad_()
    torch.autograd.grad(acc.scale(fused_ce(hidden, weight, labels)), hidden)
    with pytest.raises(RuntimeError, match=r"torch.autograd.grad adds none"):
        acc.finish()
