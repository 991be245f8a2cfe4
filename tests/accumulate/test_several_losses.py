"""Several losses over shared parameters: in one window right, in two accumulators refused."""

import functools

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.bounds import SAME_SUMS
from support.loops import V, batches, distance, new_weight

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


def two_heads(rank, reduction="mean"):
    weight, acc = new_weight(), LossAccumulator(grad_reduction=reduction)
    counts = {name: sizes[rank] for name, sizes in SIZES.items()}
    with acc.window(counts, weights={"second": 0.3}):
        for i in range(2):
            acc.backward(outs(weight, rank, i))
    if dist.is_initialized():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size() if reduction == "mean" else 1
    return weight.grad, acc.metrics()


def check(grad, metrics, world):
    right, loss, means = exact(world)
    assert distance(grad, right) <= SAME_SUMS
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    for name, mean in means.items():
        assert metrics[f"{name}/loss"] == pytest.approx(mean, rel=1e-6)
        tokens = sum(sum(SIZES[name][rank]) for rank in range(world))
        assert metrics[f"{name}/n_tokens"] == tokens
    assert metrics["n_windows"] == 1


def test_each_loss_is_divided_by_its_own_tokens():
    check(*two_heads(0), 1)


def test_over_ranks():
    cases = {x: functools.partial(two_heads, reduction=x) for x in ("mean", "sum")}
    results = ranks.run(cases)
    for name in cases:
        for grad, metrics in ranks.of(results, name):
            check(grad, metrics, 2)


@pytest.mark.parametrize(
    ("counts", "weights", "error", "words"),
    [
        ({"a": [1], "b": [1, 2]}, None, ValueError, "one number per micro-batch for each loss"),
        ({}, None, ValueError, "must name 1 to 16 losses"),
        ({"": [1]}, None, ValueError, "must name"),
        ({"a": [1]}, {"b": 1.0}, ValueError, "weights must be those of the losses"),
        ({"a": [1]}, {"a": "1"}, TypeError, r"weights\['a'\] must be a number"),
        ({"a": [1]}, {"a": float("nan")}, ValueError, "must be finite"),
        ({"a": 3}, None, TypeError, "one number per micro-batch"),
        ([1], {"a": 1.0}, ValueError, "weights are for several losses"),
    ],
)
def test_bad_windows(counts, weights, error, words):
    with pytest.raises(error, match=words):
        LossAccumulator().window(counts, weights=weights).__enter__()


def test_the_losses_of_a_micro_batch_are_those_declared():
    weight = new_weight()
    with pytest.raises(ValueError, match="a dict of the losses"):
        with LossAccumulator().window({"a": [1], "b": [1]}) as acc:
            acc.backward({"a": (weight.sum(), torch.tensor(1))})
    with pytest.raises(TypeError, match="a dict of the window's losses"):
        with LossAccumulator().window({"a": [1]}) as acc:
            acc.backward((weight.sum(), torch.tensor(1)))
    with pytest.raises(ValueError, match="one loss, no dict"):  # streaming has one estimate
        LossAccumulator().backward({"a": (weight.sum(), torch.tensor(1))})


# ---- two accumulators ---------------------------------------------------------------------------


def one(weight, n):
    hidden, labels = batches([n])[0]
    return fused_ce(hidden, weight, labels)


@pytest.mark.parametrize("declared", [False, True])
def test_two_accumulators_over_the_same_gradients_are_refused(declared):
    weight, a, b = new_weight(), LossAccumulator(), LossAccumulator()
    a.backward(one(weight, 3))
    with pytest.raises(RuntimeError, match=r"two accumulators share gradients.*several losses"):
        if declared:
            with b.window([9]):
                b.backward(one(weight, 9))
        else:
            b.backward(one(weight, 9))
        a.finish([weight])
        b.finish([weight])


def test_two_models_with_accumulators_of_their_own_are_right():
    """Two models are trained in turns, like a generator and its discriminator."""
    weights, accs = [new_weight(), new_weight()], [LossAccumulator(), LossAccumulator()]
    for sizes in ((3, 9), (1, 4)):
        for weight, acc, n in zip(weights, accs, sizes, strict=True):
            acc.backward(one(weight, n))
    with LossAccumulator().window([2]) as third:
        third.backward(one(torch.randn(V, weights[0].shape[1], requires_grad=True), 2))
    for weight, acc in zip(weights, accs, strict=True):
        acc.finish([weight])
        assert acc.metrics()["n_windows"] == 1
