"""Ranks that fail, come late or not at all, or do other things: right, or a clear error."""

import functools
import time

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.bounds import SAME_SUMS
from support.loops import (
    batches,
    distance,
    new_weight,
    raising,
    run_streaming,
    run_window,
    weight_and_grad,
)
from support.versions import FSDP2_MEAN
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator, fused_ce
from fusedce.agreement import own_group, timeout_of

SOON, LATE = 4, 20  # seconds of a group's timeout, and limit of each case


def loss_of(weight, one):
    return fused_ce(one[0], weight, one[1])


# ---- right --------------------------------------------------------------------------------------


def retried(rank):
    """Rank 1 fails in the very first micro-batch of its first window, drops it and starts again."""
    acc, weight = LossAccumulator(grad_reduction="sum"), new_weight()
    micro = batches([3, 5], rank)
    if rank:
        with pytest.raises(ZeroDivisionError):
            acc.backward(raising(loss_of(weight, micro[0])))
        acc.discard_window()
        weight.grad = None
    run_streaming(acc, weight, micro)
    dist.all_reduce(weight.grad)
    return weight.grad


def test_a_rank_that_fails_and_tries_again_in_the_first_window():
    _, exact, _ = weight_and_grad([*batches([3, 5], 0), *batches([3, 5], 1)])
    for grad in ranks.of(ranks.run({"retried": retried}, timeout=SOON), "retried"):
        assert distance(grad, exact) <= SAME_SUMS


# ---- refused ------------------------------------------------------------------------------------


def other_order(rank):
    """Two accumulators; rank 1 finishes the second one first."""
    pair = [(LossAccumulator(), new_weight()) for _ in range(2)]
    for i, (acc, weight) in enumerate(pair):
        acc.backward(loss_of(weight, batches([3 + 20 * i], rank)[0]))
    found = []
    for acc, weight in reversed(pair) if rank else pair:
        found.append(ranks.error_of(acc.finish, [weight]))
    return found


def never_synchronised(rank):
    """FSDP2 whose gradients stay inside for a whole window."""
    model = fully_shard(parallel.Model())
    acc, found = LossAccumulator(), []
    for streaming in (False, True):
        model.set_requires_gradient_sync(False)

        def loop(streaming=streaming):
            micro = parallel.micro_batches(0, rank)
            if streaming:
                for one in micro:
                    acc.backward(model(*one))
                acc.finish(model.parameters())
                return
            with acc.window([(y != -100).sum() for _, y in micro]):
                for one in micro:
                    acc.backward(model(*one))

        found.append(ranks.error_of(loop))
        acc.discard_window(model)
    model.set_requires_gradient_sync(True)
    micro = parallel.micro_batches(0, rank)
    with acc.window([(y != -100).sum() for _, y in micro]):
        for one in micro:
            acc.backward(model(*one))
    return found, [parallel.whole(p.grad) for p in model.parameters()]


def outside_of_forward(guarded, rank):
    """The loss is computed by the module inside of DDP, so DDP reduces nothing."""
    model = DistributedDataParallel(parallel.Model())
    acc = LossAccumulator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if guarded:
        acc.guard(optimizer, model)
    found = []
    for inner in (True, False):
        for streaming in (False, True):

            def loop(inner=inner, streaming=streaming):
                micro = parallel.micro_batches(0, rank)
                call = model.module if inner else model
                if streaming:
                    for one in micro:
                        acc.backward(call(*one))
                    acc.finish(model.parameters())
                    return
                with acc.window([(y != -100).sum() for _, y in micro]):
                    for i, one in enumerate(micro):
                        if i < len(micro) - 1:
                            with model.no_sync():
                                acc.backward(call(*one))
                        else:
                            acc.backward(call(*one))

            found.append(ranks.error_of(loop))
            acc.discard_window()
            model.zero_grad()
    return found


def zeroed_at_the_end(rank):
    """Rank 1 sets its gradients to zero between its last backward and the window's end."""
    model = DistributedDataParallel(parallel.Model())
    acc = LossAccumulator()
    acc.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found = []
    for zeroed in (False, True):

        def loop(zeroed=zeroed):
            micro = parallel.micro_batches(0, rank)
            with acc.window([(y != -100).sum() for _, y in micro]):
                for one in micro:
                    acc.backward(model(*one))
                if rank and zeroed:
                    model.zero_grad(set_to_none=False)

        found.append(ranks.error_of(loop))
        model.zero_grad()
    return found


def divided_on_one(rank):
    """Rank 1 divides by the number of micro-batches."""
    acc, weight = LossAccumulator(), new_weight()

    def loop():
        with acc.window([3, 5]):
            for one in batches([3, 5], rank):
                loss = acc.scale(loss_of(weight, one))
                (loss / 4 if rank else loss).backward()

    return ranks.error_of(loop)


REFUSED = {
    "other order": other_order,
    "never synchronised": never_synchronised,
    "outside": functools.partial(outside_of_forward, True),
    "outside, unguarded": functools.partial(outside_of_forward, False),
    "divided": divided_on_one,
    "zeroed": zeroed_at_the_end,
}


@functools.cache
def refused():
    return ranks.run(REFUSED)


def test_accumulators_that_are_finished_in_another_order():
    (a, a2), (b, b2) = ranks.of(refused(), "other order")
    assert a == b
    assert a2 == b2
    for words in (a, a2):
        assert "messages of different accumulators have met" in words


@FSDP2_MEAN
def test_gradients_that_fsdp2_keeps_inside_are_refused():
    exact, *_ = parallel.single_process(2)
    for (window, streaming), grads in ranks.of(refused(), "never synchronised"):
        assert "FSDP2 still holds the gradients of 3 parameters inside" in window
        assert "no parameter given has a .grad" in streaming
        for a, b in zip(grads, exact[0], strict=True):
            assert distance(a, b) <= SAME_SUMS


def test_a_loss_outside_of_ddps_forward_is_refused_under_the_guard():
    for found in ranks.of(refused(), "outside"):
        for words in found[:2]:
            assert "DDP has not reduced the gradients of this window over its ranks" in words
        assert found[2:] == [None, None]
    for found in ranks.of(refused(), "outside, unguarded"):
        assert found == [None] * 4


def test_a_factor_on_one_rank_is_named_on_all():
    a, b = ranks.of(refused(), "divided")
    assert a == b
    assert "the loss was multiplied by 0.25 after scale()" in a


def test_gradients_that_one_rank_sets_to_zero_at_the_end():
    [a, b], [c, d] = ranks.of(refused(), "zeroed")
    assert (a, c) == (None, None)
    assert b == d
    assert "zero_grad() was called inside a window" in b


# ---- exceptions in the block --------------------------------------------------------------------


class OutOfMemoryError(RuntimeError):
    """A stand-in for torch.OutOfMemoryError, with a class of its own."""


def raised_inside(mine, rank):
    """Class, message and notes of the error that leaves the block; a window follows."""
    acc = LossAccumulator()
    caught = None
    try:
        with acc.window([2]):
            acc.backward(loss_of(new_weight(), batches([2])[0]))
            if mine[rank] is not None:
                raise mine[rank]
    except Exception as error:
        caught = type(error), str(error), getattr(error, "__notes__", [])
    # The traceback of an error would hold the micro-batch's memory.
    assert acc._exchange.shared_error is None
    run_window(acc, new_weight(), batches([2]))
    return caught


INSIDE = {
    "both KeyError": (KeyError("labels"), KeyError("labels")),
    "different": (KeyError("labels"), OutOfMemoryError("3 GiB")),
    "one": (None, OutOfMemoryError("3 GiB")),
    "third": (None, KeyError("x"), None, ZeroDivisionError("y")),
}


@pytest.mark.parametrize("name", INSIDE)
def test_an_exception_leaves_the_block_as_itself(name):
    errors = INSIDE[name]
    found = ranks.run({name: functools.partial(raised_inside, errors)}, len(errors), timeout=LATE)
    first = next(i for i, error in enumerate(errors) if error is not None)
    for rank, (kind, words, notes) in enumerate(ranks.of(found, name)):
        told = {
            i: f"{type(e).__name__}: {e} (on rank {i})"
            for i, e in enumerate(errors)
            if e is not None
        }
        if errors[rank] is not None:
            assert kind is type(errors[rank])
            assert words == str(errors[rank])
        else:
            assert kind is RuntimeError
            assert words == told[first]
            rank = first
        if hasattr(BaseException, "add_note"):
            others = [told[i] for i in told if i != rank]
            assert notes == [f"another rank has failed, too: {x}" for x in others]


# ---- a rank does not come ---------------------------------------------------------------------


def comes_late(engine, declared, rank):
    """Rank 1 has more micro-batches than rank 0, under an engine that waits in each of them."""
    model = engine(parallel.Model())
    acc = LossAccumulator()
    one = parallel.micro_batches(0, 0)[0]
    n = int((one[1] != -100).sum())

    def loop():
        if declared:
            with acc.window([n, n, n]):
                for _ in range(2 + rank):
                    acc.backward(model(*one))
            return
        for _ in range(2 + rank):
            acc.backward(model(*one))
        acc.finish(model.parameters())

    begin = time.perf_counter()
    with pytest.raises(RuntimeError) as raised:
        loop()
    notes = " ".join(getattr(raised.value, "__notes__", []))
    return str(raised.value), notes, time.perf_counter() - begin


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [DistributedDataParallel, pytest.param(fully_shard, marks=FSDP2_MEAN)]
)
def test_uneven_micro_batches_end_with_the_groups_timeout_in_words(engine):
    case = functools.partial(comes_late, engine, False)
    found = ranks.run({"late": case}, timeout=SOON)
    (waits, _, seconds), (*_, other) = ranks.of(found, "late")
    assert "this rank has come to finish a window, and not all others have" in waits
    assert f"the process group's timeout ({SOON} s) is over" in waits
    assert "the same number of micro-batches" in waits
    assert max(seconds, other) < LATE


def never_comes(rank):
    if rank:
        time.sleep(2 * SOON)  # not in a window, and not gone either
        return None
    return ranks.timed(run_window, LossAccumulator(), new_weight(), batches([2]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "cpu:gloo", "gloo"])
def test_the_timeout_is_the_users_with_any_backend(backend):
    """The group that the accumulator makes for itself has it, too."""
    cases = {"first": lambda rank: run_window(LossAccumulator(), new_weight(), batches([2]))}
    found = ranks.run({**cases, "never": never_comes}, timeout=SOON, backend=backend)
    (words, seconds), _ = ranks.of(found, "never")
    assert f"the process group's timeout ({SOON} s) is over" in words
    assert SOON - 1 < seconds < LATE


def timeouts(rank):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "dp", "tp"))
    groups = [
        LossAccumulator.from_mesh(mesh, dims)._tokens.group()
        for dims in ("dp", ["a", "tp"], ["dp", "tp"])
    ]
    own = [own_group(group) for group in (*groups, dist.group.WORLD)]
    assert not {*own} & {*groups, dist.group.WORLD}  # gradients may be on their way in those
    made = (*groups[1:], *own)  # torch has made that of "dp"
    return [timeout_of(group).total_seconds() for group in made]


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_every_group_that_is_made_has_the_users_timeout(backend):
    for seconds in ranks.of(ranks.run({"t": timeouts}, 4, timeout=33, backend=backend), "t"):
        assert seconds == [33] * 6


# ---- the store ----------------------------------------------------------------------------------
