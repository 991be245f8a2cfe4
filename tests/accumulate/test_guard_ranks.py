"""Mistakes that only ranks can make: with pipelines, replicas, sharded heads, DDP and FSDP."""

import functools

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.bounds import SAME_MODEL, SAME_SUMS
from support.loops import H, V, batches, distance, new_weight, windowed
from support.versions import FSDP2_MEAN
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator, fused_ce


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


# ---- pipelines ----------------------------------------------------------------------------------


def pipeline(kind, per_rank, streaming, rank, **options):
    """Layers in ``2 * per_rank`` stages; the error, or how far the gradients are from exact."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    acc = LossAccumulator.from_mesh(mesh, [], pipeline_dim="pp")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(2 * per_rank)]
    mine = layers[rank::2]
    acc.guard(sgd([p for layer in mine for p in layer.parameters()]))
    stages = [
        PipelineStage(layer, rank + 2 * i, len(layers), torch.device("cpu"))
        for i, layer in enumerate(mine)
    ]

    def loss_fn(out, labels):
        return acc.scale((out.square().sum(), (labels >= 0).sum()))

    several = stages if per_rank > 1 else stages[0]
    schedule = kind(several, 4, loss_fn=loss_fn, **options)
    x, labels = torch.randn(8, 4), torch.tensor([0, 1, -1, 2, -1, -1, 3, 4])
    pairs = [(layers[i], torch.nn.Linear(4, 4)) for i in range(len(layers))]
    for layer, exact in pairs:
        exact.load_state_dict(layer.state_dict())

    def step():
        arguments = {"target": labels} if rank else {}
        run = functools.partial(schedule.step, *(() if rank else (x,)), **arguments)
        trained = [p for layer in mine for p in layer.parameters()]
        windowed(acc, streaming, trained, [2, 1, 0, 2] if rank else (), run)

    error = ranks.error_of(step)
    whole = torch.nn.Sequential(*(exact for _, exact in pairs))
    (whole(x).square().sum() / 5).backward()
    far = [distance(a.weight.grad, b.weight.grad) for a, b in pairs[rank::2]]
    return error, max(far)


PIPELINES = {
    f"{kind.__name__}, {'streaming' if streaming else 'window'}": functools.partial(
        pipeline, kind, per_rank, streaming
    )
    for kind, per_rank in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2))
    for streaming in (False, True)
}


@functools.cache
def pipelines():
    right = {name: functools.partial(case, scale_grads=False) for name, case in PIPELINES.items()}
    return ranks.run(right | {f"{name}, divided": case for name, case in PIPELINES.items()})


@pytest.mark.parametrize("name", PIPELINES)
def test_a_guarded_pipeline_is_right_or_refused_on_all_stages_where_it_divides_gradients(name):
    for error, far in ranks.of(pipelines(), name):
        assert error is None
        assert far <= SAME_MODEL
    (error, _), (same, _) = ranks.of(pipelines(), f"{name}, divided")
    assert error == same
    assert "divides all gradients by its 4 micro-batches" in error
    assert "scale_grads=False" in error


# ---- ranks that hold the same tokens ------------------------------------------------------------


class Split(torch.nn.Module):
    """Two layers that tensor parallelism divides, and a head that it does not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = torch.nn.Linear(H, 4 * H), torch.nn.Linear(4 * H, H)
        self.head = torch.nn.Linear(H, V, bias=False)

    def forward(self, hidden, labels):
        hidden = self.down(torch.tanh(self.up(hidden)))
        return fused_ce(hidden, self.head.weight, labels)


def replicas(right, rank):
    """A model split over two ranks that hold the same tokens, counted once or twice."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    model = Split()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    acc = LossAccumulator.from_mesh(mesh, []) if right else LossAccumulator()
    acc.guard(sgd(model.parameters()), model)

    def loop():
        for step in range(2):
            model.zero_grad()
            for one in batches([3, 5], step):
                acc.backward(model(*one))
            acc.finish(model.parameters())

    error = ranks.error_of(loop)
    acc.discard_window()
    return error, acc.state_dict()["n_valid"]


def one_batch(rank):
    """Ranks of FSDP2 that train on the same batch, as one does to try a loop, are no replicas."""
    model, acc = fully_shard(Split()), LossAccumulator()
    acc.guard(optimizer := sgd(model.parameters()), model)
    for _ in range(3):
        acc.backward(model(*batches([5])[0]))
        acc.finish(model.parameters())
        optimizer.zero_grad()
    return acc.metrics()["n_tokens"]


def experts(rank):
    """Layers divided over ranks that hold tokens of their own, though equally many, are right."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    expert = distribute_tensor(torch.ones(2, H), mesh, [Shard(0)])
    expert = torch.nn.Parameter(expert)
    weight = torch.nn.Parameter(torch.zeros(V, H))  # all tokens cost log(V) at first
    optimizer = sgd([expert, weight])
    acc = LossAccumulator()
    acc.guard(optimizer)
    for step in range(3):
        for hidden, labels in batches([3, 5], 10 * step + rank):
            acc.backward(fused_ce(hidden * expert.to_local().mean(), weight, labels))
        acc.finish([expert, weight])
        optimizer.step()
        optimizer.zero_grad()
    return acc.metrics()["n_tokens"]


def sharded(case, rank):
    """A sharded vocabulary, whose ranks hold the same tokens and count once."""
    weight = new_weight().detach().chunk(2)[rank].clone().requires_grad_()
    acc = LossAccumulator(grad_reduction="sum")
    if case == "right":
        acc = LossAccumulator.from_mesh(
            init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), [], grad_reduction="sum"
        )
    acc.guard(sgd([weight]))

    def loop():
        (hidden, labels), *_ = batches([5])
        for _ in range(2):
            weight.grad = None
            acc.backward(fused_ce(hidden, weight, labels, process_group=dist.group.WORLD))
            acc.finish([weight])

    return ranks.error_of(loop)


REPLICAS = {
    "counted twice": functools.partial(replicas, False),
    "counted once": functools.partial(replicas, True),
    "experts": experts,
    "one batch": one_batch,
    **{name: functools.partial(sharded, name) for name in ("right", "twice")},
}


@functools.cache
def found_replicas():
    return ranks.run(REPLICAS)


@pytest.mark.parametrize("name", ["counted twice", "twice"])
def test_ranks_that_hold_the_same_tokens_are_refused(name):
    found = [x if isinstance(x, str) else x[0] for x in ranks.of(found_replicas(), name)]
    assert found[0] == found[1]
    assert "RuntimeError: ranks [0, 1] of this accumulator hold the same tokens" in found[0]
    assert "from_mesh" in found[0]


def test_ranks_that_are_counted_once_are_right():
    assert ranks.of(found_replicas(), "counted once") == [(None, 16)] * 2
    assert ranks.of(found_replicas(), "right") == [None] * 2
    assert ranks.of(found_replicas(), "experts") == [3 * 16] * 2
    assert ranks.of(found_replicas(), "one batch") == [3 * 10] * 2


# ---- DDP and FSDP -------------------------------------------------------------------------------


def micro_of(rank):
    micro = parallel.micro_batches(0, rank)
    return micro, [(y != -100).sum() for _, y in micro]


def either_way(acc, model, rank, streaming, call=None):
    """A window of the model's micro-batches, each by ``call``."""
    micro, counts = micro_of(rank)

    def loop():
        for one in micro:
            acc.backward((call or model)(*one))

    windowed(acc, streaming, model.parameters(), counts, loop)


def outside_of_forward(guarded, rank):
    """The loss is computed by the module inside of DDP, so DDP reduces nothing; then by DDP."""
    model, acc = DistributedDataParallel(parallel.Model()), LossAccumulator()
    if guarded:
        acc.guard(optimizer := sgd(model.parameters()), model)
        assert optimizer
    found = []
    for call in (model.module, None):
        for streaming in (False, True):
            found.append(ranks.error_of(either_way, acc, model, rank, streaming, call))
            acc.discard_window()
            model.zero_grad()
    return found


def joined(guarded, rank):
    """DDP's ``Join``, with and without a model that the accumulator guards."""
    model, acc = DistributedDataParallel(parallel.Model()), LossAccumulator()
    if guarded:
        acc.guard(sgd(model.parameters()), model)
    one = parallel.micro_batches(0, rank)[0]

    def loop(declared):
        with Join([model]):
            if declared:
                acc.window([1]).__enter__()
            else:
                acc.backward(model(*one))

    refused = [ranks.error_of(loop, declared) for declared in (True, False)]
    acc.discard_window()
    Join([model], enable=False)  # as the message says: a Join that is over leaves its mark
    acc.backward(model(*one))
    assert acc.finish(model.parameters())
    return refused


def never_synchronised(rank):
    """FSDP2 whose gradients stay inside for a whole window."""
    model, acc = fully_shard(parallel.Model()), LossAccumulator()
    found = []
    for streaming in (False, True):
        model.set_requires_gradient_sync(False)
        found.append(ranks.error_of(either_way, acc, model, rank, streaming))
        acc.discard_window(model)
    model.set_requires_gradient_sync(True)
    either_way(acc, model, rank, False)
    return found, [parallel.whole(p.grad) for p in model.parameters()]


def dropped(advice, dtype, rank):
    """A window is dropped after a micro-batch whose gradients FSDP2 holds inside."""
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    model, acc = fully_shard(parallel.Model(), mp_policy=policy), LossAccumulator()
    model.set_requires_gradient_sync(False)
    acc.backward(model(*parallel.micro_batches(0, rank)[0]))
    model.zero_grad()
    acc.discard_window(model if advice else None)

    def again():
        micro, counts = micro_of(rank)
        with acc.window(counts):
            for i, one in enumerate(micro):
                model.set_requires_gradient_sync(i == len(micro) - 1)
                acc.backward(model(*one))

    error = ranks.error_of(again)
    return error, [parallel.whole(p.grad) for p in model.parameters()] if advice else []


def fsdp1(guarded, original, mistake, rank):
    model = FullyShardedDataParallel(
        parallel.Model(), use_orig_params=original, device_id=torch.device("cpu")
    )
    acc = LossAccumulator()
    if guarded:
        acc.guard(sgd(model.parameters()), model)

    def loop():
        for window in range(2):
            for i, one in enumerate(parallel.micro_batches(window, rank)):
                if mistake == "between" and i:
                    model.zero_grad()
                acc.backward(model(*one))
            acc.finish(model.parameters())
            if mistake != "never":
                model.zero_grad()

    return ranks.error_of(loop)


EITHER = (False, True)
ENGINES = {  # FSDP1 first: where FSDP2 is in use, no parameters are read from a loss's graph
    **{
        f"fsdp1, {x}, {y}, {mistake}": functools.partial(fsdp1, x, y, mistake)
        for x in EITHER
        for y in EITHER
        for mistake in ("", "between", "never")
    },
    **{f"outside, {x}": functools.partial(outside_of_forward, x) for x in EITHER},
    **{f"joined, {x}": functools.partial(joined, x) for x in EITHER},
    "never synchronised": never_synchronised,
    **{
        f"dropped, {x}, {dtype}": functools.partial(dropped, x, dtype)
        for x in EITHER
        for dtype in (None, torch.float32)
    },
}


@functools.cache
def engines():
    return ranks.run(ENGINES)


def test_a_loss_outside_of_ddps_forward_is_refused_under_the_guard():
    for guarded in EITHER:
        for found in ranks.of(engines(), f"outside, {guarded}"):
            words = "DDP has not reduced the gradients of this window over its ranks"
            assert [words in (error or "") for error in found] == [guarded, guarded, False, False]


@pytest.mark.parametrize("guarded", EITHER)
def test_join_is_refused_in_the_same_words(guarded):
    found, same = ranks.of(engines(), f"joined, {guarded}")
    assert found == same
    for words in found:
        assert "Join lets a rank leave while others train on" in words
        assert "micro-batches whose labels are all ignore_index" in words


def assert_exact(grads):
    exact, *_ = parallel.single_process(2)
    for a, b in zip(grads, exact[0], strict=True):
        assert distance(a, b) <= SAME_SUMS


@FSDP2_MEAN
def test_gradients_that_fsdp2_keeps_inside_are_refused_or_dropped():
    for (window, streaming), grads in ranks.of(engines(), "never synchronised"):
        assert "FSDP2 still holds the gradients of 3 parameters inside" in window
        assert "no parameter given has a .grad" in streaming
        assert_exact(grads)
    for dtype in (None, torch.float32):
        for error, _ in ranks.of(engines(), f"dropped, False, {dtype}"):
            assert "call acc.discard_window(model) first" in error
        for error, grads in ranks.of(engines(), f"dropped, True, {dtype}"):
            assert error is None
            assert_exact(grads)


@pytest.mark.parametrize("original", EITHER)
@pytest.mark.parametrize("guarded", EITHER)
def test_the_gradients_of_fsdp1_are_watched(guarded, original):
    words = {
        "": None,
        "between": "zero_grad() was called inside a window",
        "never": "zero_grad() is missing after optimizer.step()",
    }
    for mistake, wanted in words.items():
        for error in ranks.of(engines(), f"fsdp1, {guarded}, {original}, {mistake}"):
            assert error is None if wanted is None else wanted in (error or "")
