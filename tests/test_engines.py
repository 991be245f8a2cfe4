"""The accumulator under real engines, with gloo processes: equal to a single process.

Uneven lengths, one rank fully ignored in one window, the last window short: see `parallel`.
"""

import contextlib
import functools
import os
from types import SimpleNamespace

import parallel
import pytest
import ranks
import torch
import torch.distributed as dist
from loops import H, V, distance
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fusedce import LossAccumulator, count_valid, fused_ce, shift_labels


def train(model, acc, data_rank, streaming, *, silent=None, backward=None, reduce=None):
    """Every window of `parallel`, by declared counts or streaming.

    ``silent(model)``: the engine's context (or switch) for micro-batches before the last one.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=parallel.LEARNING_RATE)
    grads = []
    for window in range(len(parallel.WINDOWS)):
        optimizer.zero_grad()
        micro = parallel.micro_batches(window, data_rank)
        counts = [count_valid(y, offset=0) for _, y in micro]
        with contextlib.nullcontext() if streaming else acc.window(counts):
            for i, (hidden, labels) in enumerate(micro):
                last = i == len(micro) - 1
                with silent(model, last) if silent else contextlib.nullcontext():
                    acc.backward(model(hidden, labels))
        if reduce:
            reduce(model)
        if streaming:
            acc.finish(model.parameters())
        grads.append([parallel.whole(p.grad) for p in model.parameters()])
        optimizer.step()
    return grads, [parallel.whole(p) for p in model.parameters()], acc.metrics()


# ---- DDP and FSDP2 ----------------------------------------------------------------------------


def no_sync(model, last):
    return contextlib.nullcontext() if last else model.no_sync()


def ddp(silent, streaming, rank):
    model = DistributedDataParallel(parallel.Model())
    return train(model, LossAccumulator(), rank, streaming, silent=silent)


@contextlib.contextmanager
def local_gradients(model, last):
    model.set_requires_gradient_sync(last)
    yield


def fsdp(reduction, silent, streaming, rank):
    model = fully_shard(parallel.Model())
    if reduction == "sum":
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)  # gloo has no multiply-and-sum
    acc = LossAccumulator(grad_reduction=reduction)
    return train(model, acc, rank, streaming, silent=silent)


# ---- data x tensor parallel, context parallel -------------------------------------------------


def tensor_parallel(streaming, rank):
    """2 x 2: FSDP2 over "dp", the head's vocabulary over "tp" (31 classes: 16 and 15 rows)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel.Model()
    model.head.weight = torch.nn.Parameter(
        distribute_tensor(model.head.weight.detach(), mesh["tp"], [Shard(0)])
    )
    fully_shard(model, mesh=mesh["dp"])
    acc = LossAccumulator.from_mesh(mesh, "dp")
    return train(model, acc, mesh.get_local_rank("dp"), streaming)


class CausalModel(torch.nn.Module):
    """A position sees the mean of all positions up to its own, on whichever rank they are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed = torch.nn.Embedding(V, H)
        self.head = torch.nn.Linear(H, V, bias=False)

    def forward(self, tokens, labels, group=None):  # (T_local,) each
        x = self.embed(tokens)
        if group is not None:
            x = all_gather_tensor_autograd(x, 0, group)
        means = x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]
        if group is not None:
            means = means.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        return fused_ce(torch.tanh(means), self.head.weight, labels)


SEQUENCES = [[16, 8], [40, 4], [24, 12]]  # lengths of the two micro-batches of each data rank


def sequences(data_rank):
    rng = torch.Generator().manual_seed(data_rank)
    for length in SEQUENCES[data_rank]:
        tokens = torch.randint(0, V, (length,), generator=rng)
        labels = tokens.clone()
        labels[: length // 3] = -100  # a prompt
        yield tokens, labels


def causal_single_process(data_ranks):
    model = CausalModel()
    outs = [
        model(tokens, shift_labels(labels))
        for r in range(data_ranks)
        for tokens, labels in sequences(r)
    ]
    n = sum(int(out.n_valid) for out in outs)
    (sum(out.loss_sum for out in outs) / n).backward()
    return [p.grad for p in model.parameters()], n


def context_parallel(data_ranks, reduction, streaming, rank):
    """Each rank holds a slice of every sequence; labels are shifted before the split."""
    cp = dist.get_world_size() // data_ranks
    mesh = init_device_mesh("cpu", (data_ranks, cp), mesh_dim_names=("dp", "cp"))
    group = mesh["cp"].get_group()
    model = CausalModel()
    acc = LossAccumulator.from_mesh(mesh, ["dp", "cp"], grad_reduction=reduction)
    micro = [
        (tokens.chunk(cp)[mesh.get_local_rank("cp")], y.chunk(cp)[mesh.get_local_rank("cp")])
        for tokens, labels in sequences(mesh.get_local_rank("dp"))
        for y in [shift_labels(labels)]
    ]
    counts = [(y != -100).sum() for _, y in micro]
    with contextlib.nullcontext() if streaming else acc.window(counts):
        for tokens, y in micro:
            acc.backward(model(tokens, y, group))
    for p in model.parameters():
        dist.all_reduce(p.grad)
        if reduction == "mean":
            p.grad /= dist.get_world_size()
    if streaming:
        acc.finish(model.parameters())
    after_the_split = [
        int(count_valid(labels.chunk(cp)[mesh.get_local_rank("cp")]))
        for _, labels in sequences(mesh.get_local_rank("dp"))
    ]
    return [p.grad for p in model.parameters()], acc.metrics()["n_tokens"], sum(after_the_split)


# ---- accelerate -------------------------------------------------------------------------------


def accelerator(rank, **kwargs):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    return Accelerator(cpu=True, **kwargs)


def accelerate_streaming(rank):
    """`accelerate`'s own loop: it prefetches, ends the short window, and divides by 3 always."""
    engine = accelerator(rank, gradient_accumulation_steps=3)
    model = parallel.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=parallel.LEARNING_RATE)
    model, optimizer = engine.prepare(model, optimizer)
    acc = LossAccumulator.from_accelerator(engine)
    grads = []
    for hidden, labels in loader(engine):
        with engine.accumulate(model):
            acc.backward(model(hidden, labels))
            if engine.sync_gradients:
                acc.finish(model.parameters())
                grads.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
    return grads, [p.detach() for p in model.parameters()], acc.metrics()


def accelerate_window(rank):
    """Micro-batches drawn first: `accumulate` would take each of the last ones for an end."""
    engine = accelerator(rank, gradient_accumulation_steps=3)
    model = parallel.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=parallel.LEARNING_RATE)
    model, optimizer = engine.prepare(model, optimizer)
    stream = iter(loader(engine))
    acc = LossAccumulator.from_accelerator(engine)
    grads = []
    for per_rank in parallel.WINDOWS:
        micro = [next(stream) for _ in per_rank[rank]]
        with acc.window([count_valid(labels, offset=0) for _, labels in micro]):
            for i, (hidden, labels) in enumerate(micro):
                last = i == len(micro) - 1
                with contextlib.nullcontext() if last else engine.no_sync(model):
                    acc.backward(model(hidden, labels))
        grads.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return grads, [p.detach() for p in model.parameters()], acc.metrics()


def loader(engine):
    """The micro-batches of all ranks, dealt out in turn."""
    world = dist.get_world_size()
    per_rank = [
        [x for window in range(len(parallel.WINDOWS)) for x in parallel.micro_batches(window, r)]
        for r in range(world)
    ]
    dealt = [x for together in zip(*per_rank, strict=True) for x in together]
    return engine.prepare(DataLoader(dealt, batch_size=1, collate_fn=lambda batch: batch[0]))


def accelerate_errors(rank):
    """Doubles: DeepSpeed itself is not installed."""
    engine = accelerator(rank, gradient_accumulation_steps=3)
    deepspeed = SimpleNamespace(
        distributed_type=SimpleNamespace(value="DEEPSPEED"),
        gradient_accumulation_steps=3,
        backward=lambda loss: (loss / 3).backward(),
    )
    acc = LossAccumulator.from_accelerator(deepspeed)
    model = parallel.Model()
    batch = parallel.micro_batches(0, 0)[0]
    streaming = ranks.error_of(acc.backward, model(*batch))
    with acc.window([5]):  # declared counts are fine: 5 tokens here and 5 there
        acc.backward(model(*batch))
    dist.all_reduce(model.head.weight.grad, op=dist.ReduceOp.SUM)
    exact = parallel.Model()
    exact(*batch).mean().backward()
    right = distance(model.head.weight.grad / 2, exact.head.weight.grad)

    def refused(**changes):
        double = SimpleNamespace(**vars(deepspeed) | changes)
        return ranks.error_of(LossAccumulator.from_accelerator, double)

    return {
        "streaming": streaming,
        "right": right,
        "megatron": refused(distributed_type=SimpleNamespace(value="MEGATRON_LM")),
        "sequence parallel": refused(parallelism_config=SimpleNamespace(sp_enabled=True)),
        "not one": ranks.error_of(LossAccumulator.from_accelerator, model),
        "ranks": LossAccumulator.from_accelerator(engine)._ranks.size(),
    }


def accelerate_mesh(rank):
    """Ranks that an accelerator's mesh calls "tp" hold the same tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    engine = SimpleNamespace(
        distributed_type="FSDP",
        gradient_accumulation_steps=1,
        backward=None,
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(sp_enabled=False),
    )
    acc = LossAccumulator.from_accelerator(engine)
    only_tp = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    alone = LossAccumulator.from_accelerator(
        SimpleNamespace(**vars(engine) | {"torch_device_mesh": only_tp})
    )
    return acc._ranks.size(), alone._ranks.size()


EQUAL = {
    "ddp": functools.partial(ddp, None),
    "ddp, no_sync": functools.partial(ddp, no_sync),
    "fsdp2, mean": functools.partial(fsdp, "mean", None),
    "fsdp2, mean, local gradients": functools.partial(fsdp, "mean", local_gradients),
    "fsdp2, divide factor 1": functools.partial(fsdp, "sum", None),
}
EQUAL = {
    f"{name}, {'streaming' if streaming else 'window'}": functools.partial(case, streaming)
    for name, case in EQUAL.items()
    for streaming in (False, True)
}


EQUAL |= {"accelerate, streaming": accelerate_streaming, "accelerate, window": accelerate_window}
TENSOR = {
    "tensor parallel, window": functools.partial(tensor_parallel, False),
    "tensor parallel, streaming": functools.partial(tensor_parallel, True),
}
CONTEXT = {
    f"context parallel, {reduction}, {'streaming' if streaming else 'window'}": functools.partial(
        context_parallel, data_ranks, reduction, streaming
    )
    for data_ranks, reduction, streaming in ((1, "sum", False), (1, "mean", True))
}
CONTEXT_4 = {
    "data x context parallel, window": functools.partial(context_parallel, 2, "mean", False),
    "data x context parallel, streaming": functools.partial(context_parallel, 2, "sum", True),
}
TWO = EQUAL | CONTEXT | {"accelerate, errors": accelerate_errors}
FOUR = TENSOR | CONTEXT_4 | {"accelerate, mesh": accelerate_mesh}
FOUR |= {name: EQUAL[name] for name in ("ddp, window", "fsdp2, mean, streaming")}


@functools.cache
def results(world):
    return ranks.run({2: TWO, 4: FOUR}[world], world)


@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_equal_one(name):
    for found in ranks.of(results(2), name):
        parallel.assert_equal_to_single_process(found, 2)


@pytest.mark.parametrize("name", ["ddp, window", "fsdp2, mean, streaming"])
def test_four_processes_equal_one(name):
    for found in ranks.of(results(4), name):
        parallel.assert_equal_to_single_process(found, 4)


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_parallel_replicas_are_not_counted_twice(name):
    for found in ranks.of(results(4), name):
        parallel.assert_equal_to_single_process(found, 2)


@pytest.mark.parametrize(
    ("name", "world", "data_ranks"),
    [*((name, 2, 1) for name in CONTEXT), *((name, 4, 2) for name in CONTEXT_4)],
)
def test_context_parallel_slices_are_all_counted(name, world, data_ranks):
    exact, tokens = causal_single_process(data_ranks)
    found = ranks.of(results(world), name)
    for grads, counted, _ in found:
        assert counted == tokens
        for a, b in zip(grads, exact, strict=True):
            assert distance(a, b) < 1e-6
    # Shifting after the split loses the token at every border inside a sequence's answer.
    assert sum(after for *_, after in found) < tokens


def test_accelerate_errors():
    for found in ranks.of(results(2), "accelerate, errors"):
        assert "RuntimeError: streaming is not possible here: " in found["streaming"]
        assert "steps the optimizer inside the last backward" in found["streaming"]
        assert found["right"] < 1e-6
        assert "ValueError: accelerator: Megatron-LM" in found["megatron"]
        assert "ValueError: accelerator: DeepSpeed's sequence" in found["sequence parallel"]
        assert "TypeError: accelerator must be an accelerate.Accelerator" in found["not one"]
        assert found["ranks"] == 2


def test_accelerate_mesh():
    assert ranks.of(results(4), "accelerate, mesh") == [(2, 1)] * 4
