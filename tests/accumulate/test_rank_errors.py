"""An error of one rank is raised on all ranks soon, in the same words, and they stay in step."""

import copy
import functools
import time

import pytest
import torch
from support import parallel, ranks
from support.loops import a_loss, batches, new_weight, raising, run_streaming, run_window, warm_up
from support.versions import FSDP2_MEAN
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator
from fusedce.accumulate import faults as _faults
from fusedce.contract.labels import bad_label_code

TIMEOUT, LATE = 4, 20  # seconds of a group's timeout where a rank never comes, and of a case


def train(acc, counts, sizes=None, weight=None):
    with acc.window(counts):
        for n in sizes or counts:
            acc.backward(a_loss(n, weight))


def stream(acc, sizes, parameters=None):
    weight = new_weight()
    for n in sizes:
        acc.backward(a_loss(n, weight))
    acc.finish([weight] if parameters is None else parameters)


def fails_inside(acc, after):
    with acc.window([2, 2]):
        for _ in range(after):
            acc.backward(a_loss(2))
        raise ZeroDivisionError("a bug in the loop")


def reads(acc):
    acc.metrics()


def reads_inside(acc):
    with acc.window([2, 2]):
        acc.backward(a_loss(2))
        acc.metrics()


def reads_while_streaming(acc):
    acc.backward(a_loss(2))
    acc.metrics()


def backward_raises(acc):
    weight = new_weight()
    acc.backward(a_loss(2, weight))
    with pytest.raises(ZeroDivisionError):
        acc.backward(raising(a_loss(2, weight)))
    acc.finish([weight])


def divides(acc):
    with acc.window([2, 2]):
        for _ in range(2):
            (acc.scale(a_loss(2)) / 4).backward()


def bad_label(acc, evaluates=False):
    out = torch.tensor(1.0, requires_grad=True), torch.tensor(bad_label_code(5, 99))
    if evaluates:
        acc.add(out)
        acc.metrics()
    else:
        with acc.window([2]):
            acc.backward(out)


def evaluates(acc):
    acc.add((torch.tensor(1.0), torch.tensor(3)))
    acc.metrics()


def right(acc):
    train(acc, [2, 2])


def streams(acc):
    stream(acc, [2, 2])


def one(acc):
    train(acc, [2])


# What rank 1 does wrong, what rank 0 does meanwhile, and the error that both raise.
SAME = {
    "bad counts": (lambda acc: train(acc, [2, -1]), right, "counts[1] must be >= 0, got -1"),
    "no counts": (right, lambda acc: train(acc, []), "one number per micro-batch, got none at all"),
    "other number": (right, one, "different numbers of micro-batches in this window: 1 on rank 0"),
    "reads metrics": (reads, right, "1 to open a window, 1 to read metrics"),
    "finishes": (lambda acc: acc.finish([]), streams, "no micro-batch since the last one"),
    "reads inside": (reads_inside, right, "cannot read metrics: 1 of 2 declared"),
    "reads while streaming": (
        reads_while_streaming, reads,
        "cannot read metrics: 1 micro-batches since the last finish() are",
    ),
    "other count": (
        lambda acc: train(acc, [2, 5], [2, 2]), lambda acc: train(acc, [2, 3], [2, 2]),
        "micro-batch 1 was declared with 3 valid tokens, its loss counts 2",
    ),
    "fewer": (
        lambda acc: train(acc, [2, 2], [2]), right, "2 micro-batches were declared, 1"
    ),
    "bad label": (bad_label, one, "got 99 at flattened position 5"),
    "bad label in evaluation": (
        lambda acc: bad_label(acc, True), evaluates, "got 99 at flattened position 5"
    ),
    "backward raised": (backward_raises, streams, "this window can only be dropped: a backward"),
    "no parameters": (lambda acc: stream(acc, [2], []), streams, "no parameter given has a .grad"),
    "factor": (divides, right, "the loss was multiplied by 0.25 after scale()"),
}  # fmt: skip
# Rank 1 raises its own error, the other one hears of it.
TOLD = {
    "raises": (lambda acc: fails_inside(acc, 1), right, "ZeroDivisionError: a bug in the loop"),
    "raises before": (lambda acc: fails_inside(acc, 0), right, "ZeroDivisionError: a bug in the"),
    "more": (
        lambda acc: train(acc, [2, 2], [2, 2, 2]), right,
        "2 micro-batches were declared, this is number 3",
    ),
}  # fmt: skip


def both(name, rank):
    """``(error, seconds, norm of a gradient of a window that follows)``."""
    wrong, meanwhile, _ = (SAME | TOLD)[name]
    acc = LossAccumulator()
    error, seconds = ranks.timed(wrong if rank else meanwhile, acc)
    acc.discard_window()
    weight = new_weight()
    train(LossAccumulator(), [3], weight=weight)
    return error, seconds, float(weight.grad.norm())


@functools.cache
def results():
    cases = {name: functools.partial(both, name) for name in SAME | TOLD}
    return ranks.run({"warm up": warm_up, **cases})


@pytest.mark.parametrize("name", SAME | TOLD)
def test_all_ranks_raise_the_error_of_one(name):
    (told, fast, after), (own, fast_too, _) = ranks.of(results(), name)
    assert (SAME | TOLD)[name][2] in own
    if name in SAME:
        assert ranks.anywhere(told) == ranks.anywhere(own)
    else:
        words = own.removeprefix("RuntimeError: ")
        assert told.removeprefix("RuntimeError: ") == f"{words} (on rank 1)"
    assert max(fast, fast_too) < ranks.SOON
    assert after > 0


# ---- errors of the body, settings, a device -----------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """A stand-in for torch.OutOfMemoryError, with a class of its own."""


def raised_inside(mine, rank):
    """Class and message of the error that leaves the block; a window follows."""
    acc = LossAccumulator()
    caught = None
    try:
        with acc.window([2]):
            acc.backward(a_loss(2))
            if mine[rank] is not None:
                raise mine[rank]
    except Exception as error:
        caught = type(error), str(error)
    run_window(acc, new_weight(), batches([2]))
    return caught


@pytest.mark.parametrize(
    "errors",
    [
        [OutOfMemoryError("CUDA out of memory"), None],
        [KeyError("labels"), ZeroDivisionError("a bug in the loop")],
        [None, KeyError("labels"), None, OutOfMemoryError("CUDA out of memory")],
    ],
    ids=["one", "both", "two of four"],
)
def test_an_error_leaves_the_block_as_itself_and_others_raise_the_first(errors):
    case = functools.partial(raised_inside, errors)
    found = ranks.of(ranks.run({"raised": case}, len(errors), timeout=LATE), "raised")
    first = next(i for i, error in enumerate(errors) if error is not None)
    told = f"{type(errors[first]).__name__}: {errors[first]} (on rank {first})"
    for mine, caught in zip(errors, found, strict=True):
        assert caught == ((RuntimeError, told) if mine is None else (type(mine), str(mine)))


SETTINGS = {
    "grad_reduction": ("mean", "sum"),
    "on_empty": ("zero", "skip"),
    "backward_divisor": (1, 2.5),
}


def settings_differ(rank):
    found = {}
    for name, values in SETTINGS.items():
        for how, use in {
            "window": one,
            "streaming": streams,
            "metrics": lambda a: a.metrics(),
        }.items():
            acc = LossAccumulator(**{name: values[rank]})
            found[name, how] = ranks.timed(use, acc)
    other = ("b", "c")[rank]
    window = LossAccumulator().window({"a": [1], other: [1]})
    out = {"a": a_loss(1), other: a_loss(1)}
    found["losses", ""] = ranks.timed(window.__enter__().scale, out)
    window = LossAccumulator().window({"a": [1]}, weights={"a": 1 + rank})
    found["weights", ""] = ranks.timed(window.__enter__().scale, {"a": a_loss(1)})
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
        train(acc, [2] * (rank + 1))
        differ = ranks.error_of(acc.metrics)
        acc = LossAccumulator()
        left = ranks.error_of(train, acc, [2.5] if rank else [2], [2])
        if not rank:
            left = left or ranks.error_of(acc.metrics)
    finally:
        _faults.readable = readable
    return counted, differ, left


def alone(rank):
    """Rank 0 makes, copies and pickles accumulators by itself, before and between."""
    first = LossAccumulator()
    kept = [LossAccumulator(), copy.deepcopy(first)] if rank == 0 else []
    second, weight = LossAccumulator(), new_weight()
    for acc in (first, second, first):
        run_streaming(acc, weight, batches([3]))
    kept += [copy.deepcopy(first)] if rank == 0 else []
    third = LossAccumulator()
    for acc in (third, second, third):
        run_streaming(acc, weight, batches([3]))
    swapped = [third, first] if rank else [first, third]
    return len(kept), [ranks.error_of(run_streaming, acc, weight, batches([3])) for acc in swapped]


def other_order(rank):
    """Two accumulators; rank 1 finishes the second one first."""
    pair = [(LossAccumulator(), new_weight()) for _ in range(2)]
    for i, (acc, weight) in enumerate(pair):
        acc.backward(a_loss(3 + 20 * i, weight))
    return [ranks.error_of(acc.finish, [w]) for acc, w in (reversed(pair) if rank else pair)]


@functools.cache
def others():
    return ranks.run({f.__name__: f for f in (settings_differ, on_a_device, alone, other_order)})


def test_settings_that_differ():
    a, b = ranks.of(others(), "settings_differ")
    for name, how in a:
        words = "the ranks' windows hold different losses"
        if name in SETTINGS:
            x, y = SETTINGS[name]
            words = (
                f"{name} must be the same on all ranks: it is {x!r} on 1 and {y!r} on 1 of the 2"
            )
        assert a[name, how][0] == b[name, how][0]
        assert words in a[name, how][0]
        assert max(a[name, how][1], b[name, how][1]) < ranks.SOON


def test_on_a_device_it_is_raised_where_metrics_are_read():
    a, b = ranks.of(others(), "on_a_device")
    assert a[:2] == b[:2]
    assert "micro-batch 0 was declared with 3 valid tokens, its loss counts 2" in a[0]
    assert "different numbers of micro-batches in this window: 1 on rank 0, 2 on rank 1" in a[1]
    for left in (a[2], b[2]):
        assert "TypeError: counts[0] must be an integer" in left


def test_one_rank_may_make_accumulators_alone_but_not_use_them_in_another_order():
    for n, errors in ranks.of(others(), "alone"):
        assert n in (0, 3)
        assert all("messages of different accumulators" in error for error in errors)
    (a, a2), (b, b2) = ranks.of(others(), "other_order")
    assert (a, a2) == (b, b2)
    assert all("messages of different accumulators have met" in words for words in (a, a2))


# ---- the very first exchange, whose group is not made yet; a rank that never comes --------------

FIRST = {
    "metrics": (lambda acc, w: acc.metrics(), "cannot read metrics"),
    "finish": (lambda acc, w: acc.finish([("name", w)]), "named_parameters"),
    "window": (lambda acc, w: acc.window([-1]).__enter__(), "must be >= 0"),
}


def fails_first(name, rank):
    acc, weight = LossAccumulator(), new_weight()
    if name != "window":
        acc.backward(a_loss(3, weight))
    right = (lambda: acc.finish([weight])) if name != "window" else acc.window([3]).__enter__
    found = ranks.timed(FIRST[name][0], acc, weight) if rank else ranks.timed(right)
    acc = LossAccumulator()
    run_streaming(acc, weight, batches([3]))
    return *found, acc.metrics()["n_tokens"]


@pytest.mark.parametrize("name", FIRST)
def test_an_error_of_one_rank_in_the_very_first_exchange(name):
    found = ranks.of(ranks.run({name: functools.partial(fails_first, name)}), name)
    for words, seconds, n_tokens in found:
        assert FIRST[name][1] in words
        assert seconds < ranks.SOON
        assert n_tokens == 6
    assert ranks.anywhere(found[0][0]) == found[1][0]


def comes_late(engine, rank):
    """Rank 1 has more micro-batches than rank 0, under an engine that waits in each of them."""
    model = engine(parallel.Model())
    acc, one = LossAccumulator(), parallel.micro_batches(0, 0)[0]

    def loop():
        for _ in range(2 + rank):
            acc.backward(model(*one))
        acc.finish(model.parameters())

    return ranks.timed(loop)


def never_comes(rank):
    if rank:
        time.sleep(2 * TIMEOUT)  # not in a window, and not gone either
        return None, 0
    return ranks.timed(run_window, LossAccumulator(), new_weight(), batches([2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "purpose"),
    [
        (functools.partial(comes_late, DistributedDataParallel), "finish"),
        pytest.param(functools.partial(comes_late, fully_shard), "finish", marks=FSDP2_MEAN),
        (never_comes, "open"),
    ],
    ids=["ddp", "fsdp2", "never"],
)
@pytest.mark.parametrize("backend", [None, "cpu:gloo", "gloo"])
def test_waiting_ends_with_the_groups_timeout_in_words(case, purpose, backend):
    first = {"first": lambda rank: run_window(LossAccumulator(), new_weight(), batches([2]))}
    found = ranks.run({**first, "late": case}, timeout=TIMEOUT, backend=backend)
    (waits, seconds), (_, other) = ranks.of(found, "late")
    assert f"this rank has come to {purpose} a window, and not all others have" in waits
    assert f"the process group's timeout ({TIMEOUT} s) is over" in waits
    assert "the same number of micro-batches" in waits
    assert TIMEOUT - 1 < max(seconds, other) < LATE
