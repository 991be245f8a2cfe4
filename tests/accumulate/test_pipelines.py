"""Every schedule of torch's pipelining equals one process, or is refused before it begins."""

import copy
import functools

import pytest
import torch
from support import ranks
from support.bounds import SAME_MODEL
from support.loops import distance, windowed
from support.versions import PIPELINES_OVER_GLOO, V_SCHEDULES_HANG
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import PipelineStage

from fusedce import LossAccumulator

# How stages lie on two ranks: one each, two in turns, or a V whose last stage is on rank 0.
ONE, LOOP, V = [(0,), (1,)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]
SCHEDULES = {
    "ScheduleGPipe": ONE,
    "Schedule1F1B": ONE,
    "ScheduleInterleaved1F1B": LOOP,
    "ScheduleLoopedBFS": LOOP,
    "ScheduleInterleavedZeroBubble": LOOP,
    "ScheduleZBVZeroBubble": V,
    "ScheduleDualPipeV": V,
}
FOUND = [
    name
    for name, places in SCHEDULES.items()
    if hasattr(torch_schedules, name) and not (places is V and V_SCHEDULES_HANG)
]
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, -1, 2, -1, -1, 3, 4])
COUNTS = [2, 1, 0, 2]


class Pipeline:
    """Linear layers as the stages of both ranks, this rank's, and its accumulator."""

    def __init__(self, name, rank, **options):
        places = SCHEDULES[name]
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4) for _ in range(2 * len(places[0]))]
        self.exact = torch.nn.Sequential(*copy.deepcopy(layers))
        self.of_rank = places[rank]
        self.mine = torch.nn.ModuleList(layers[i] for i in self.of_rank)
        stages = [
            PipelineStage(layers[i], i, len(layers), torch.device("cpu")) for i in self.of_rank
        ]
        self.has_loss = len(layers) - 1 in self.of_rank
        self.schedule = getattr(torch_schedules, name)(
            stages if len(stages) > 1 else stages[0], 4, loss_fn=self.loss_fn, **options
        )
        self.inputs = (X,) if 0 in self.of_rank else ()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        self.make = functools.partial(
            LossAccumulator.from_mesh, mesh, [], self.mine,
            pipeline_dim="pp", schedule=self.schedule, has_loss=self.has_loss,
        )  # fmt: skip

    def loss_fn(self, out, labels):
        return self.acc.scale((out.square().sum(), (labels >= 0).sum()))

    def run(self, streaming):
        targets = {"target": LABELS} if self.has_loss else {}
        windowed(
            self.acc, streaming, None, COUNTS if self.has_loss else (),
            lambda: self.schedule.step(*self.inputs, **targets),
        )  # fmt: skip


def right(name, streaming, rank):
    """Two steps: the first one learns shapes from a loss that does not count."""
    pipeline = Pipeline(name, rank, scale_grads=False)
    pipeline.acc = pipeline.make()
    (pipeline.exact(X).square().sum() / 5).backward()
    optimizer = torch.optim.SGD(pipeline.mine.parameters(), lr=0.0)
    exact = [p.grad for p in pipeline.exact.parameters()]
    norm = float(torch.nn.utils.get_total_norm(exact))
    for _ in range(2):
        pipeline.run(streaming)
        for layer, i in zip(pipeline.mine, pipeline.of_rank, strict=True):
            assert distance(layer.weight.grad, pipeline.exact[i].weight.grad) <= SAME_MODEL
        # The norm of all stages, and not that of this rank's.
        assert float(pipeline.acc.clip_grad_norm_(norm / 4)) == pytest.approx(norm, rel=1e-5)
        for layer, i in zip(pipeline.mine, pipeline.of_rank, strict=True):
            clipped = pipeline.exact[i].weight.grad * (norm / 4 / (norm + 1e-6))
            assert distance(layer.weight.grad, clipped) <= SAME_MODEL
        optimizer.step()
        optimizer.zero_grad()
    return pipeline.acc.metrics()["n_tokens"]


def never_zeroed(name, rank):
    """Streaming, the rank of the losses sees it, and tells the others."""
    pipeline = Pipeline(name, rank, scale_grads=False)
    pipeline.acc = pipeline.make()
    optimizer = torch.optim.SGD(pipeline.mine.parameters(), lr=0.0)
    pipeline.run(True)
    optimizer.step()
    return ranks.error_of(pipeline.run, True)


def inside(name, rank):
    """What is refused on the rank of the losses, between its micro-batches and the window's end."""
    pipeline = Pipeline(name, rank, scale_grads=False)
    pipeline.acc = pipeline.make()
    optimizer = torch.optim.SGD(pipeline.mine.parameters(), lr=0.0)
    targets = {"target": LABELS} if pipeline.has_loss else {}
    pipeline.schedule.step(*pipeline.inputs, **targets)
    actions = (optimizer.step, lambda: pipeline.acc.clip_grad_norm_(1.0))
    found = [ranks.error_of(act) for act in actions if pipeline.has_loss]
    pipeline.mine.zero_grad()
    return [*found, ranks.error_of(pipeline.acc.finish)]


def divides(name, rank):
    return ranks.error_of(Pipeline(name, rank).make)


CASES = {
    f"{name}, {'streaming' if streaming else 'window'}": functools.partial(right, name, streaming)
    for name in FOUND
    for streaming in (False, True)
}
CASES["never zeroed"] = functools.partial(never_zeroed, "Schedule1F1B")
CASES["inside"] = functools.partial(inside, "Schedule1F1B")
CASES["divides"] = functools.partial(divides, "Schedule1F1B")
pipelines = ranks.shared(CASES)


@PIPELINES_OVER_GLOO
@pytest.mark.parametrize("name", list(CASES)[:-3])
def test_a_pipeline_equals_one_process(name):
    assert pipelines(name) == [10, 10]


@PIPELINES_OVER_GLOO
def test_a_missing_zero_grad_is_named_on_all_stages():
    first, last = pipelines("never zeroed")
    assert "zero_grad() is missing after optimizer.step()" in last
    assert ranks.anywhere(first) == ranks.anywhere(last)


@PIPELINES_OVER_GLOO
def test_guards_of_a_pipeline():
    (on_first,), (step, clip, on_last) = pipelines("inside")
    assert "SGD.step() inside an open window: 4 micro-batches" in step
    assert "cannot clip gradients: 4 micro-batches" in clip
    assert "no parameter given has a .grad" in on_first
    assert "no parameter given has a .grad" in on_last


@PIPELINES_OVER_GLOO
def test_a_schedule_that_divides_gradients_is_refused_before_it_begins():
    for error in pipelines("divides"):
        assert "Schedule1F1B would divide all gradients by its number of micro-batches" in error
        assert "make it with scale_grads=False" in error
