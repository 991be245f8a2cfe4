"""The watch under engines that replace gradients, or hold them: no alarm in right code.

Each engine trains windows of one or two micro-batches, as they should be and with a mistake.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from support import parallel, ranks
from support.bounds import SAME_SUMS
from support.loops import distance, windowed
from support.versions import FSDP2_MEAN
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator

EITHER = (False, True)


def ddp(**options):
    return lambda: DistributedDataParallel(parallel.Model(), **options)


def fsdp1(original, frozen=False, **options):
    def make():
        model = parallel.Model()
        if frozen:  # FSDP1 zeroes the part of a flat gradient that is a frozen parameter's
            model.frozen = torch.nn.Linear(5, 3).requires_grad_(False)
        return FullyShardedDataParallel(
            model, use_orig_params=original, device_id=torch.device("cpu"), **options
        )

    return make


def fsdp2(**options):
    return lambda: fully_shard(parallel.Model(), **options)


def hsdp():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return fully_shard(parallel.Model(), mesh=mesh)


@contextlib.contextmanager
def sync_last(model, last):
    """The engine's own way to communicate in the last micro-batch alone."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
        yield


@contextlib.contextmanager
def all_reduce_last(model, last):
    model.set_requires_all_reduce(last)
    yield


ENGINES = {
    "ddp": (ddp(), sync_last),
    "ddp, views": (ddp(gradient_as_bucket_view=True), sync_last),
    "ddp, static graph": (ddp(static_graph=True), None),
    "ddp, unused": (ddp(find_unused_parameters=True, gradient_as_bucket_view=True), None),
    "fsdp1": (fsdp1(False), sync_last),
    "fsdp1, original": (fsdp1(True), sync_last),
    "fsdp1, kept whole": (
        fsdp1(True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        sync_last,
    ),
    "fsdp1, frozen": (fsdp1(True, frozen=True), sync_last),
    "fsdp2": (fsdp2(), sync_last),
    "fsdp2, kept whole": (fsdp2(reshard_after_forward=False), sync_last),
    "fsdp2, resharded": (fsdp2(reshard_after_forward=True), sync_last),
    "fsdp2, fp32": (fsdp2(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)), sync_last),
    "hsdp": (hsdp, all_reduce_last),
}
LEFT, ZEROED = "zero_grad() is missing", "zero_grad() was called inside a window"
WRITTEN, LATE = "changed inside a window by something", "between the last micro-batch and finish"
# DDP with views makes its buckets anew once, and forgets whose gradients they hold: there a missing
# zero_grad is named a step later.
MISTAKES = {  # name: words of the error
    None: None,
    "never zeroed": LEFT,
    "zeroed inside": (ZEROED, WRITTEN),
    "clipped before finish": LATE,
}


def norms(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False)


def train(model, silent, streaming, mistake, to_none, rank):
    """The gradients of each window; raises what the accumulator does."""
    acc = LossAccumulator(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for window in range(len(parallel.WINDOWS)):
        micro = parallel.micro_batches(window, rank)
        counts = [(y != -100).sum() for _, y in micro]

        def loop(micro=micro):
            for i, one in enumerate(micro):
                last = i == len(micro) - 1
                if i and mistake == "zeroed inside":
                    model.zero_grad(set_to_none=to_none)
                with silent(model, last) if silent else contextlib.nullcontext():
                    acc.backward(model(*one))
            if mistake == "clipped before finish":
                norms(model)

        windowed(acc, streaming, None, counts, loop)
        found.append([parallel.whole(p.grad) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        if mistake != "never zeroed":
            model.zero_grad(set_to_none=to_none)
    return found


def engine(name, rank):
    make, silent = ENGINES[name]
    exact = parallel.single_process(2, rate=0.0)[0]
    cases = itertools.product(
        EITHER, MISTAKES.items(), EITHER, (None, silent) if silent else (None,)
    )
    for streaming, (mistake, words), to_none, how in cases:
        if mistake == "clipped before finish" and (not streaming or "frozen" in name):
            continue
        # FSDP holds what zero_grad would reach; FSDP1 itself writes beside a frozen parameter.
        if mistake == "zeroed inside" and ((how and "ddp" not in name) or "frozen" in name):
            continue
        case = name, streaming, mistake, to_none, how is not None
        try:
            found, error = train(make(), how, streaming, mistake, to_none, rank), None
        except RuntimeError as raised:
            found, error = None, str(raised)
        if words is None:
            assert error is None, (case, error)
            if "fsdp1" not in name:  # its flat gradients are compared in other tests
                for grads, right in zip(found, exact, strict=False):
                    for p, grad in zip(grads, right, strict=True):
                        assert distance(p, grad) <= SAME_SUMS, case
        else:
            assert error is not None, case
            assert any(x in error for x in ((words,) if isinstance(words, str) else words)), (
                case, error,
            )  # fmt: skip


engines = ranks.shared({name: functools.partial(engine, name) for name in ENGINES})


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=FSDP2_MEAN if "sdp2" in x or x == "hsdp" else ()) for x in ENGINES],
)
def test_an_engine_is_right_and_mistakes_are_named(name):
    engines(name)


# ---- gradients inside FSDP2 and HSDP --------------------------------------------------------


def micro_of(rank):
    micro = parallel.micro_batches(0, rank)
    return micro, [(y != -100).sum() for _, y in micro]


def error_of(acc, model, rank, streaming, switch=lambda last: None):
    """The error of a window of the model's micro-batches."""
    micro, counts = micro_of(rank)

    def loop():
        for i, one in enumerate(micro):
            switch(i == len(micro) - 1)
            acc.backward(model(*one))

    return ranks.error_of(windowed, acc, streaming, None, counts, loop)


def assert_exact(model):
    exact, *_ = parallel.single_process(2)
    for p, grad in zip(model.parameters(), exact[0], strict=True):
        assert distance(parallel.whole(p.grad), grad) <= SAME_SUMS


on_two_ranks = ranks.together()


@FSDP2_MEAN
@on_two_ranks
def test_gradients_held_inside_are_refused_and_dropped(rank):
    """With no communication in a whole window, and where a window is dropped in the middle."""
    fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for make, switch in (
        (fsdp2(), "set_requires_gradient_sync"),
        (fsdp2(mp_policy=fp32), "set_requires_gradient_sync"),
        (hsdp, "set_requires_all_reduce"),
    ):
        model = make()
        acc, communicate = LossAccumulator(model), getattr(model, switch)
        for streaming in EITHER:
            communicate(False)
            error = error_of(acc, model, rank, streaming)
            assert "FSDP2 still holds gradients inside, though the window ends" in error
            acc.discard_window()
        communicate(True)
        assert error_of(acc, model, rank, False) is None
        assert_exact(model)
        model.zero_grad()
        communicate(False)
        acc.backward(model(*micro_of(rank)[0][0]))
        model.zero_grad()  # does not reach them
        acc.discard_window()
        assert error_of(acc, model, rank, False, communicate) is None
        assert_exact(model)
        del acc


@FSDP2_MEAN
@on_two_ranks
def test_gradients_that_an_accumulator_finds_inside_are_named(rank):
    model = fsdp2()()
    model.set_requires_gradient_sync(False)
    model(*micro_of(rank)[0][0]).mean().backward()
    acc = LossAccumulator(model)
    error = error_of(acc, model, rank, False, model.set_requires_gradient_sync)
    assert "FSDP2 still holds gradients inside, of micro-batches before this window" in error


@FSDP2_MEAN
@on_two_ranks
def test_a_plain_model_is_watched_beside_one_of_fsdp2(rank):
    fully_shard(parallel.Model())
    model = parallel.Model()
    acc = LossAccumulator(model)

    def zeroes(last):
        model.zero_grad()

    assert WRITTEN in error_of(acc, model, rank, True, zeroes)


@FSDP2_MEAN
@on_two_ranks
def test_a_list_of_fsdp2s_parameters_is_refused_where_it_hides_gradients(rank):
    model = fsdp2()()
    acc = LossAccumulator(model.parameters())
    assert error_of(acc, model, rank, False) is None
    model.zero_grad()
    error = error_of(acc, model, rank, False, model.set_requires_gradient_sync)
    assert "with FSDP2 the module and not its parameters" in error


@pytest.mark.parametrize("views", EITHER)
def test_two_declared_windows_before_a_step_of_ddp(views):
    ranks.shared({"two": functools.partial(two_windows, views)})("two")


def two_windows(views, rank):
    model = ddp(gradient_as_bucket_view=views)()
    acc, optimizer = LossAccumulator(model), torch.optim.SGD(model.parameters(), lr=0.0)
    exact = parallel.single_process(2, rate=0.0)[0]
    for to_none in (True, False, False):
        for window in range(2):
            micro = parallel.micro_batches(window, rank)
            with acc.window([(y != -100).sum() for _, y in micro]):
                for i, one in enumerate(micro):
                    with sync_last(model, i == len(micro) - 1):
                        acc.backward(model(*one))
        for p, a, b in zip(model.parameters(), *exact[:2], strict=True):
            assert distance(p.grad, a + b) <= 2 * SAME_SUMS
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
