"""Data x tensor and data x context parallel meshes: which ranks the denominator counts."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.bounds import SAME_SUMS
from support.engines import train
from support.loops import H, V, distance
from support.versions import FSDP2_MEAN
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fusedce import LossAccumulator, count_valid, fused_ce, shift_labels

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
    return acc._tokens.size(), alone._tokens.size()


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
TWO = CONTEXT
FOUR = TENSOR | CONTEXT_4 | {"accelerate, mesh": accelerate_mesh}


@functools.cache
def results(world):
    return ranks.run({2: TWO, 4: FOUR}[world], world)


@FSDP2_MEAN
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
            assert distance(a, b) <= SAME_SUMS
    # Shifting after the split loses the token at every border inside a sequence's answer.
    assert sum(after for *_, after in found) < tokens


def test_accelerate_mesh():
    assert ranks.of(results(4), "accelerate, mesh") == [(2, 1)] * 4
