"""Mistakes that only ranks can make: with pipelines, sharded heads and FSDP."""

import copy
import functools
import itertools

import pytest
import torch
from support import parallel, ranks
from support.bounds import SAME_MODEL, SAME_SUMS
from support.loops import distance, windowed
from support.versions import FSDP2_MEAN, PIPELINES_OVER_GLOO
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from fusedce import LossAccumulator


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


@PIPELINES_OVER_GLOO
@pytest.mark.parametrize("name", PIPELINES)
def test_a_guarded_pipeline_is_right_or_refused_on_all_stages_where_it_divides_gradients(name):
    first, last = pipelines(name)
    assert first == last


# ---- FSDP1 and FSDP2 -----------------------------------------------------------------------


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
on_two_ranks = ranks.together()


@on_two_ranks  # before FSDP2: where that is in use, no parameters are read from a loss's graph
def test_the_gradients_of_fsdp1_are_watched(rank):
    words = {
        "": None,
        "between": "zero_grad() was called inside a window",
        "never": "zero_grad() is missing after optimizer.step()",
    }
    for guarded, original, mistake in itertools.product(EITHER, EITHER, words):
        model = parallel.Model()
        if original:  # FSDP1 zeroes the part of a flat gradient that is a frozen parameter's
            model.frozen = torch.nn.Linear(5, 3).requires_grad_(False)
        model = FullyShardedDataParallel(
            model, use_orig_params=original, device_id=torch.device("cpu")
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
