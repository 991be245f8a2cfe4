"""Several losses a step, and several accumulators: right, or refused where they would mix."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch.distributed as dist
from support import ranks
from support.bounds import SAME_SUMS, STATISTIC
from support.loops import a_loss, batches, distance, new_weight, run_streaming, run_window

from fusedce import LossAccumulator, fused_ce

LOSSES = {"main": 1, "next2": 0.3}
SIZES = [[5, 1], [20, 3]], [[4, 0], [7, 12]]  # [loss][rank][micro-batch]


def loss(of, weight, rank, i):
    hidden, labels = batches(SIZES[of][rank], 100 * of + rank)[i]
    return fused_ce(hidden.to(weight.dtype), weight, labels)


def means(weight, world):
    """The mean of each loss over all tokens, ``()``."""
    places = [(r, i) for r in range(world) for i in range(2)]
    return [sum(loss(of, weight, *place) for place in places).mean() for of in range(2)]


def check(rank, world, reduction="mean"):
    """Each loss is divided by its own tokens, weighed, and logged by name."""
    weight = new_weight()
    acc = LossAccumulator([weight], losses=LOSSES, grad_reduction=reduction)
    with acc.window(main=SIZES[0][rank], next2=SIZES[1][rank]):
        for i in range(2):
            acc.backward(main=loss(0, weight, rank, i), next2=loss(1, weight, rank, i))
    if world > 1:
        dist.all_reduce(weight.grad)
        weight.grad /= world if reduction == "mean" else 1
    wide = new_weight().detach().double().requires_grad_()
    main, next2 = means(wide, world)
    (main + 0.3 * next2).backward()
    assert distance(weight.grad, wide.grad) <= SAME_SUMS
    found = acc.metrics()
    assert found["main/loss"] == pytest.approx(main.item(), rel=STATISTIC)
    assert found["next2/loss"] == pytest.approx(next2.item(), rel=STATISTIC)
    assert found["loss"] == pytest.approx((main + 0.3 * next2).item(), rel=STATISTIC)
    of_all = [sum(sum(SIZES[of][r]) for r in range(world)) for of in range(2)]
    assert [found["main/n_tokens"], found["next2/n_tokens"]] == of_all
    again = LossAccumulator(losses=LOSSES, name="loaded")
    again.load_state_dict(acc.state_dict())
    assert again.metrics() == found


def test_each_of_two_losses_is_divided_by_its_own_tokens():
    check(0, 1)


on_two_ranks = ranks.together()


@on_two_ranks
def test_two_losses_over_ranks(rank):
    for reduction in ("mean", "sum"):
        check(rank, 2, reduction)
        gc.collect()


def test_a_loss_without_tokens_adds_nothing_to_the_logged_one():
    weight = new_weight()
    acc = LossAccumulator([weight], losses=LOSSES, on_empty="skip")
    for sizes in ([0, 0], [4, 0]):
        with acc.window(main=sizes[:1], next2=sizes[1:]):
            acc.backward(main=a_loss(sizes[0], weight), next2=a_loss(sizes[1], weight))
        assert acc.should_step == bool(sizes[0])
    found = acc.metrics()
    assert found["loss"] == found["main/loss"] > 0
    assert found["next2/n_tokens"] == 0


@pytest.mark.parametrize(
    ("use", "kind", "words"),
    [
        (lambda a, x: a.backward(main=x, next2=x), RuntimeError, "streaming is .*Declare the"),
        (lambda a, x: a.window(main=[3]), TypeError, r"window must name .*, got \['main'\]"),
        (lambda a, x: a.window([3]), TypeError, r"window must name the losses \['main', 'next2'\]"),
        (lambda a, x: a.scale(x), TypeError, "scale must name the losses"),
        (
            lambda a, x: a.window(main=[3], next2=[3, 4]).__enter__(), ValueError,
            r"as many for each loss, got \{'main': 1, 'next2': 2\}",
        ),
        (
            lambda a, x: a.window(main=[3], next2=[-1]).__enter__(), ValueError,
            r"counts of 'next2'\[0\] must be >= 0, got -1",
        ),
    ],
)  # fmt: skip
def test_several_losses_are_declared_by_name(use, kind, words):
    acc = LossAccumulator(losses=LOSSES)
    with pytest.raises(kind, match=words):
        use(acc, a_loss(3))


def test_a_wrong_count_is_named_with_its_loss():
    acc = LossAccumulator(losses=LOSSES)
    with pytest.raises(RuntimeError, match=r"micro-batch 0 of 'next2' was declared with 4 valid"):
        with acc.window(main=[3], next2=[4]):
            acc.backward(main=a_loss(3), next2=a_loss(3))


@pytest.mark.parametrize(
    ("losses", "kind", "words"),
    [
        ({}, ValueError, "1 to 8 names"),
        ({f"l{i}": 1 for i in range(9)}, ValueError, "1 to 8 names, .*got 9"),
        ({"a b": 1}, ValueError, "named by other identifiers"),
        ({"out": 1}, ValueError, "named by other identifiers"),
        ({"a": True}, TypeError, r"losses\['a'\] must be a number"),
        ({"a": float("nan")}, ValueError, r"losses\['a'\] must be finite"),
    ],
)
def test_losses_that_are_none(losses, kind, words):
    with pytest.raises(kind, match=words):
        LossAccumulator(losses=losses)


def test_one_loss_has_no_name():
    with pytest.raises(TypeError, match=r"one argument, .*losses=\{'main': 1"):
        LossAccumulator().backward(main=a_loss(3))


@on_two_ranks
def test_ranks_with_other_losses_are_refused(rank):
    losses = {"main": 1, "next2": 0.3 + 0.1 * rank}
    acc = LossAccumulator(losses=losses)
    with pytest.raises(ValueError, match="losses must be the same on all ranks"):
        with acc.window(main=[3], next2=[3]):
            acc.backward(main=a_loss(3), next2=a_loss(3))


# ---- several accumulators -----------------------------------------------------------------------


@ranks.together(timeout=10)
def test_a_rank_that_fails_inside_two_windows(rank):
    """Both ranks raise its error, and the next windows of both accumulators are right."""
    a, b = LossAccumulator(name="a"), LossAccumulator(name="b")
    for fails in (True, False):
        weight = new_weight()
        error = pytest.raises((KeyError, RuntimeError), match="labels") if fails else nullcontext()
        with error, a.window([2]), b.window([3]):
            if fails and not rank:
                raise KeyError("labels")
            (a.scale(a_loss(2, weight)) + b.scale(a_loss(3, weight))).backward()
    assert [acc.metrics()["n_tokens"] for acc in (a, b)] == [4, 6]


@on_two_ranks
def test_two_accumulators_in_another_order_on_another_rank_are_refused(rank):
    """Before, each got a sum of tokens of two different losses."""
    a, b = LossAccumulator(name="a"), LossAccumulator(name="b")
    weights = [new_weight(), new_weight()]
    a.backward(a_loss(5 + rank, weights[0]))
    b.backward(a_loss(20, weights[1]))
    first, second = ((a, weights[0]), (b, weights[1]))[:: -1 if rank else 1]
    for acc, weight in (first, second):
        with pytest.raises(RuntimeError, match="messages of different LossAccumulators have met"):
            acc.finish([weight])


@on_two_ranks
def test_accumulators_of_the_same_ranks_in_one_order_need_no_names(rank):
    a, b = LossAccumulator(), LossAccumulator()
    alone = LossAccumulator(process_group=[dist.new_group([r]) for r in range(2)][rank])
    for acc, n in ((a, 2), (b, 3), (alone, 5), (a, 4)):
        run_streaming(acc, new_weight(), batches([n]))
    assert [acc.metrics()["n_tokens"] for acc in (a, b, alone)] == [12, 6, 5]


def trained_alone_before():
    """Windows of a process before it meets the others do not count among theirs."""
    run_streaming(LossAccumulator(), new_weight(), batches([2]))


def restarts(rank):
    """Rank 1 has trained more, alone and in an attempt that failed."""
    if rank:
        try:
            acc = LossAccumulator()
            acc.backward(a_loss(3))
            raise KeyError("data")
        except KeyError:
            del acc
    run_window(LossAccumulator(), new_weight(), batches([3]))
    return True


def test_a_rank_that_has_made_more_accumulators_before_is_right():
    trained_alone_before()
    assert ranks.shared({"restarts": restarts})("restarts") == [True, True]


@pytest.mark.parametrize("declared", [False, True])
def test_two_streaming_accumulators_over_the_same_gradients_are_refused(declared):
    weight = new_weight()
    a, b = LossAccumulator([weight]), LossAccumulator([weight])
    a.backward(a_loss(3, weight))
    with pytest.raises(RuntimeError, match=r"began over gradients|changed between"):
        with b.window([9]) if declared else nullcontext():
            b.backward(a_loss(9, weight))
        a.finish()
        b.finish()


def test_an_accumulator_for_each_of_six_threads():
    interval = sys.getswitchinterval()

    def train(_):
        weight = new_weight()
        acc = LossAccumulator([weight])
        for _ in range(60):
            weight.grad = None
            for n in (3, 9):
                acc.backward(a_loss(n, weight))
            acc.finish()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(train, range(6)))  # raises what one of them raises
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("same", [True, False], ids=["one loss", "two losses of one graph"])
def test_a_second_backward_over_one_graph_says_how_to_write_it(same):
    weight = new_weight()
    hidden, labels = batches([5])[0]
    shared = (hidden.to(weight.dtype) * weight.sum()).tanh()
    first = fused_ce(shared, weight, labels)
    second = first if same else fused_ce(shared, weight, labels.flip(0))
    acc = LossAccumulator([weight])
    acc.backward(first)
    with pytest.raises(RuntimeError, match=r"give each loss to acc.backward once.*losses="):
        acc.backward(second)
    acc.discard_window()
