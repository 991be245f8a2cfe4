"""Ranks whose first window fails, that make accumulators alone, or have other micro-batches."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.bounds import SAME_SUMS
from support.loops import a_loss, batches, distance, new_weight, run_streaming, weight_and_grad
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator

# Each must be the first exchange of its process, whose group is not made yet.
FIRST = {
    "metrics": (lambda acc, w: acc.metrics(), "cannot read metrics"),
    "finish": (lambda acc, w: acc.finish([("name", w)]), "named_parameters"),
    "window": (lambda acc, w: acc.window([-1]).__enter__(), "must be >= 0"),
}


def one_fails_first(name, rank):
    acc, weight = LossAccumulator(), new_weight()
    if name != "window":
        acc.backward(a_loss(3, weight))
    mistake = FIRST[name][0]
    right = (lambda: acc.finish([weight])) if name != "window" else acc.window([3]).__enter__
    found = ranks.timed(mistake, acc, weight) if rank else ranks.timed(right)
    acc = LossAccumulator()
    run_streaming(acc, weight, batches([3]))
    return *found, acc.metrics()["n_tokens"]


@pytest.mark.parametrize("name", FIRST)
def test_an_error_of_one_rank_in_the_very_first_exchange(name):
    found = ranks.of(ranks.run({name: functools.partial(one_fails_first, name)}), name)
    for words, seconds, n_tokens in found:
        assert FIRST[name][1] in words
        assert seconds < ranks.SOON
        assert n_tokens == 6
    assert ranks.anywhere(found[0][0]) == found[1][0]


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


def test_one_rank_may_make_accumulators_alone():
    for n, errors in ranks.of(ranks.run({"alone": alone}), "alone"):
        assert n in (0, 3)
        assert all("messages of different accumulators" in error for error in errors)


# ---- different numbers of micro-batches ---------------------------------------------------------

UNEVEN = [[3, 5, 1], [9]]


def uneven(rank):
    acc, weight = LossAccumulator(grad_reduction="sum"), new_weight()
    run_streaming(acc, weight, batches(UNEVEN[rank], rank))
    dist.all_reduce(weight.grad)
    return weight.grad, acc.metrics()


def uneven_ddp(rank):
    """DDP waits for the other rank in the last backward alone."""
    model, acc = DistributedDataParallel(parallel.Model()), LossAccumulator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc.guard(optimizer, model)
    grads = []
    for window in range(2):
        micro = parallel.micro_batches(window, rank)[: 2 - rank]
        for i, one in enumerate(micro):
            last = i == len(micro) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                acc.backward(model(*one))
        acc.finish(model.parameters())
        grads.append([p.grad.clone() for p in model.parameters()])
        optimizer.zero_grad()
    return grads


def test_ranks_may_stream_different_numbers_of_micro_batches():
    found = ranks.run({"uneven": uneven, "ddp": uneven_ddp})
    parts = [one for rank, sizes in enumerate(UNEVEN) for one in batches(sizes, rank)]
    _, exact, loss = weight_and_grad(parts)
    for grad, metrics in ranks.of(found, "uneven"):
        assert distance(grad, exact) <= SAME_SUMS
        assert metrics["n_tokens"] == 18
        assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    for grads in ranks.of(found, "ddp"):
        for window, of_window in enumerate(grads):
            model = parallel.Model()
            outs = [
                model(*one)
                for rank in range(2)
                for one in parallel.micro_batches(window, rank)[: 2 - rank]
            ]
            sum(outs).mean().backward()
            for p, grad in zip(model.parameters(), of_window, strict=True):
                assert distance(grad, p.grad) <= SAME_SUMS
