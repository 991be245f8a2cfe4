"""Several losses and several accumulators: right, or refused where they share gradients."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.bounds import SAME_SUMS, STATISTIC
from support.loops import a_loss, batches, distance, new_weight, run_streaming, run_window

from fusedce import LossAccumulator, fused_ce

WEIGHTS = {"next": 1.0, "second": 0.3}
SIZES = {"next": [[5, 1], [20, 3]], "second": [[4, 0], [7, 12]]}  # [rank][micro-batch]


def outs(weight, rank, i):
    found = {}
    for k, (name, sizes) in enumerate(SIZES.items()):
        hidden, labels = batches(sizes[rank], 100 * k + rank)[i]
        found[name] = fused_ce(hidden, weight, labels)
    return found


def exact(world):
    weight = new_weight()
    means = {}
    for name in SIZES:
        parts = [outs(weight, r, i)[name] for r in range(world) for i in range(2)]
        means[name] = sum(parts).mean()
    loss = sum(w * means[name] for name, w in WEIGHTS.items())
    (grad,) = torch.autograd.grad(loss, weight)
    return grad, loss.item(), {name: mean.item() for name, mean in means.items()}


def check(rank, world, reduction="mean"):
    weight, acc = new_weight(), LossAccumulator(grad_reduction=reduction)
    counts = {name: sizes[rank] for name, sizes in SIZES.items()}
    with acc.window(counts, weights={"second": 0.3}):
        for i in range(2):
            acc.backward(outs(weight, rank, i))
    if world > 1:
        dist.all_reduce(weight.grad)
        weight.grad /= world if reduction == "mean" else 1
    right, loss, means = exact(world)
    metrics = acc.metrics()
    assert distance(weight.grad, right) <= SAME_SUMS
    assert metrics["loss"] == pytest.approx(loss, rel=STATISTIC)
    for name, mean in means.items():
        assert metrics[f"{name}/loss"] == pytest.approx(mean, rel=STATISTIC)
        tokens = sum(sum(SIZES[name][rank]) for rank in range(world))
        assert metrics[f"{name}/n_tokens"] == tokens
    assert metrics["n_windows"] == 1


def test_each_loss_is_divided_by_its_own_tokens():
    check(0, 1)


@ranks.together()
def test_over_ranks(rank):
    for reduction in ("mean", "sum"):
        check(rank, 2, reduction)


# ---- several accumulators -----------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True])
def test_two_accumulators_over_the_same_gradients_are_refused(declared):
    weight = torch.nn.Parameter(new_weight().detach())
    a, b = LossAccumulator(), LossAccumulator()
    a.backward(a_loss(3, weight))
    with pytest.raises(RuntimeError, match=r"one of another accumulator.*Several fused losses"):
        (run_window if declared else run_streaming)(b, weight, batches([9]))
        a.finish([weight])


def test_two_models_with_accumulators_of_their_own_are_right():
    """Two models are trained in turns, like a generator and its discriminator."""
    weights, accs = [new_weight(), new_weight()], [LossAccumulator(), LossAccumulator()]
    for sizes in ((3, 9), (1, 4)):
        for weight, acc, n in zip(weights, accs, sizes, strict=True):
            acc.backward(a_loss(n, weight))
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
