"""Windows in one process: equal to the big batch."""

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import EXACT, SAME_SUMS, STATISTIC
from support.coverage import covered
from support.loops import (
    H,
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

from fusedce import LossAccumulator, count_valid, fused_ce, shift_labels
from fusedce.accumulate import faults as _faults
from fusedce.contract.labels import bad_label_code

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
    covered("LossAccumulator", run.__name__)
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
def test_neither_training_nor_evaluation_reports_a_mean_of_means(run):
    """transformers#35204, #39241, #41898, axolotl#2262, LlamaFactory#7443, Liger-Kernel#802."""
    micro = batches([1, 20, 3, 8])
    weight, _, exact = weight_and_grad(micro)
    losses = [out_of(weight, one).mean().item() for one in micro]
    assert abs(sum(losses) / len(losses) - exact) > 0.05
    acc, evaluation = LossAccumulator(), LossAccumulator()
    run(acc, weight, micro)
    for one in micro:
        evaluation.add(out_of(weight.detach(), one))
    for m in (acc.metrics(), evaluation.metrics()):
        assert m["loss"] == pytest.approx(exact, rel=STATISTIC)


def test_auxiliary_loss_is_divided_by_micro_batches():
    micro = batches([4, 9])
    weight, exact, _ = weight_and_grad(micro)
    acc, extra = LossAccumulator(), torch.zeros(3, requires_grad=True)
    with acc.window([4, 9]):
        for i, one in enumerate(micro):
            acc.add_auxiliary((extra * (i + 1)).sum())
            acc.backward(out_of(weight, one))
    assert distance(weight.grad, exact) <= SAME_SUMS
    torch.testing.assert_close(extra.grad, torch.full((3,), 1.5))


@RUNS
def test_nothing_waits_for_the_device_until_metrics_are_read(run, monkeypatch):
    """Nothing reads a tensor's value: the test double reports reads, which on a GPU would wait."""
    looks = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def look(self, *args, _name=name, _original=original, **kwargs):
            looks.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, look)
    monkeypatch.setattr(_faults, "readable", lambda device: False)
    weight, micro = new_weight(), batches([4, 0, 9])
    outs = [((h @ weight.T).sum(), (y != -100).sum()) for h, y in micro]  # these read no count
    counts = [count_valid(y, offset=0) for _, y in micro]
    looks.clear()
    acc = LossAccumulator()
    for _ in range(2):
        weight.grad = None
        windowed(
            acc, run is run_streaming, weight, counts,
            lambda: sum(acc.scale(out) for out in outs).backward(retain_graph=True),
        )  # fmt: skip
    evaluation = LossAccumulator()
    evaluation.add(outs[0])
    assert looks == []
    assert acc.metrics()["n_tokens"] == 2 * 13
    assert evaluation.metrics()["n_tokens"] == 4
    assert looks  # the test double reports reads
    looks.clear()
    LossAccumulator(on_empty="skip").window(counts).__enter__()
    assert looks  # documented: this choice reads the count


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


@RUNS
def test_training_and_evaluation_are_not_mixed(run):
    acc, weight = LossAccumulator(), new_weight()
    assert math.isnan(acc.metrics()["loss"])  # of nothing yet
    run(acc, weight, batches([3, 5]))
    with pytest.raises(RuntimeError, match=r"add: the metrics hold 1 training windows .*reset="):
        acc.add(a_loss(2))
    training = acc.metrics(reset=True)
    acc.add(a_loss(2))
    evaluation = acc.metrics()
    with pytest.raises(RuntimeError, match=r"batches that were added for evaluation"):
        run(acc, weight, batches([3, 5]))
    assert acc.metrics(reset=True) == evaluation
    run(acc, weight, batches([3, 5]))
    assert training["n_tokens"] == acc.metrics()["n_tokens"] == 8
    assert evaluation["n_tokens"] == 2


# ---- micro-batches, and where a window begins and ends ------------------------------------------


@pytest.mark.parametrize(
    ("declared", "sizes", "words"),
    [
        ([2], [2, 2], "1 micro-batches were declared, this is number 2"),
        ([2, 2], [2], "2 micro-batches were declared, 1 differentiated"),
        ([3], [2], "declared with 3 valid tokens, its loss counts 2"),
    ],
)
def test_other_micro_batches_than_declared(declared, sizes, words):
    acc, weight = LossAccumulator(), new_weight()
    with pytest.raises(RuntimeError, match=words):
        with acc.window(declared):
            for one in batches(sizes):
                acc.backward(out_of(weight, one))
    assert acc.metrics()["n_windows"] == 0
    _, exact, _ = weight_and_grad(batches(sizes[: len(declared)]))
    if len(sizes) > len(declared):  # refused before its gradient
        assert distance(weight.grad, exact) <= SAME_SUMS


def test_counted_before_the_shift():
    """transformers#46204: a causal model trains T - 1 of T tokens. 8 rows: 201 for 193."""
    lengths = [40, 33, 12, 30, 25, 41, 9, 11]
    labels = torch.full((8, 41), -100)
    for row, length in zip(labels, lengths, strict=True):
        row[:length] = torch.arange(length) % V
    naive = int((labels != -100).sum())
    assert (naive, int(count_valid(labels))) == (201, 193)

    hidden, weight = torch.randn(8, 41, H), new_weight()
    out = fused_ce(hidden, weight, shift_labels(labels))
    exact = F.cross_entropy(
        (hidden[:, :-1] @ weight.T).flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    ).item()
    assert out.loss_sum.item() / naive < 0.97 * exact
    acc = LossAccumulator()
    with pytest.raises(RuntimeError, match=r"declared with 201 .* counts 193\. .*shift_labels"):
        with acc.window([naive]):  # the same mistake is an error here
            acc.backward(out)
    with acc.window([count_valid(labels)]):
        acc.backward(fused_ce(hidden, weight, shift_labels(labels)))
    assert acc.metrics()["loss"] == pytest.approx(exact, rel=STATISTIC)


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


def test_a_window_is_entered_and_once():
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
    with window:
        acc.backward(a_loss(2, weight))
    with pytest.raises(RuntimeError, match="this window was entered before"):
        window.__enter__()
    run_window(acc, weight, batches([2]))
    assert acc.metrics()["n_tokens"] == 4


def test_one_thread():
    acc, weight = LossAccumulator(), new_weight()
    acc.backward(a_loss(2, weight))
    caught = []

    def other():
        with pytest.raises(RuntimeError, match="one thread, make one for each") as e:
            acc.backward(a_loss(2, weight))
        caught.append(e)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(caught) == 1
    acc.finish([weight])


def test_errors_on_a_device_wait_until_something_is_read(monkeypatch):
    """The test double forbids early reads of CPU tensors, which on a GPU would wait."""
    poisoned = (torch.tensor(float("nan")), torch.tensor(bad_label_code(5, 99)))
    monkeypatch.setattr(_faults, "readable", lambda device: False)
    acc = LossAccumulator()
    with acc.window([3, 2]):
        acc.backward(a_loss(2))  # 3 were declared
        acc.backward(a_loss(2))
    with acc.window([2]):  # the second error does not hide the first
        acc.backward((poisoned[0].requires_grad_(), poisoned[1]))
    with pytest.raises(RuntimeError, match=r"micro-batch 0 was declared with 3 .* counts 2"):
        acc.metrics(reset=True)
    acc = LossAccumulator()
    acc.add(poisoned)
    with pytest.raises(ValueError, match="got 99 at flattened position 5"):
        acc.state_dict()
    assert acc.metrics()["n_windows"] == 0  # reported once
