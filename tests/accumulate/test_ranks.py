"""Real gloo processes with uneven batches equal one process with all of them."""

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
    run_streaming,
    run_window,
)
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator, LossMeter, fused_ce
from fusedce.accumulate.exchange import LENGTH
from fusedce.agreement import ALL_GATHER

on_two_ranks = ranks.together()


@on_two_ranks
def test_empty_is_a_matter_of_all_ranks(rank):
    with pytest.raises(RuntimeError, match="no valid token in this window on any rank"):
        LossAccumulator(on_empty="raise").window([0]).__enter__()
    with LossAccumulator(on_empty="raise").window([rank]) as acc:
        acc.backward(a_loss(rank))
    assert acc.metrics()["n_tokens"] == 1
    del acc
    skip = LossAccumulator(on_empty="skip")
    for n, steps in ((0, False), (rank, True)):  # with tokens on rank 1 only, both step
        with skip.window([n]):
            skip.backward(a_loss(n))
        assert skip.should_step == steps


@on_two_ranks
def test_auxiliary_losses_are_divided_by_micro_batches_and_ranks(rank):
    for reduction in ("mean", "sum"):
        acc, extra = LossAccumulator(grad_reduction=reduction), torch.zeros(1, requires_grad=True)
        with acc.window([1, 5 * rank]):
            for n in (1, 5 * rank):
                acc.add_auxiliary((extra * (rank + 1)).sum())
                acc.backward(a_loss(n))
        dist.all_reduce(extra.grad)
        assert extra.grad.item() / (2 if reduction == "mean" else 1) == pytest.approx(1.5)


@on_two_ranks
def test_the_collectives_are_those_of_the_docstring(rank):
    calls, names = [], ("all_reduce", "broadcast", "all_gather", "reduce", "barrier", ALL_GATHER)
    groups = dist.distributed_c10d._world.pg_map
    backend, _ = groups[dist.group.WORLD]
    LossMeter().compute()  # makes the group
    weight, acc, meter = new_weight(), LossAccumulator(), LossMeter()

    def spy(name, original, *args, **kwargs):
        x = args[1] if name == ALL_GATHER else args[0]
        calls.append((name, x.numel(), x.dtype))
        return original(*args, **kwargs)

    def micro_batches():
        weight.grad = None
        for n in (1, 2):
            acc.backward(a_loss(n, weight))

    def stream():
        run_streaming(acc, weight, batches([3, 0, 4]))

    uses = [  # and the number of their collectives
        (lambda: run_window(acc, weight, batches([3, 0, 4])), 2),
        (stream, 1),
        (stream, 1),
        (acc.metrics, 0),
        (acc.state_dict, 0),
        (lambda: acc.load_state_dict(acc.state_dict()), 0),
        (stream, 1),
        (lambda: acc.metrics(reset=True), 0),
        (acc.metrics, 0),
        (lambda: meter.update(a_loss(3)), 0),
        (meter.state_dict, 0),
        (meter.compute, 1),
        (micro_batches, 0),
        (lambda: acc.finish([weight]), 1),
    ]
    assert f"an all-gather of {LENGTH} int64 from each rank" in LossAccumulator.__doc__
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, functools.partial(spy, name, getattr(dist, name)))
        patch.setitem(groups, dist.group.WORLD, (backend, None))  # who asks the store raises
        for i, (use, n) in enumerate(uses):
            calls.clear()
            use()
            assert calls == n * [(ALL_GATHER, LENGTH, torch.int64)], i


def half_right(rank, seed, n):
    """Micro-batches whose first labels are the classes that the weight finds likeliest."""
    hidden, labels = batches([n], 10 * seed + rank)[0]
    labels[: n // 2] = (hidden @ new_weight().detach().t())[: n // 2].argmax(1)
    return hidden, labels


@on_two_ranks
def test_what_losses_carry_is_in_the_metrics(rank):
    """Monitored sums are added up in windows of each kind."""
    acc, weight, every = LossAccumulator(), new_weight(), ("correct", "entropy", "z_loss")
    micro = [
        [half_right(r, 0, 6), half_right(r, 1, 4 * r), half_right(r, 2, 3 + r)] for r in range(2)
    ]

    def loss(one, monitor=every):
        return fused_ce(one[0], weight, one[1], monitor=monitor, z_loss=0.01)

    with acc.window([6, 4 * rank]):
        for one in micro[rank][:2]:
            acc.backward(loss(one))
    weight.grad = None
    acc.backward(loss(micro[rank][2]))
    acc.finish([weight])
    found, again = acc.metrics(), LossAccumulator(name="again")
    again.load_state_dict(acc.state_dict())
    assert again.metrics() == found
    hidden, labels = (torch.cat(x) for x in zip(*micro[0], *micro[1], strict=True))
    hidden, labels = hidden[labels != -100].double(), labels[labels != -100]
    z, n = hidden @ weight.detach().double().t(), len(labels)
    p = z.log_softmax(1)
    assert found["n_tokens"] == n
    assert found["correct_tokens"] == int((z.argmax(1) == labels).sum())
    assert found["mean_token_accuracy"] == found["correct_tokens"] / n
    assert found["entropy"] == pytest.approx(float(-(p.exp() * p).sum() / n), rel=SAME_MODEL)
    z_loss = 0.01 * z.logsumexp(1).square().sum() / n
    assert found["z_loss"] == pytest.approx(float(z_loss), rel=SAME_MODEL)
    weight.grad = None
    a, b = half_right(rank, 5, 2), half_right(rank, 6, 2)
    acc.metrics(reset=True)
    with acc.window([2, 2]):  # the second is monitored on one rank alone
        acc.backward(loss(a, ("correct",)))
        acc.backward(loss(b, () if rank else ("correct",)))
    found = acc.metrics()
    assert "entropy" not in found
    assert found["correct_tokens"] / found["mean_token_accuracy"] == pytest.approx(6)


@on_two_ranks
def test_opening_a_window_waits_for_nobody(rank):
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
    assert acc.metrics()["n_tokens"] == 8


@on_two_ranks
def test_ranks_of_ddp_may_stream_different_numbers_of_micro_batches(rank):
    """DDP waits for the other rank in the last backward alone."""
    model = DistributedDataParallel(parallel.Model())
    acc = LossAccumulator(model)
    for window in range(2):
        *others, last = parallel.micro_batches(window, rank)[: 2 - rank]
        for one in others:
            with model.no_sync():
                acc.backward(model(*one))
        acc.backward(model(*last))
        acc.finish()
        same = parallel.Model()
        sum(
            same(*one) for r in range(2) for one in parallel.micro_batches(window, r)[: 2 - r]
        ).mean().backward()
        for p, exact in zip(model.parameters(), same.parameters(), strict=True):
            assert distance(p.grad, exact.grad) <= SAME_SUMS
        model.zero_grad()
