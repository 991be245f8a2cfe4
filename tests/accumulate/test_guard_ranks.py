"""Mistakes that only ranks can make: with pipelines, replicas, sharded heads, DDP and FSDP."""

import copy
import functools
import itertools
import re

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


PIPELINES = {
    f"{kind.__name__}, {'streaming' if streaming else 'window'}": (kind, per_rank, streaming)
    for kind, per_rank in ((ScheduleGPipe, 1), (Schedule1F1B, 1), (ScheduleInterleaved1F1B, 2))
    for streaming in (False, True)
}


def pipeline(kind, per_rank, streaming, rank):
    """Layers in ``2 * per_rank`` stages are right; a schedule that divides gradients is refused."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    x, labels = torch.randn(8, 4), torch.tensor([0, 1, -1, 2, -1, -1, 3, 4])

    def step(**options):
        """The layers of this rank after a step, all layers before it, and its error."""
        acc = LossAccumulator.from_mesh(mesh, [], pipeline_dim="pp")
        layers = [torch.nn.Linear(4, 4) for _ in range(2 * per_rank)]
        exact = torch.nn.Sequential(*copy.deepcopy(layers))
        mine = torch.nn.ModuleList(layers[rank::2])
        acc.guard(sgd(mine.parameters()))
        stages = [
            PipelineStage(layer, rank + 2 * i, len(layers), torch.device("cpu"))
            for i, layer in enumerate(mine)
        ]

        def loss_fn(out, labels):
            return acc.scale((out.square().sum(), (labels >= 0).sum()))

        schedule = kind(stages if per_rank > 1 else stages[0], 4, loss_fn=loss_fn, **options)
        arguments = {"target": labels} if rank else {}
        run = functools.partial(schedule.step, *(() if rank else (x,)), **arguments)
        counts = [2, 1, 0, 2] if rank else ()
        error = ranks.error_of(windowed, acc, streaming, mine.parameters(), counts, run)
        return mine, exact, error

    mine, exact, error = step(scale_grads=False)
    assert error is None
    (exact(x).square().sum() / 5).backward()
    for a, b in zip(mine, exact[rank::2], strict=True):
        assert distance(a.weight.grad, b.weight.grad) <= SAME_MODEL
    *_, error = step()
    assert "divides all gradients by its 4 micro-batches" in error
    assert "scale_grads=False" in error
    return error


pipelines = ranks.shared({name: functools.partial(pipeline, *x) for name, x in PIPELINES.items()})


@pytest.mark.parametrize("name", PIPELINES)
def test_a_guarded_pipeline_is_right_or_refused_on_all_stages_where_it_divides_gradients(name):
    first, last = pipelines(name)
    assert first == last


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


on_two_ranks = ranks.together()


@on_two_ranks
def test_ranks_that_hold_the_same_tokens_are_refused(rank):
    """A model split over two ranks, counted twice or once."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    for acc, right in (
        (LossAccumulator(), False), (LossAccumulator.from_mesh(mesh, []), True),
    ):  # fmt: skip
        model = Split()
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        acc.guard(sgd(model.parameters()), model)

        def loop(acc=acc, model=model):
            for step in range(2):
                model.zero_grad()
                for one in batches([3, 5], step):
                    acc.backward(model(*one))
                acc.finish(model.parameters())

        if right:
            loop()
            assert acc.metrics()["n_tokens"] == 16
        else:
            with pytest.raises(RuntimeError, match=SAME_TOKENS):
                loop()
            acc.discard_window()


SAME_TOKENS = r"^ranks \[0, 1\] of this accumulator hold the same tokens.*from_mesh"


@on_two_ranks
def test_layers_divided_over_ranks_with_tokens_of_their_own_are_right(rank):
    """Though equally many."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    expert = torch.nn.Parameter(distribute_tensor(torch.ones(2, H), mesh, [Shard(0)]))
    weight = torch.nn.Parameter(torch.zeros(V, H))  # all tokens cost log(V) at first
    acc, optimizer = LossAccumulator(), sgd([expert, weight])
    acc.guard(optimizer)
    for step in range(3):
        for hidden, labels in batches([3, 5], 10 * step + rank):
            acc.backward(fused_ce(hidden * expert.to_local().mean(), weight, labels))
        acc.finish([expert, weight])
        optimizer.step()
        optimizer.zero_grad()
    assert acc.metrics()["n_tokens"] == 3 * 16


# ---- DDP, FSDP1 and FSDP2 -----------------------------------------------------------------------


def micro_of(rank):
    micro = parallel.micro_batches(0, rank)
    return micro, [(y != -100).sum() for _, y in micro]


def error_of(acc, model, rank, streaming, call):
    """The error of a window of the model's micro-batches, each by ``call``."""
    micro, counts = micro_of(rank)

    def loop():
        for one in micro:
            acc.backward(call(*one))

    return ranks.error_of(windowed, acc, streaming, model.parameters(), counts, loop)


EITHER = (False, True)


@on_two_ranks  # before FSDP2: where that is in use, no parameters are read from a loss's graph
def test_the_gradients_of_fsdp1_are_watched(rank):
    words = {
        "": None,
        "between": "zero_grad() was called inside a window",
        "never": "zero_grad() is missing after optimizer.step()",
    }
    for guarded, original, mistake in itertools.product(EITHER, EITHER, words):
        model = FullyShardedDataParallel(
            parallel.Model(), use_orig_params=original, device_id=torch.device("cpu")
        )
        acc = LossAccumulator()
        if guarded:
            acc.guard(sgd(model.parameters()), model)

        def loop(acc=acc, model=model, mistake=mistake):
            for window in range(2):
                for i, one in enumerate(parallel.micro_batches(window, rank)):
                    if mistake == "between" and i:
                        model.zero_grad()
                    acc.backward(model(*one))
                acc.finish(model.parameters())
                if mistake != "never":
                    model.zero_grad()

        error = ranks.error_of(loop)
        assert (words[mistake] or "") in (error or ""), (guarded, original, mistake)
        assert (error is None) == (mistake == ""), error


@on_two_ranks
def test_a_loss_outside_of_ddps_forward_is_refused_under_the_guard(rank):
    """The loss is computed by the module inside of DDP, so DDP reduces nothing."""
    for guarded in EITHER:
        model, acc = DistributedDataParallel(parallel.Model()), LossAccumulator()
        optimizer = sgd(model.parameters())
        if guarded:
            acc.guard(optimizer, model)
        for call, streaming in itertools.product((model.module, model), EITHER):
            error = error_of(acc, model, rank, streaming, call)
            words = "DDP has not reduced the gradients of this window over its ranks"
            assert (words in (error or "")) == (guarded and call is model.module)
            acc.discard_window()
            model.zero_grad()


@on_two_ranks
def test_join_is_refused_in_words(rank):
    """With and without a model that the accumulator guards."""
    one = parallel.micro_batches(0, rank)[0]
    words = (
        "(?s)Join lets a rank leave while others train on.*micro-batches whose labels are all ig"
    )
    for guarded in EITHER:
        model, acc = DistributedDataParallel(parallel.Model()), LossAccumulator()
        if guarded:
            acc.guard(sgd(model.parameters()), model)
        for declared in (True, False):
            with pytest.raises(RuntimeError, match=words), Join([model]):
                acc.window([1]).__enter__() if declared else acc.backward(model(*one))
        acc.discard_window()
        Join([model], enable=False)  # as the message says: a Join that is over leaves its mark
        acc.backward(model(*one))
        assert acc.finish(model.parameters())


@on_two_ranks
def test_ranks_of_fsdp2_that_train_on_the_same_batch_are_no_replicas(rank):
    """As one does to try a loop."""
    model, acc = fully_shard(Split()), LossAccumulator()
    acc.guard(optimizer := sgd(model.parameters()), model)
    for _ in range(3):
        acc.backward(model(*batches([5])[0]))
        acc.finish(model.parameters())
        optimizer.zero_grad()
    assert acc.metrics()["n_tokens"] == 3 * 10


@on_two_ranks  # last: ranks that have shared a vocabulary are looked at ever after
def test_a_sharded_vocabulary_counts_its_tokens_once(rank):
    """Its ranks must hold the same hidden states."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = new_weight().detach().chunk(2)[rank].clone().requires_grad_()
    hidden, labels = batches([5])[0]

    def error_of(acc, hidden):
        acc.guard(sgd([weight]))

        def loop():
            for _ in range(2):
                weight.grad = None
                acc.backward(fused_ce(hidden, weight, labels, process_group=dist.group.WORLD))
                acc.finish([weight])

        error = ranks.error_of(loop)
        acc.discard_window()
        return error

    once = functools.partial(LossAccumulator.from_mesh, mesh, [], grad_reduction="sum")
    assert error_of(once(), hidden) is None
    other = error_of(once(), hidden.roll(rank, 0))
    assert "hidden must be the same on all ranks that share the vocabulary" in other
    twice = error_of(LossAccumulator(grad_reduction="sum"), hidden)
    assert re.search(SAME_TOKENS, twice.removeprefix("RuntimeError: "))


def assert_exact(model):
    exact, *_ = parallel.single_process(2)
    for p, grad in zip(model.parameters(), exact[0], strict=True):
        assert distance(parallel.whole(p.grad), grad) <= SAME_SUMS


def held_inside(rank):
    """Gradients that FSDP2 keeps inside, for a whole window or for one that is dropped."""
    model, acc = fully_shard(parallel.Model()), LossAccumulator()
    for streaming, words in (
        (False, "FSDP2 still holds the gradients of 3 parameters inside"),
        (True, "no parameter given has a .grad"),
    ):
        model.set_requires_gradient_sync(False)
        assert words in error_of(acc, model, rank, streaming, model)
        acc.discard_window(model)
    model.set_requires_gradient_sync(True)
    assert error_of(acc, model, rank, False, model) is None
    assert_exact(model)
    for advice, dtype in itertools.product(EITHER, (None, torch.float32)):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        model, acc = fully_shard(parallel.Model(), mp_policy=policy), LossAccumulator()
        model.set_requires_gradient_sync(False)
        acc.backward(model(*parallel.micro_batches(0, rank)[0]))
        model.zero_grad()
        acc.discard_window(model if advice else None)
        left = iter(micro_of(rank)[0][:-1])

        def call(*one, model=model, left=left):
            model.set_requires_gradient_sync(next(left, None) is None)
            return model(*one)

        error = error_of(acc, model, rank, False, call)
        if advice:
            assert error is None
            assert_exact(model)
        else:
            assert "call acc.discard_window(model) first" in error


@FSDP2_MEAN
def test_gradients_that_fsdp2_keeps_inside_are_refused_or_dropped():
    ranks.shared({"held inside": held_inside})("held inside")
