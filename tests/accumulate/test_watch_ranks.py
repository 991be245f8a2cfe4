"""Every guard and clipping under engines that replace gradients, or hold them.

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
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator, fused_ce

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
LEFT, LATE = "zero_grad() is missing", "between the last micro-batch and finish"
STEP = "SGD.step() inside an open window: 1 "
EMPTY, NO_CLIPPING = "no parameter given has a .grad to correct", "cannot clip gradients"


def is_plain(name):
    """Whether gradients are no DTensors, so that their versions show what clips them."""
    return not name.startswith(("fsdp2", "hsdp"))


def train(model, acc, silent, streaming, rank, *, inside=None, last=None, after=None):
    """The gradients of each window; ``inside``, ``last`` and ``after`` are run in it or after it.

    Raises what the accumulator does.
    """
    parameters = list(model.parameters())  # after a forward FSDP2's module may show others
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    found = []
    for window in range(len(parallel.WINDOWS)):
        micro = parallel.micro_batches(window, rank)
        counts = [(y != -100).sum() for _, y in micro]

        def loop(micro=micro):
            for i, one in enumerate(micro):
                if i and inside:
                    inside(optimizer)
                is_last = i == len(micro) - 1
                with silent(model, is_last) if silent else contextlib.nullcontext():
                    acc.backward(model(*one))
            if last:
                last(model)

        windowed(acc, streaming, None, counts, loop)
        if after:
            after(window)
        found.append([parallel.whole(p.grad) for p in parameters if p.grad is not None])
        optimizer.step()
        if after is not keep:
            optimizer.zero_grad(set_to_none=window % 2 == 0)
    return found


def keep(window):
    """Leave gradients for the next window."""


def stepped(optimizer):
    optimizer.step()


def clipped(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def evaluated(model):
    """A forward pass between the last backward and the window's end is no write."""
    with torch.no_grad():
        model(*parallel.micro_batches(0, 0)[0])


def assert_equal(name, found, exact, case):
    if name.startswith("fsdp1"):
        return  # its flat gradients are compared in other tests
    for grads, right in zip(found, exact, strict=True):
        for p, grad in zip(grads, right, strict=True):
            assert distance(p, grad) <= SAME_SUMS, case


def engine(name, rank):
    make, silent = ENGINES[name]
    exact = parallel.single_process(2, rate=0.0)[0]
    norms = [float(torch.nn.utils.get_total_norm(grads)) for grads in exact]
    for streaming, how in itertools.product(EITHER, (None, silent) if silent else (None,)):
        case = name, streaming, how is not None
        model = make()
        found = train(model, LossAccumulator(model), how, streaming, rank, last=evaluated)
        assert_equal(name, found, exact, case)

        model = make()
        acc = LossAccumulator(model)

        def clips(window, acc=acc, case=case):
            norm = acc.clip_grad_norm_(norms[window] / 4)
            assert type(norm) is torch.Tensor
            assert float(norm) == pytest.approx(norms[window], rel=1e-5), case

        found = train(model, acc, how, streaming, rank, after=clips)
        rounded = [[g * (n / 4 / (n + 1e-6)) for g in x] for x, n in zip(exact, norms, strict=True)]
        assert_equal(name, found, rounded, case)

        del acc, clips  # one accumulator of these ranks at a time
        mistakes = [(STEP, {"inside": stepped}), (NO_CLIPPING, {})]
        if streaming:
            mistakes.append((LEFT, {"after": keep}))
            if is_plain(name) and "frozen" not in name:
                mistakes.append((LATE, {"last": clipped}))
            mistakes.append((EMPTY, {}))
        for words, what in mistakes:
            model = make()
            other = make() if words == EMPTY else model
            acc = LossAccumulator(other)
            if words == NO_CLIPPING:
                what = {"inside": lambda _, acc=acc: acc.clip_grad_norm_(1.0)}
            error = ranks.error_of(train, model, acc, how, streaming, rank, **what)
            del acc, what
            assert error is not None, (case, words)
            assert words in error, (case, words, error)


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


@on_two_ranks
@FSDP2_MEAN
def test_gradients_held_inside_are_refused_and_dropped(rank):
    """With no communication in a whole window, and where a window is dropped in the middle."""
    wider = MixedPrecisionPolicy(reduce_dtype=torch.float64)  # has a buffer of its own
    for make, switch in (
        (fsdp2(), "set_requires_gradient_sync"),
        (fsdp2(mp_policy=wider), "set_requires_gradient_sync"),
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


@on_two_ranks
@FSDP2_MEAN
def test_gradients_that_an_accumulator_finds_inside_are_named(rank):
    """A streaming window would rescale them."""
    model = fsdp2()()
    model.set_requires_gradient_sync(False)
    model(*micro_of(rank)[0][0]).mean().backward()
    acc = LossAccumulator(model)
    error = error_of(acc, model, rank, True, model.set_requires_gradient_sync)
    assert "FSDP2 still holds gradients inside, of micro-batches before this window" in error


@on_two_ranks
@FSDP2_MEAN
def test_a_list_of_fsdp2s_parameters_is_right_or_has_nothing_to_divide(rank):
    """The list does not know what FSDP2 holds inside."""
    model = fsdp2()()
    for streaming in EITHER:
        acc = LossAccumulator(model.parameters())
        assert error_of(acc, model, rank, streaming, model.set_requires_gradient_sync) is None
        assert_exact(model)
        model.zero_grad()
    model.set_requires_gradient_sync(False)
    assert EMPTY in error_of(acc, model, rank, True)


# ---- clipping where torch's norm is that of one rank --------------------------------------------


@on_two_ranks
def test_clipping_of_a_part_is_refused(rank):
    """FSDP1 around a part of a model, or its parameters in a list; a plain shard of a head."""
    whole = fsdp1(True)()
    model = parallel.Model()
    model.body = FullyShardedDataParallel(
        model.body, use_orig_params=True, device_id=torch.device("cpu")
    )
    for trained, given in ((whole, whole.parameters()), (model, model)):
        acc = LossAccumulator(given)
        assert error_of(acc, trained, rank, False, lambda last: None) is None
        with pytest.raises(RuntimeError, match="needs FSDP1 around the whole model"):
            acc.clip_grad_norm_(1.0)
        del acc
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    shard = parallel.Model().head.weight.detach().chunk(2)[rank].clone().requires_grad_()
    hidden, labels = parallel.micro_batches(0, 0)[0]
    acc = LossAccumulator.from_mesh(mesh, [], [shard])
    acc.backward(fused_ce(hidden, shard, labels, process_group=mesh.get_group()))
    acc.finish()
    with pytest.raises(RuntimeError, match=r"1 of 2 ranks share this window.*DTensor.from_local"):
        acc.clip_grad_norm_(1.0)


@on_two_ranks
def test_a_dtensor_of_a_vocabulary_is_guarded_and_clipped(rank):
    """Writes into it are not seen before finish: torch notes none."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = parallel.Model().head.weight.detach()
    shard = torch.nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    hidden, labels = parallel.micro_batches(0, 0)[0]
    exact = weight.clone().requires_grad_()
    fused_ce(hidden, exact, labels).mean().backward()
    optimizer = torch.optim.SGD([shard], lr=0.0)
    acc = LossAccumulator.from_mesh(mesh, [], [shard])

    def loop(then=lambda: None):
        acc.backward(fused_ce(hidden, shard, labels))
        then()

    for streaming in EITHER:
        windowed(acc, streaming, None, [5], loop)
        assert distance(parallel.whole(shard.grad), exact.grad) <= SAME_SUMS
        norm = acc.clip_grad_norm_(float(exact.grad.norm()) / 2)
        assert float(norm) == pytest.approx(float(exact.grad.norm()), rel=1e-5)
        assert distance(parallel.whole(shard.grad), exact.grad / 2) <= 1e-5
        if streaming:
            loop()
            with pytest.raises(RuntimeError, match="zero_grad"):
                acc.finish()
            acc.discard_window()
        shard.grad = None
    for refused in (optimizer.step, lambda: acc.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"SGD.step\(\) inside|cannot clip"):
            loop(refused)
        acc.discard_window()
