"""One rank of three fails in each way, and the others raise an error soon.

A rank may be gone in the middle of a step (`GONE`): no parameter changes on any other.
`MISTAKES` are what the loop of one rank may do with its accumulator: all ranks raise one error.
`tests/accumulate/test_schedules.py` draws such windows at random.
"""

import functools
import time

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.loops import (
    a_loss,
    batches,
    new_weight,
    warm_up,
)
from support.versions import FSDP2_MEAN
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusedce import (
    LossAccumulator,
    LossMeter,
    fused_ce,
    fused_logprobs,
)
from fusedce.contract.labels import bad_label_code

RANKS, BAD = 3, 1  # the rank that fails is one in the middle
TIMEOUT, LATE = 4, 20  # seconds of a short timeout of the group, and until its error is raised
SIZES = [3, 5]  # valid tokens of each rank's micro-batches


def all_tokens():
    parts = [one for rank in range(RANKS) for one in batches(SIZES, seed=rank)]
    return [torch.cat(x) for x in zip(*parts, strict=True)]


def accumulated(fault, rank, *, streaming):
    """A step in which each rank has tokens of its own; gradients are added up after the window."""
    bad, weight = rank == BAD, new_weight()
    acc = LossAccumulator([weight], grad_reduction="sum")

    def backwards():
        for i, (hidden, labels) in enumerate(batches(SIZES, seed=rank)):
            if bad and i == 1:
                interrupt(fault)
            acc.backward(fused_ce(hidden, weight, labels))

    if streaming:
        backwards()
        acc.finish()
    else:
        with acc.window(SIZES):
            backwards()
    dist.all_reduce(weight.grad)


def sharded(fault, rank, *, per_token):
    """A step in which all ranks have the same tokens, and a third of the vocabulary each."""
    bad, group = rank == BAD, dist.group.WORLD
    hidden, labels = all_tokens()
    hidden.requires_grad_()
    weight = new_weight().detach().tensor_split(RANKS)[rank].requires_grad_()
    if bad:
        interrupt(fault)
    if per_token:
        stats = fused_logprobs(hidden, weight, labels, process_group=group)
        loss = -stats.logprob.sum() / (labels >= 0).sum()
    else:
        loss = fused_ce(hidden, weight, labels, process_group=group).mean()
    if bad:
        interrupt(fault.removesuffix(" in backward"))
    torch.autograd.grad(loss, (weight, hidden))


def interrupt(fault):
    if fault == "dies":
        ranks.die()
    if fault == "leaves":
        dist.destroy_process_group()
        ranks.die()
    if fault == "stays away":
        time.sleep(TIMEOUT + 2)
        ranks.die()


CLASSES = {
    "declared": functools.partial(accumulated, streaming=False),
    "streaming": functools.partial(accumulated, streaming=True),
    "sharded sum": functools.partial(sharded, per_token=False),
    "sharded tokens": functools.partial(sharded, per_token=True),
}
# Text of the error on every living rank.
NOT_CAME = "and not all others have: the process group's timeout (4 s) is over, or one of them has"
SHARED = f"this rank has come to compute a loss over a sharded vocabulary, {NOT_CAME}"
GONE = {
    "declared": f"this rank has come to leave a window, {NOT_CAME}",
    "streaming": f"this rank has come to finish a window, {NOT_CAME}",
    "sharded sum": SHARED,
    "sharded tokens": SHARED,
}


def check_gone(kind, fault, words):
    warm_up(0)  # what a first call loads is loaded before the processes are forked
    gone = functools.partial(ranks.timed, CLASSES[kind], fault)
    found = ranks.run({"gone": gone}, RANKS, timeout=TIMEOUT)["gone"]
    for error, seconds in (found[rank] for rank in range(RANKS) if rank != BAD):
        assert words in error
        assert seconds < LATE


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("fault", ["dies", "leaves", "stays away"])
def test_a_rank_that_is_gone_is_named_within_the_timeout(fault, kind):
    check_gone(kind, fault, GONE[kind])


def test_a_rank_that_dies_between_forward_and_backward():
    """Ranks exchange gradients in backward."""
    check_gone("sharded tokens", "dies in backward", SHARED)


# ---- mistakes of one rank's loop ----------------------------------------------------------------


def train(acc, counts, sizes=None, weight=None):
    with acc.window(counts):
        for n in sizes or counts:
            acc.backward(a_loss(n, weight))


def stream(acc, sizes, parameters=None):
    weight = new_weight()
    for n in sizes:
        acc.backward(a_loss(n, weight))
    acc.finish([weight] if parameters is None else parameters)


def inside(acc, action, before=0):
    """A window of two micro-batches, in which something else is done after some of them."""
    with acc.window([2, 2]):
        for _ in range(before):
            acc.backward(a_loss(2))
        action(acc)


def raises(acc):
    raise KeyError("labels")


def raises_on_the_last_rank(acc):
    if dist.get_rank() == RANKS - 1:
        raises(acc)


def divides(acc):
    for _ in range(2):
        (acc.scale(a_loss(2)) / 4).backward()


def evaluates(acc, n_valid=3):
    meter = LossMeter()
    meter.update((torch.tensor(1.0), torch.tensor(n_valid)))
    meter.compute()


def bad_label(acc):
    with acc.window([2]):
        acc.backward((torch.tensor(1.0, requires_grad=True), torch.tensor(BAD_LABEL)))


BAD_LABEL = int(bad_label_code(torch.tensor(5), torch.tensor(99)))
USES = {
    "window": lambda acc: train(acc, [2]),
    "streaming": lambda acc: stream(acc, [2, 2]),
}
one, streams = USES.values()
right = functools.partial(train, counts=[2, 2])
SETTINGS = {
    "grad_reduction": ("mean", "sum"),
    "on_empty": ("zero", "skip"),
    "backward_divisor": (1, 2.5),
}
# What the failing rank does, what the others do meanwhile, and the error that all of them raise.
MISTAKES = {
    "bad counts": (lambda acc: train(acc, [2, -1]), right, "counts[1] must be >= 0, got -1"),
    "other number": (
        right, one, "different numbers of micro-batches in this window: 1 on rank 2, 2 on rank 1",
    ),
    "finishes": (lambda acc: acc.finish([]), streams, "no micro-batch since the last one"),
    "evaluates": (evaluates, right, "2 to open a window, 1 to compute a LossMeter"),
    "reads inside": (
        lambda acc: inside(acc, LossAccumulator.metrics, 1), right,
        "cannot read metrics: 1 of 2 declared",
    ),
    "other count": (
        lambda acc: train(acc, [2, 5], [2, 2]), right,
        "micro-batch 1 was declared with 5 valid tokens, its loss counts 2",
    ),
    "fewer": (
        lambda acc: train(acc, [2, 2], [2]), right, "2 micro-batches were declared, 1"
    ),
    "bad label": (bad_label, one, "got 99 at flattened position 5"),
    "bad label in evaluation": (
        lambda acc: evaluates(acc, BAD_LABEL), evaluates, "got 99 at flattened position 5",
    ),
    "no parameters": (lambda acc: stream(acc, [2], []), streams, "no parameter given has a .grad"),
    "factor": (
        lambda acc: inside(acc, divides), right, "the loss was multiplied by 0.25 after scale()",
    ),
    **{
        f"{name} of {how}": (
            lambda _, x={name: other}, use=use: use(LossAccumulator(name="new", **x)),
            lambda _, x={name: usual}, use=use: use(LossAccumulator(name="new", **x)),
            f"{name} must be the same on all ranks: it is {usual!r} on 2 and {other!r} on 1 of the",
        )
        for name, (usual, other) in SETTINGS.items()
        for how, use in USES.items()
    },
}  # fmt: skip
# The failing rank raises its own error, the others hear of it.
TOLD = {
    "raises": (lambda acc: inside(acc, raises), right, "KeyError: 'labels'"),
    "two raise": (
        lambda acc: inside(acc, raises), lambda acc: inside(acc, raises_on_the_last_rank, 2),
        "KeyError: 'labels'",
    ),
    "more": (
        lambda acc: train(acc, [2, 2], [2, 2, 2]), right,
        "2 micro-batches were declared, this is number 3",
    ),
}  # fmt: skip


def mistaken(name, rank):
    """``(error, seconds, norm of a gradient of a window that follows)``."""
    wrong, meanwhile, _ = (MISTAKES | TOLD)[name]
    acc = LossAccumulator()
    error, seconds = ranks.timed(wrong if rank == BAD else meanwhile, acc)
    acc.discard_window()
    weight = new_weight()
    train(LossAccumulator(name="after"), [3], weight=weight)
    return error, seconds, float(weight.grad.norm())


mistakes = ranks.shared(
    {"warm up": warm_up, **{x: functools.partial(mistaken, x) for x in MISTAKES | TOLD}},
    RANKS,
    timeout=LATE,
)


def check_told(found, name):
    """All ranks have raised the error of one, soon, and trained afterwards."""
    own = found[BAD][0]
    assert (MISTAKES | TOLD)[name][2] in own
    for rank, (told, seconds, after) in enumerate(found):
        if rank == BAD or (name == "two raise" and rank > BAD):
            assert told == own
        elif name in MISTAKES:
            assert ranks.anywhere(told) == ranks.anywhere(own)
        else:
            words = f"{own.removeprefix('RuntimeError: ')} (on rank {BAD})"
            assert told == f"RuntimeError: {words}"
        assert seconds < ranks.SOON
        assert after > 0


@pytest.mark.parametrize("name", MISTAKES | TOLD)
def test_all_ranks_raise_the_error_of_one(name):
    check_told(mistakes(name), name)


@pytest.mark.parametrize("name", ["no parameters", "bad counts"])
def test_an_error_of_one_rank_in_the_very_first_exchange(name):
    """The accumulators' group is not made yet."""
    check_told(ranks.shared({name: functools.partial(mistaken, name)}, RANKS)(name), name)


# ---- a rank that comes late -----------------------------------------------------------------


def comes_late(engine, rank):
    """Rank 1 has more micro-batches than rank 0, under an engine that waits in each of them."""
    model = engine(parallel.Model())
    acc, one = LossAccumulator(), parallel.micro_batches(0, 0)[0]

    def loop():
        for _ in range(2 + rank):
            acc.backward(model(*one))
        acc.finish(model.parameters())

    return ranks.timed(loop)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [DistributedDataParallel, pytest.param(fully_shard, marks=FSDP2_MEAN)]
)
def test_waiting_ends_with_the_groups_timeout_in_words(engine):
    cases = {"first": warm_up, "late": functools.partial(comes_late, engine)}
    found = ranks.shared(cases, timeout=TIMEOUT, backend="cpu:gloo")
    (waits, seconds), (_, other) = found("late")
    assert "this rank has come to finish a window, and not all others have" in waits
    assert f"the process group's timeout ({TIMEOUT} s) is over" in waits
    assert "the same number of micro-batches" in waits
    assert TIMEOUT - 1 < max(seconds, other) < LATE
