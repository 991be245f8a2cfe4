"""An error of one rank is raised on all ranks soon, with the same message."""

import functools
import sys

import pytest
import torch
from support import ranks
from support.loops import a_loss, new_weight, raising, warm_up

from fusedce import LossAccumulator
from fusedce.accumulate import faults as _faults
from fusedce.agreement import Told, failure_of


def train(acc, counts, sizes=None, weight=None):
    with acc.window(counts):
        for n in sizes or counts:
            acc.backward(a_loss(n, weight))


def stream(acc, sizes, weight):
    for n in sizes:
        acc.backward(a_loss(n, weight))
    acc.finish([weight])


def then_goes_on(acc):
    """Run a window after the error, which shows that the ranks are still in step."""
    weight = new_weight()
    train(acc, [3], weight=weight)
    return float(weight.grad.norm())


def case(f):
    """``(error, seconds, norm of a gradient of a window that follows)``."""

    @functools.wraps(f)
    def run(rank):
        acc = LossAccumulator()
        error, seconds = ranks.timed(f, acc, rank)
        acc.discard_window()
        return error, seconds, then_goes_on(LossAccumulator())

    return run


@case
def bad_counts(acc, rank):
    train(acc, [2, -1] if rank else [2, 2])


@case
def bad_counts_everywhere(acc, rank):
    train(acc, [2, -1])


def other_bad_counts(rank):
    counts = [2, 2, 2]
    counts[1 + rank] = -1
    with pytest.raises(ValueError, match="counts") as raised:
        train(LossAccumulator(), counts)
    return f"ValueError: {raised.value}", getattr(raised.value, "__notes__", [])


@case
def no_counts(acc, rank):
    train(acc, [2] if rank else [])


@case
def micro_batches_declared(acc, rank):
    train(acc, [1] * (rank + 1))


@case
def reads_metrics(acc, rank):
    if rank:
        acc.metrics()
    else:
        train(acc, [3])


@case
def finishes(acc, rank):
    weight = new_weight()
    if rank:
        acc.finish([weight])
    else:
        stream(acc, [3], weight)


@case
def metrics_in_a_window(acc, rank):
    if rank:
        with acc.window([2, 2]):
            acc.backward(a_loss(2))
            acc.metrics()
    else:
        train(acc, [2, 2])


@case
def metrics_while_streaming(acc, rank):
    if rank:
        acc.backward(a_loss(2))
    acc.metrics()


@case
def raises_in_a_window(acc, rank):
    with acc.window([2, 2]):
        acc.backward(a_loss(2))
        if rank:
            raise ZeroDivisionError("a bug in the loop")
        acc.backward(a_loss(2))


@case
def raises_before_the_first(acc, rank):
    with acc.window([2, 2]):
        if rank:
            raise ZeroDivisionError("a bug in the loop")
        acc.backward(a_loss(2))
        acc.backward(a_loss(2))


@case
def other_count(acc, rank):
    train(acc, [2, 2 + rank], [2, 2])


@case
def other_faults(acc, rank):
    train(acc, [2, 3 + 2 * rank], [2, 2])


@case
def fewer_than_declared(acc, rank):
    train(acc, [2, 2], [2] * (2 - rank))


@case
def more_than_declared(acc, rank):
    train(acc, [2, 2], [2] * (2 + rank))


@case
def bad_label(acc, rank):
    with acc.window([2]):
        loss_sum, n_valid = a_loss(2)
        code = torch.tensor(-1 - ((5 << 32) | (99 + 2**31)))
        acc.backward((loss_sum, code if rank else n_valid))


@case
def bad_label_in_evaluation(acc, rank):
    code = torch.tensor(-1 - ((5 << 32) | (99 + 2**31)))
    acc.add((torch.tensor(1.0), code if rank else torch.tensor(3)))
    acc.metrics()


@case
def backward_raised_on_one(acc, rank):
    weight = new_weight()
    for i in range(2):
        if rank and i:
            with pytest.raises(ZeroDivisionError):
                acc.backward(raising(a_loss(2, weight)))
        else:
            acc.backward(a_loss(2, weight))
    acc.finish([weight])


@case
def finish_without_parameters(acc, rank):
    weight = new_weight()
    acc.backward(a_loss(2, weight))
    acc.finish([] if rank else [weight])


def settings(rank):
    """Pairs of accumulators that do not fit."""
    pairs = {
        "grad_reduction": ({"grad_reduction": "mean"}, {"grad_reduction": "sum"}),
        "on_empty": ({"on_empty": "zero"}, {"on_empty": "skip"}),
        "backward_divisor": ({"backward_divisor": 1}, {"backward_divisor": 2.5}),
    }
    found = {}
    for name, kwargs in pairs.items():
        found[name] = ranks.timed(train, LossAccumulator(**kwargs[rank]), [2])
        acc = LossAccumulator(**kwargs[rank])
        found[f"{name}, streaming"] = ranks.timed(stream, acc, [2], new_weight())
        acc = LossAccumulator(**kwargs[rank])
        found[f"{name}, metrics"] = ranks.timed(acc.metrics)
    found["losses"] = ranks.timed(
        LossAccumulator().window({"a": [1], ("b", "c")[rank]: [1]}).__enter__().scale,
        {"a": a_loss(1), ("b", "c")[rank]: a_loss(1)},
    )
    window = LossAccumulator().window({"a": [1]}, weights={"a": 1 + rank})
    found["weights"] = ranks.timed(window.__enter__().scale, {"a": a_loss(1)})
    return found


def on_a_device(rank):
    """The test double forbids reading values of CPU tensors, which on a GPU would wait."""
    readable, _faults.readable = _faults.readable, lambda device: False
    try:
        acc = LossAccumulator()
        train(acc, [2 + rank], [2])
        counted = ranks.error_of(acc.metrics)
        acc.metrics(reset=True)
        acc = LossAccumulator()
        with acc.window([2] * (rank + 1)):
            for _ in range(rank + 1):
                acc.backward(a_loss(2))
        differ = ranks.error_of(acc.metrics)
        acc = LossAccumulator()
        counts = [2.5] if rank else [2]
        left = ranks.error_of(train, acc, counts, [2])
        if not rank:
            left = left or ranks.error_of(acc.metrics)
    finally:
        _faults.readable = readable
    return counted, differ, left


RAISES = {
    bad_counts: "ValueError: counts[1] must be >= 0, got -1",
    bad_counts_everywhere: "ValueError: counts[1] must be >= 0, got -1",
    no_counts: "ValueError: counts must hold one number per micro-batch, got none at all",
    micro_batches_declared: "ranks have different numbers of micro-batches in this window: 1 on "
    "rank 0, 2 on rank 1",
    reads_metrics: "at different places, 1 to open a window, 1 to read metrics",
    finishes: "finish: no micro-batch since the last one: nothing to finish",
    metrics_in_a_window: "cannot read metrics inside a window: 1 of 2 declared",
    metrics_while_streaming: "cannot read metrics: 1 micro-batches since the last finish() are",
    other_count: "micro-batch 1 was declared with 3 valid tokens, its loss counts 2",
    other_faults: "micro-batch 1 was declared with 3 valid tokens, its loss counts 2",
    fewer_than_declared: "2 micro-batches were declared, 1 differentiated",
    bad_label: "ValueError: labels must hold class indices in 0 <= label < V, or ignore_index: "
    "got 99 at flattened position 5",
    bad_label_in_evaluation: "got 99 at flattened position 5",
    backward_raised_on_one: "this window can only be dropped: a backward has raised",
    finish_without_parameters: "parameters: no parameter given has a .grad",
}
# Rank 1 raises its own error, the other one hears of it.
TOLD = {
    raises_in_a_window: "ZeroDivisionError: a bug in the loop",
    raises_before_the_first: "ZeroDivisionError: a bug in the loop",
    more_than_declared: "2 micro-batches were declared, this is number 3",
}


QUICK = (*TOLD, other_bad_counts, settings, on_a_device)


@functools.cache
def results(slow=False):
    return ranks.run({f.__name__: f for f in (warm_up, *(RAISES if slow else QUICK))})


@pytest.mark.parametrize("f", RAISES, ids=lambda f: f.__name__)
def test_all_ranks_raise_the_same(f):
    (a, fast, after), (b, fast_too, _) = ranks.of(results(slow=True), f.__name__)
    assert ranks.anywhere(a) == ranks.anywhere(b)
    assert RAISES[f] in a
    assert max(fast, fast_too) < ranks.SOON
    assert after > 0


@pytest.mark.parametrize("f", TOLD, ids=lambda f: f.__name__)
def test_the_other_rank_is_told(f):
    (told, fast, after), (own, fast_too, _) = ranks.of(results(), f.__name__)
    assert TOLD[f] in own
    assert told.removeprefix("RuntimeError: ") == f"{own.removeprefix('RuntimeError: ')} " + (
        "(on rank 1)"
    )
    assert max(fast, fast_too) < ranks.SOON
    assert after > 0


def test_two_ranks_with_different_errors_raise_their_own_and_note_the_other():
    for rank, (raised, notes) in enumerate(ranks.of(results(), "other_bad_counts")):
        assert raised == f"ValueError: counts[{1 + rank}] must be >= 0, got -1"
        other = f"ValueError: counts[{2 - rank}] must be >= 0, got -1 (on rank {1 - rank})"
        assert notes == [f"another rank has failed, too: {other}"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes from Python 3.11 on")
def test_a_rank_without_an_error_raises_the_first_and_notes_the_others():
    words = ["", "ValueError: a (on rank 1)", "KeyError: b (on rank 2)"]
    error = failure_of(Told({}, e, []) for e in words)
    assert type(error) is ValueError
    assert str(error) == "a (on rank 1)"
    assert error.__notes__ == ["another rank has failed, too: KeyError: b (on rank 2)"]


def test_settings_that_differ():
    same = "must be the same on all ranks: it is"
    words = {
        "grad_reduction": f"grad_reduction {same} 'mean' on 1 and 'sum' on 1 of the 2 ranks",
        "on_empty": f"on_empty {same} 'zero' on 1 and 'skip' on 1 of the 2 ranks",
        "backward_divisor": f"backward_divisor {same} 1 on 1 and 2.5 on 1 of the 2 ranks",
        "losses": "the ranks' windows hold different losses",
        "weights": "the ranks' windows hold different losses",
    }
    a, b = ranks.of(results(), "settings")
    for name in a:
        assert a[name][0] == b[name][0]
        assert words[name.partition(",")[0]] in a[name][0]
        assert max(a[name][1], b[name][1]) < ranks.SOON


def test_on_a_device_it_is_raised_where_metrics_are_read():
    a, b = ranks.of(results(), "on_a_device")
    assert a[:2] == b[:2]
    assert "micro-batch 0 was declared with 3 valid tokens, its loss counts 2" in a[0]
    assert "different numbers of micro-batches in this window: 1 on rank 0, 2 on rank 1" in a[1]
    for left in (a[2], b[2]):
        assert "TypeError: counts[0] must be an integer" in left
