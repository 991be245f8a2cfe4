"""Real gloo processes with uneven batches equal one process with all of them."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.bounds import SAME_MODEL, SAME_SUMS
from support.loops import (
    a_loss,
    batches,
    distance,
    new_weight,
    out_of,
    raising,
    run_streaming,
    run_window,
    weight_and_grad,
)
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator, fused_ce
from fusedce.accumulate.exchange import LENGTH
from fusedce.accumulate.guard import _OPEN
from fusedce.agreement import ALL_GATHER


def on_empty(rank):
    raises = ranks.error_of(LossAccumulator(on_empty="raise").window([0]).__enter__)
    with LossAccumulator(on_empty="raise").window([rank]) as acc:
        acc.backward(a_loss(rank))
    skip = LossAccumulator(on_empty="skip")
    with skip.window([0]):
        skip.backward(a_loss(0))
    first = skip.should_step
    with skip.window([rank]):  # tokens on rank 1 only: both step
        skip.backward(a_loss(rank))
    return raises, acc.metrics()["n_tokens"], first, skip.should_step


def auxiliary(rank):
    """It is divided by micro-batches and ranks, whether gradients are added or averaged."""
    found = []
    for reduction in ("mean", "sum"):
        acc, extra = LossAccumulator(grad_reduction=reduction), torch.zeros(1, requires_grad=True)
        with acc.window([1, 5 * rank]):
            for n in (1, 5 * rank):
                acc.add_auxiliary((extra * (rank + 1)).sum())
                acc.backward(a_loss(n))
        dist.all_reduce(extra.grad)
        found.append(extra.grad.item() / (dist.get_world_size() if reduction == "mean" else 1))
    return found


def collectives(rank):
    """Every collective: its name, elements and dtype."""
    calls, names = [], ("all_reduce", "broadcast", "all_gather", "reduce", "barrier", ALL_GATHER)
    originals = {name: getattr(dist, name) for name in names}
    groups = dist.distributed_c10d._world.pg_map
    backend, store = groups[dist.group.WORLD]
    LossAccumulator().metrics()  # makes the group
    weight, found = new_weight(), {}

    def spy(name, *args, **kwargs):
        x = args[1] if name == ALL_GATHER else args[0]
        calls.append((name, x.numel(), x.dtype))
        return originals[name](*args, **kwargs)

    def counted(name, f):
        calls.clear()
        f()
        found[name] = list(calls)

    for name in names:
        setattr(dist, name, functools.partial(spy, name))
    groups[dist.group.WORLD] = backend, None  # who asks the store raises
    try:
        acc = LossAccumulator()
        counted("window", lambda: run_window(acc, weight, batches([3, 0, 4])))
        counted("first streaming", lambda: run_streaming(acc, weight, batches([3, 0, 4])))
        counted("streaming", lambda: run_streaming(acc, weight, batches([3, 0, 4])))
        counted("metrics", acc.metrics)
        counted("state", acc.state_dict)
        counted("load", lambda: acc.load_state_dict(acc.state_dict()))
        counted("streaming after load", lambda: run_streaming(acc, weight, batches([3, 0, 4])))
        acc.metrics(reset=True)
        counted("add", lambda: acc.add(a_loss(3)))
        counted("metrics after add", lambda: acc.metrics(reset=True))
        weight.grad = None
        counted("micro-batches", lambda: [acc.backward(a_loss(n, weight)) for n in (1, 2)])
        counted("finish", lambda: acc.finish([weight]))
    finally:
        groups[dist.group.WORLD] = backend, store
        for name in names:
            setattr(dist, name, originals[name])
    return found


def monitored(rank):
    """Monitored sums are added up in windows of each kind and in evaluation."""
    acc, weight, parts = LossAccumulator(), new_weight(), []

    def loss(seed, n, monitor):
        hidden, labels = batches([n], 10 * seed + rank)[0]
        labels[: n // 2] = (hidden @ weight.detach().t())[: n // 2].argmax(1)
        parts.append((hidden, labels))
        return fused_ce(hidden, weight, labels, monitor=monitor, z_loss=0.01)

    every = ("correct", "entropy", "z_loss")
    with acc.window([6, 4 * rank]):
        acc.backward(loss(0, 6, every))
        acc.backward(loss(1, 4 * rank, every))
    weight.grad = None
    for seed in (2, 3):
        acc.backward(loss(seed, 3 + rank, every))
    acc.finish([weight])
    found = acc.metrics()
    weight.grad = None
    state = acc.state_dict()
    again = LossAccumulator()
    again.load_state_dict(state)
    assert again.metrics() == found
    rows = [torch.cat(x) for x in zip(*parts, strict=True)]
    with acc.window({"a": [2], "b": [2]}):
        acc.backward({"a": loss(5, 2, ("correct",)), "b": loss(6, 2, () if rank else every)})
    return rows, found, acc.metrics()


def overlap(rank):
    """The first rank does everything before its losses while the other one is late."""
    store = dist.distributed_c10d._get_default_store()
    acc, weight = LossAccumulator(), new_weight()
    run_window(acc, weight, batches([1]))
    weight.grad = None
    if rank:
        store.wait(["opened"])
    with acc.window([3]):
        if not rank:
            store.set("opened", "1")  # the other one opens its window only now
        acc.backward(a_loss(3, weight))
    return acc.metrics()["n_tokens"]


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


def open_windows(rank):
    return len(_OPEN)


QUICK = (on_empty, auxiliary, collectives, monitored, overlap, uneven_ddp)


@functools.cache
def results():
    return ranks.run({f.__name__: f for f in QUICK})


def test_empty_is_a_matter_of_all_ranks():
    for raises, tokens, first, second in ranks.of(results(), "on_empty"):
        assert "RuntimeError: no valid token in this window on any rank" in raises
        assert tokens == 1
        assert (first, second) == (False, True)


def test_auxiliary_loss_over_ranks():
    for found in ranks.of(results(), "auxiliary"):
        assert found == pytest.approx([1.5, 1.5])


def test_the_collectives_are_those_of_the_docstring():
    one = [(ALL_GATHER, LENGTH, torch.int64)]
    assert f"an all-gather of {LENGTH} int64 from each rank" in LossAccumulator.__doc__
    for found in ranks.of(results(), "collectives"):
        assert found == {
            "window": 2 * one,
            "first streaming": one,
            "streaming": one,
            "metrics": [],
            "state": [],
            "load": [],
            "streaming after load": one,
            "add": [],
            "metrics after add": one,
            "micro-batches": [],
            "finish": one,
        }


def test_what_losses_carry_is_in_the_metrics():
    (rows, found, named), (rows_too, *others) = ranks.of(results(), "monitored")
    assert [found, named] == others
    hidden, labels = (torch.cat(x) for x in zip(rows, rows_too, strict=True))
    hidden, labels = hidden[labels != -100].double(), labels[labels != -100]
    z = hidden @ new_weight().detach().double().t()
    p = z.log_softmax(1)
    n = len(labels)
    assert found["n_tokens"] == n
    assert found["correct_tokens"] == int((z.argmax(1) == labels).sum())
    assert found["mean_token_accuracy"] == found["correct_tokens"] / n
    assert found["entropy"] == pytest.approx(float(-(p.exp() * p).sum() / n), rel=SAME_MODEL)
    z_loss = 0.01 * z.logsumexp(1).square().sum() / n
    assert found["z_loss"] == pytest.approx(float(z_loss), rel=SAME_MODEL)
    # Only one rank's two tokens of the second loss were monitored.
    assert named["a/mean_token_accuracy"] >= 0.5
    assert "a/entropy" not in named
    assert named["b/correct_tokens"] / named["b/mean_token_accuracy"] == pytest.approx(2)


def test_opening_a_window_waits_for_nobody():
    assert ranks.of(results(), "overlap") == [8, 8]


def test_ranks_of_ddp_may_stream_different_numbers_of_micro_batches():
    for grads in ranks.of(results(), "uneven_ddp"):
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


def test_a_forked_process_has_no_open_window_of_its_parent():
    """Its gradients would count as another accumulator's."""
    acc = LossAccumulator()
    acc.backward(a_loss(3))
    assert open_windows(0) > 0
    assert ranks.of(ranks.run({"open": open_windows}), "open") == [0, 0]
    acc.discard_window()


def retried(rank):
    """Rank 1 fails in the very first micro-batch of its first window, drops it and starts again."""
    acc, weight = LossAccumulator(grad_reduction="sum"), new_weight()
    micro = batches([3, 5], rank)
    if rank:
        with pytest.raises(ZeroDivisionError):
            acc.backward(raising(out_of(weight, micro[0])))
        acc.discard_window()
        weight.grad = None
    run_streaming(acc, weight, micro)
    dist.all_reduce(weight.grad)
    return weight.grad


def test_a_rank_that_fails_and_tries_again_in_the_first_window():
    _, exact, _ = weight_and_grad([*batches([3, 5], 0), *batches([3, 5], 1)])
    for grad in ranks.of(ranks.run({"retried": retried}, timeout=4), "retried"):
        assert distance(grad, exact) <= SAME_SUMS
