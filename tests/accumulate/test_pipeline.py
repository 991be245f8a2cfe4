"""A pipeline of two real stages trains as one process does, by counts or streaming."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.loops import distance
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
)
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator
from fusedce.accumulate.gradients import STREAMED as FIRST_ESTIMATE

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@functools.cache
def example():
    spec = importlib.util.spec_from_file_location("pipeline_example", EXAMPLES / "pipeline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(schedule, streaming, rank):
    history, model = example().train(schedule=SCHEDULES[schedule], streaming=streaming)
    return history, {name: p.detach() for name, p in model.named_parameters()}


def empty_first_stage(rank):
    """The stage without losses reads and finishes what the other one has seen."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    acc = LossAccumulator.from_mesh(mesh, [], pipeline_dim="pp")
    p = torch.nn.Parameter(torch.ones(3))
    if rank:
        for n in (2, 6):
            acc.backward((p.sum() * n, torch.tensor(n)))
    else:
        # This is the gradient of a loss that was divided by the estimate.
        p.grad = torch.full((3,), 8.0) / FIRST_ESTIMATE
    acc.finish([p])
    refused = ranks.error_of(acc.scale, (p.sum(), torch.tensor(1))) if rank == 0 else None
    dist.barrier()
    return p.grad, acc.metrics(), acc.state_dict(), refused


def data_by_pipeline(rank):
    """2 x 2: the denominator counts the last stages of both replicas once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    acc = LossAccumulator.from_mesh(mesh, "dp", pipeline_dim="pp")
    dp, pp = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    model = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    n = (3, 5)[dp]
    found = []
    for streaming in (False, True):
        model.zero_grad()
        if pp == 0:
            if streaming:
                # The last stage sends a gradient averaged over "dp" and divided by its estimate.
                module.weight.grad = torch.full((1, 1), 8.0 / (2 * FIRST_ESTIMATE))
                acc.finish(model.parameters())
            else:
                with acc.window():
                    pass
        else:
            out = (model(torch.full((1, 1), float(n))).sum(), torch.tensor(n))
            if streaming:
                acc.backward(out)
                acc.finish(model.parameters())
            else:
                with acc.window([n]):
                    acc.backward(out)
        found.append(float(module.weight.grad) if module.weight.grad is not None else None)
    return pp, found, acc.metrics()


CASES = {
    f"{schedule}, {'streaming' if streaming else 'window'}": functools.partial(
        trained, schedule, streaming
    )
    for schedule in SCHEDULES
    for streaming in (False, True)
}


@functools.cache
def results():
    return ranks.run(CASES | {"empty": empty_first_stage})


@functools.cache
def one_process():
    tiny = sys.modules["tiny"] if "tiny" in sys.modules else importlib.import_module("tiny")
    model = tiny.TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for _ in range(2):
        for batch in example().steps():
            out = model(**batch)
            out.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            history.append((float(out.mean().detach()), int(out.n_valid)))
    return history, dict(model.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_as_one_process(name):
    exact, parameters = one_process()
    for history, found in ranks.of(results(), name):
        assert [m["n_tokens"] for m in history] == [n for _, n in exact]
        for m, (loss, _) in zip(history, exact, strict=True):
            assert m["loss"] == pytest.approx(loss, rel=1e-5)
        for key, p in found.items():
            if (
                key != "layer.self_attn.in_proj_bias"
            ):  # of keys: no gradient but rounding, for AdamW
                assert distance(p, parameters[key]) < 1e-4, key


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_streaming_is_the_first_thing_that_a_process_does(schedule):
    """No rank makes a group, or meets others, where only the last stage is."""
    case = {"first": functools.partial(trained, schedule, True)}
    exact, _ = one_process()
    for history, _ in ranks.of(ranks.run(case, timeout=15), "first"):
        assert [m["n_tokens"] for m in history] == [n for _, n in exact]


def test_stages_without_a_loss_finish():
    for grad, metrics, _, refused in ranks.of(results(), "empty"):
        torch.testing.assert_close(grad, torch.ones(3))
        assert metrics["n_tokens"] == 8
        assert refused is None or "this rank has no loss" in refused


def test_replicas_of_a_pipeline():
    for pp, found, metrics in ranks.of(ranks.run({"2d": data_by_pipeline}, 4), "2d"):
        assert metrics["n_tokens"] == 16
        if pp:
            assert found == pytest.approx([1.0, 1.0])
        else:
            assert found[0] is None
            assert found[1] == pytest.approx(1.0)
