"""Several losses and several accumulators: right, or refused where they share gradients."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.bounds import SAME_SUMS, STATISTIC
from support.loops import a_loss, batches, distance, new_weight, run_streaming, run_window

from fusedce import LossAccumulator, fused_ce

SIZES = [[5, 1], [20, 3]], [[4, 0], [7, 12]]  # [loss][rank][micro-batch]


def loss(of, weight, rank, i):
    hidden, labels = batches(SIZES[of][rank], 100 * of + rank)[i]
    return fused_ce(hidden, weight, labels, token_weight=torch.full(labels.shape, 1 - 0.7 * of))


def check(rank, world, reduction="mean"):
    weight = torch.nn.Parameter(new_weight().detach())
    a, b = accs = [LossAccumulator(grad_reduction=reduction) for _ in SIZES]
    for acc in accs:
        acc.guard(torch.optim.SGD([weight]))
    with a.window(SIZES[0][rank]), b.window(SIZES[1][rank]):
        for i in range(2):
            (a.scale(loss(0, weight, rank, i)) + b.scale(loss(1, weight, rank, i))).backward()
    if world > 1:
        dist.all_reduce(weight.grad)
        weight.grad /= world if reduction == "mean" else 1
    places = [(r, i) for r in range(world) for i in range(2)]
    means = [sum(loss(of, weight, *place) for place in places).mean() for of in range(2)]
    assert distance(weight.grad, torch.autograd.grad(sum(means), weight)[0]) <= SAME_SUMS
    for acc, mean in zip(accs, means, strict=True):
        assert acc.metrics()["loss"] == pytest.approx(mean.item(), rel=STATISTIC)


def test_each_of_two_losses_is_divided_by_its_own_tokens():
    check(0, 1)


@ranks.together()
def test_two_losses_over_ranks(rank):
    for reduction in ("mean", "sum"):
        check(rank, 2, reduction)


@ranks.together(timeout=10)
def test_a_rank_that_fails_inside_two_windows(rank):
    """Both ranks raise its error, and the next windows of both accumulators are right."""
    a, b = LossAccumulator(), LossAccumulator()
    for fails in (True, False):
        weight = new_weight()
        error = pytest.raises((KeyError, RuntimeError), match="labels") if fails else nullcontext()
        with error, a.window([2]), b.window([3]):
            if fails and not rank:
                raise KeyError("labels")
            (a.scale(a_loss(2, weight)) + b.scale(a_loss(3, weight))).backward()
    assert [acc.metrics()["n_tokens"] for acc in (a, b)] == [4, 6]


# ---- several accumulators -----------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_two_accumulators_over_the_same_gradients_are_refused(declared, together):
    weight = torch.nn.Parameter(new_weight().detach())
    a, b = LossAccumulator(), LossAccumulator()
    mine = a.scale(a_loss(3, weight))
    if not together:
        mine.backward()
    with pytest.raises(RuntimeError, match=r"one of another accumulator.*Several fused losses"):
        with b.window([9]) if declared else nullcontext():
            ((mine if together else 0) + b.scale(a_loss(9, weight))).backward()
        a.finish([weight])


@pytest.mark.parametrize("together", [False, True])
def test_two_models_with_accumulators_of_their_own_are_right(together):
    """Two models are trained in turns, like a generator and its discriminator, or at once."""
    weights = [torch.nn.Parameter(new_weight().detach()) for _ in range(2)]
    accs = [LossAccumulator(), LossAccumulator()]
    for sizes in ((3, 9), (1, 4)):
        found = zip(weights, accs, sizes, strict=True)
        losses = [acc.scale(a_loss(n, weight)) for weight, acc, n in found]
        for loss in [sum(losses)] if together else losses:
            loss.backward()
    run_window(LossAccumulator(), new_weight(), batches([2]))
    for weight, acc in zip(weights, accs, strict=True):
        acc.finish([weight])
        assert acc.metrics()["n_windows"] == 1


def test_an_accumulator_for_each_of_six_threads():
    interval = sys.getswitchinterval()

    def train(_):
        for _ in range(60):
            run_streaming(LossAccumulator(), new_weight(), batches([3, 9]))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(train, range(6)))  # raises what one of them raises
    finally:
        sys.setswitchinterval(interval)
