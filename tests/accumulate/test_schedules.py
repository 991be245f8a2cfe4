"""Random windows of two ranks, one of which may fail anywhere: right, or refused on both."""

import functools
import os
import random

import pytest
import torch.distributed as dist
from support import ranks
from support.loops import (
    a_loss,
    batches,
    distance,
    new_weight,
    raising,
    run_window,
    warm_up,
    weight_and_grad,
)

from fusedce import LossAccumulator, fused_ce

SCHEDULES = int(os.environ.get("FUSEDCE_SCHEDULES", "40"))


def random_schedule(seed, rank):
    """Windows of two ranks, one of which may fail somewhere: what each of them saw.

    Gradients are added by hand after each window, as an engine without collectives inside it does.
    """
    rng = random.Random(seed)
    acc = LossAccumulator(grad_reduction="sum")
    found = []
    for window in range(rng.randint(1, 4)):
        streaming, M = rng.random() < 0.5, rng.randint(1, 3)
        sizes = [[rng.choice([0, 1, 4, 9]) for _ in range(M)] for _ in range(2)]
        failing, where = rng.choice([None, 0, 1]), rng.randrange(M)
        kind = rng.choice(["before", "backward", "count", "more", "fewer", "elsewhere"])
        weight = new_weight()
        micro = batches(sizes[rank], 1000 * seed + 10 * window + rank)
        fails = failing == rank
        error, seconds = ranks.timed(
            one_window, acc, weight, micro, streaming, fails and kind, where
        )
        if error is None:
            dist.all_reduce(weight.grad)
            both = [x for r in (0, 1) for x in batches(sizes[r], 1000 * seed + 10 * window + r)]
            _, exact, _ = weight_and_grad(both)
            found.append((None, distance(weight.grad, exact), seconds))
        else:
            acc.discard_window()
            found.append((error, failing, seconds))
    return found, acc.state_dict()


def one_window(acc, weight, micro, streaming, failure, where):
    counts = [int((y != -100).sum()) for _, y in micro]
    if failure == "count":
        counts[where] += 1
    if failure == "more":
        micro = [*micro, micro[0]]
    if failure == "fewer":
        micro = micro[:-1]
    if failure == "elsewhere":
        acc.metrics() if not acc.state_dict()["n_windows"] else acc.finish([weight])
    if streaming:
        try:
            run(acc, weight, micro, failure, where)
        except (ZeroDivisionError, ValueError):
            if not acc._steps.window:  # before the first micro-batch of all: nothing is open
                acc.scale(a_loss(0))
        acc.finish([weight])
    else:
        with acc.window(counts):
            run(acc, weight, micro, failure, where)


def run(acc, weight, micro, failure, where):
    for i, (hidden, labels) in enumerate(micro):
        out = fused_ce(hidden, weight, labels)
        if failure == "before" and i == where:
            raise ValueError("a bug in the loop")
        acc.backward(raising(out) if failure == "backward" and i == where else out)


def schedules(first, last, rank):
    warm_up(rank)
    return [random_schedule(seed, rank) for seed in range(first, last)]


def check_schedules(results):
    """How many windows were right, and how many were refused."""
    right, refused = 0, 0
    for (a, state_a), (b, state_b) in zip(*results, strict=True):
        assert state_a == state_b
        for (error, how, fast), (other, _, fast_too) in zip(a, b, strict=True):
            assert max(fast, fast_too) < ranks.SOON
            if error is None and other is None:
                assert how < 1e-6
                right += 1
                continue
            assert error is not None
            assert other is not None
            # The one that raised in its own code has raised that, the other one names it.
            own, told = (error, other) if how == 0 else (other, error)
            words = own.removeprefix("RuntimeError: ")
            assert told == own or words in told
            refused += 1
    return right, refused


@pytest.mark.slow
def test_random_schedules_with_errors_on_one_rank():
    found = ranks.run({"schedules": functools.partial(schedules, 0, SCHEDULES)})
    right, refused = check_schedules(ranks.of(found, "schedules"))
    print(f"{SCHEDULES} schedules: {right} windows right, {refused} refused")
    assert right > SCHEDULES // 2
    assert refused > SCHEDULES // 2


def test_run_window_is_right_after_all_that():
    weight, exact, _ = weight_and_grad(batches([3, 5]))
    run_window(LossAccumulator(), weight, batches([3, 5]))
    assert distance(weight.grad, exact) < 1e-6
