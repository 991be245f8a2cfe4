"""One rank of three fails in each way: the others raise an error soon, or the step is right.

A step is a whole one: forward, backward, gradients reduced, parameters changed. It happens on all
living ranks or on none, and one that happens is that of one process with all tokens and the whole
vocabulary. The table of `docs/trust.md` holds what happens, and names the test of each cell.
"""

import functools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.bounds import SAME_SUMS, STATISTIC
from support.loops import batches, distance, new_weight, raising

from fusedce import LossAccumulator, LossSum, fused_ce, fused_cross_entropy, fused_logprobs

RANKS, BAD = 3, 1  # the rank that fails is one in the middle
TIMEOUT, LATE = 4, 14  # seconds of the process group's timeout, and until an error must be raised
RATE = 0.5
PAGE = Path(__file__).parents[1] / "docs/trust.md"
SIZES = [3, 5]  # valid tokens of each rank's micro-batches


def all_tokens():
    parts = [one for rank in range(RANKS) for one in batches(SIZES, seed=rank)]
    return [torch.cat(x) for x in zip(*parts, strict=True)]


def accumulated(fault, rank, *, streaming):
    """A step in which each rank has tokens of its own; gradients are added up after the window."""
    bad, weight = rank == BAD, new_weight()
    acc, other = (LossAccumulator(grad_reduction="sum") for _ in range(2))

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
        other.metrics()
    if streaming:
        failed = ranks.error_of(backwards)  # a loop that goes on after it
        acc.finish([weight])
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
GONE = {
    "declared": f"this rank has come to leave a window, {NOT_CAME}",
    "streaming": f"this rank has come to finish a window, {NOT_CAME}",
    "sharded sum": SHARED,
    "sharded tokens": SHARED,
}
FAULTS = {
    "slow": dict.fromkeys(CLASSES),
    "NaN": dict.fromkeys(CLASSES, "nan"),
    "raises": {
        "declared": "in backward",
        "streaming": "this window can only be dropped: a backward has raised",
        "sharded sum": "softcap must be None",
        "sharded tokens": "softcap must be None",
    },
    "other dtype": {
        "declared": "out: loss_sum must be float32 or float64, got torch.bfloat16",
        # This loop goes on after the same error, with no micro-batch that counts.
        "streaming": "finish: no micro-batch since the last one: nothing to finish",
        "sharded sum": "hidden.dtype must be the same on all ranks that share the vocabulary",
        "sharded tokens": "hidden.dtype must be the same on all ranks that share the vocabulary",
    },
    "other order": {
        "declared": "ranks are at different places",
        "streaming": "ranks are at different places",
        "sharded sum": "reduction must be the same on all ranks that share the vocabulary",
        "sharded tokens": "function must be the same on all ranks that share the vocabulary",
    },
    "dies": GONE,
    "leaves": GONE,
    "stays away": GONE,
}
ENDS = ("dies", "leaves", "stays away")  # the group is of no use afterwards


def case(step, fault, rank):
    """``(parameters and loss, None, seconds)`` or ``(None, error, seconds)`` of a step."""
    begin = time.perf_counter()
    try:
        done, error = step(fault, rank), None
    except Exception as raised:
        done, error = None, f"{type(raised).__name__}: {raised}"
    return done, error, time.perf_counter() - begin


def run(cases):
    exact()  # what a first call loads is loaded before the processes are forked
    return ranks.run(cases, RANKS, timeout=TIMEOUT)


@functools.cache
def exact():
    """The parameters and the loss after a step of one process."""
    weight = new_weight()
    hidden, labels = all_tokens()
    acc = LossAccumulator()
    acc.backward(fused_ce(hidden, weight, labels))
    acc.finish([weight])
    return weight.detach() - RATE * weight.grad, acc.metrics()["loss"]


@functools.cache
def lasting():
    """Faults after which ranks go on: a right step follows each."""
    cases = {}
    for (kind, step), fault in ((k, f) for k in CLASSES.items() for f in FAULTS):
        if fault not in ENDS:
            cases[f"{kind}, {fault}"] = functools.partial(case, step, fault)
            cases[f"{kind}, {fault}, after"] = functools.partial(case, step, None)
    return run(cases)


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
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ENDS])
def test_a_fault_is_words_on_all_ranks_or_a_right_step(fault, kind):
    found = ranks.of(lasting(), f"{kind}, {fault}")
    words = FAULTS[fault][kind]
    if words is None:
        check_step(found, kind)
    elif words == "nan":  # the loss says so on all ranks, and no rank's gradient is finite
        for done, error, _ in found:
            assert error is None
            assert done[1] != done[1]
            assert not done[0].isfinite().any(-1).any()
    else:
        for done, error, seconds in found:
            assert done is None
            assert words in error
            assert seconds < TIMEOUT
    check_step(ranks.of(lasting(), f"{kind}, {fault}, after"), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("fault", ENDS)
def test_a_rank_that_is_gone_is_named_within_the_timeout(fault, kind):
    found = run({"gone": functools.partial(case, CLASSES[kind], fault)})["gone"]
    for rank, result in enumerate(found):
        if rank != BAD:
            done, error, seconds = result
            assert done is None
            assert FAULTS[fault][kind] in error
            assert seconds < LATE


def test_a_rank_that_dies_between_forward_and_backward():
    """Ranks exchange gradients in backward."""
    case_of = functools.partial(case, CLASSES["sharded tokens"], "dies in backward")
    found = run({"gone": case_of})["gone"]
    for done, error, seconds in (found[0], found[2]):
        assert done is None
        assert GONE["sharded tokens"] in error
        assert seconds < LATE
