"""One rank of three fails in each way: the others raise an error soon, or the step is right.

`FAULTS` are what may happen to a whole step: forward, backward, gradients reduced, parameters
changed. It happens on all living ranks or on none, and one that happens is that of one process with
all tokens and the whole vocabulary. The table of `docs/trust.md` holds what happens, and names the
test of each cell. `MISTAKES` are what else the loop of one rank may do with its accumulator: all
ranks raise one error. `tests/accumulate/test_schedules.py` draws such windows at random.
"""

import functools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.bounds import SAME_SUMS, STATISTIC
from support.loops import (
    a_loss,
    batches,
    distance,
    new_weight,
    raising,
    warm_up,
)
from support.versions import FSDP2_MEAN
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fusedce import (
    LossAccumulator,
    LossMeter,
    LossSum,
    fused_ce,
    fused_cross_entropy,
    fused_logprobs,
)
from fusedce.contract.labels import bad_label_code

RANKS, BAD = 3, 1  # the rank that fails is one in the middle
TIMEOUT, LATE = 4, 20  # seconds of a short timeout of the group, and until its error is raised
RATE = 0.5
PAGE = Path(__file__).parents[1] / "docs/trust.md"
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
            if bad and fault == "NaN":
                hidden = hidden * float("nan")
            out = fused_ce(hidden, weight, labels)
            if bad and fault == "other dtype":
                out = LossSum(out.loss_sum.bfloat16(), out.n_valid)
            if bad and fault == "raises" and i == 1:
                out = raising(out)
            acc.backward(out)

    if bad and fault == "other order":
        LossMeter().compute()
    if streaming:
        failed = ranks.error_of(backwards)  # a loop that goes on after it
        acc.finish()
        assert failed is None
    else:
        with acc.window(SIZES):
            backwards()
    loss = acc.metrics()["loss"]
    dist.all_reduce(weight.grad)
    return weight.detach() - RATE * weight.grad, loss


def sharded(fault, rank, *, per_token):
    """A step in which all ranks have the same tokens, and a third of the vocabulary each."""
    bad, group = rank == BAD, dist.group.WORLD
    hidden, labels = all_tokens()
    hidden.requires_grad_()
    weight = new_weight().detach().tensor_split(RANKS)[rank].requires_grad_()
    options = {"softcap": -1.0} if bad and fault == "raises" else {}
    if bad and fault == "NaN":
        weight = (weight.detach() * float("nan")).requires_grad_()
    if bad and fault == "other dtype":
        hidden, weight = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    if bad:
        interrupt(fault)
    if bad and fault == "other order":
        fused_cross_entropy(hidden, weight, labels, process_group=group)
    if per_token:
        stats = fused_logprobs(hidden, weight, labels, **options, process_group=group)
        loss = -stats.logprob.sum() / (labels >= 0).sum()
    else:
        loss = fused_ce(hidden, weight, labels, **options, process_group=group).mean()
    if bad:
        interrupt((fault or "").removesuffix(" in backward"))
    d_weight, d_hidden = torch.autograd.grad(loss, (weight, hidden))
    assert d_hidden.isfinite().all() == loss.isfinite()
    return weight.detach() - RATE * d_weight, loss.item()


def interrupt(fault):
    if fault == "dies":
        ranks.die()
    if fault == "leaves":
        dist.destroy_process_group()
        ranks.die()
    if fault == "slow":
        time.sleep(TIMEOUT / 2)
    if fault == "stays away":
        time.sleep(TIMEOUT + 2)
        ranks.die()


CLASSES = {
    "declared": functools.partial(accumulated, streaming=False),
    "streaming": functools.partial(accumulated, streaming=True),
    "sharded sum": functools.partial(sharded, per_token=False),
    "sharded tokens": functools.partial(sharded, per_token=True),
}
# Text of the error on every living rank; None: the step is right.
NOT_CAME = "and not all others have: the process group's timeout (4 s) is over, or one of them has"
SHARED = f"this rank has come to compute a loss over a sharded vocabulary, {NOT_CAME}"
SAME = "must be the same on all ranks that share the vocabulary"


def of_classes(*words):
    return dict(zip(CLASSES, words, strict=True))


GONE = of_classes(
    f"this rank has come to leave a window, {NOT_CAME}",
    f"this rank has come to finish a window, {NOT_CAME}",
    SHARED,
    SHARED,
)
FAULTS = {
    "slow": dict.fromkeys(CLASSES),
    "NaN": dict.fromkeys(CLASSES, "nan"),
    "raises": of_classes(
        "in backward", "this window can only be dropped: a backward has raised",
        "softcap must be None", "softcap must be None",
    ),
    "other dtype": of_classes(
        "out: loss_sum must be float32 or float64, got torch.bfloat16",
        # This loop goes on after the same error, with no micro-batch that counts.
        "finish: no micro-batch since the last one: nothing to finish",
        f"hidden.dtype {SAME}", f"hidden.dtype {SAME}",
    ),
    "other order": of_classes(
        "ranks are at different places", "ranks are at different places", f"reduction {SAME}",
        f"function {SAME}",
    ),
    **dict.fromkeys(("dies", "leaves", "stays away"), GONE),
}  # fmt: skip
ENDS = ("dies", "leaves", "stays away")  # the group is of no use afterwards


def case(step, fault, rank):
    """``(parameters and loss, None, seconds)`` or ``(None, error, seconds)`` of a step."""
    begin = time.perf_counter()
    try:
        done, error = step(fault, rank), None
    except Exception as raised:
        done, error = None, f"{type(raised).__name__}: {raised}"
    return done, error, time.perf_counter() - begin


@functools.cache
def exact():
    """The parameters and the loss after a step of one process."""
    weight = new_weight()
    hidden, labels = all_tokens()
    acc = LossAccumulator()
    acc.backward(fused_ce(hidden, weight, labels))
    acc.finish([weight])
    return weight.detach() - RATE * weight.grad, acc.metrics()["loss"]


# Faults after which ranks go on; a right step follows each.
LASTING = [(fault, kind) for kind in CLASSES for fault in FAULTS if fault not in ENDS]
lasting = ranks.shared(
    {
        (fault, kind, then): functools.partial(case, CLASSES[kind], then)
        for fault, kind in LASTING
        for then in (fault, None)
    },
    RANKS,
    timeout=TIMEOUT,
)


def check_step(found, kind):
    """The step of each rank is that of one process."""
    parameters, loss = exact()
    for rank, (done, error, _) in enumerate(found):
        assert error is None
        mine = parameters.tensor_split(RANKS)[rank] if kind.startswith("sharded") else parameters
        assert distance(done[0], mine) < SAME_SUMS
        assert done[1] == pytest.approx(loss, rel=STATISTIC)


def test_the_page_holds_every_fault_and_class():
    head, _, *rows = PAGE.read_text().split("<!-- faults -->")[1].strip().splitlines()
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in (head, *rows)]
    assert cells[0][2:] == list(CLASSES)
    said = {row[0]: dict(zip(CLASSES, row[2:], strict=True)) for row in cells[1:]}
    kinds = {None: "right", "nan": "NaN"}
    assert said == {
        fault: {kind: kinds.get(words, "error") for kind, words in of_kind.items()}
        for fault, of_kind in FAULTS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind"), LASTING)
def test_a_fault_is_words_on_all_ranks_or_a_right_step(fault, kind):
    exact()  # what a first call loads is loaded before the processes are forked
    found, words = lasting((fault, kind, fault)), FAULTS[fault][kind]
    if words is None:
        check_step(found, kind)
    for done, error, seconds in found:
        if words == "nan":  # the loss says so on all ranks, and no rank's gradient is finite
            assert error is None
            assert done[1] != done[1]
            assert not done[0].isfinite().any(-1).any()
        elif words is not None:
            assert done is None
            assert words in error
            assert seconds < TIMEOUT
    check_step(lasting((fault, kind, None)), kind)


def check_gone(kind, fault, words):
    exact()
    gone = functools.partial(case, CLASSES[kind], fault)
    found = ranks.run({"gone": gone}, RANKS, timeout=TIMEOUT)["gone"]
    for done, error, seconds in (found[rank] for rank in range(RANKS) if rank != BAD):
        assert done is None
        assert words in error
        assert seconds < LATE


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("fault", ENDS)
def test_a_rank_that_is_gone_is_named_within_the_timeout(fault, kind):
    check_gone(kind, fault, FAULTS[fault][kind])


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
