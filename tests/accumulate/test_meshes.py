"""Data x tensor, context and pipeline parallel meshes: which ranks the denominator counts."""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import parallel, ranks
from support.bounds import SAME_SUMS
from support.engines import train
from support.loops import H, V, a_loss, distance, windowed
from support.versions import FSDP2_MEAN
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator, count_valid, shift_labels
from fusedce.accumulate.gradients import STREAMED
from fusedce.agreement import own_group, timeout_of
from fusedce.contract.groups import Ranks, submesh

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
    acc.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    return train(model, acc, mesh.get_local_rank("dp"), streaming)


SEQUENCES = [[16, 8], [40, 4]]  # lengths of the two micro-batches of each data rank


def sequences(data_rank):
    rng = torch.Generator().manual_seed(data_rank)
    for length in SEQUENCES[data_rank]:
        labels = torch.randint(0, V, (length,), generator=rng)
        labels[: length // 3] = -100  # a prompt
        yield torch.randn(length, H, generator=rng), labels


def unsplit():
    model = parallel.Model()
    whole = [one for data_rank in range(2) for one in sequences(data_rank)]
    out = sum(model(hidden, shift_labels(labels)) for hidden, labels in whole)
    out.mean().backward()
    return [p.grad for p in model.parameters()], int(out.n_valid)


def context_parallel(reduction, streaming, rank):
    """2 x 2: each rank holds a slice of every sequence; labels are shifted before the split."""
    cp = 2
    mesh = init_device_mesh("cpu", (2, cp), mesh_dim_names=("dp", "cp"))
    model = parallel.Model()
    acc = LossAccumulator.from_mesh(mesh, ["dp", "cp"], grad_reduction=reduction)
    micro = [
        (hidden.chunk(cp)[mesh.get_local_rank("cp")], y.chunk(cp)[mesh.get_local_rank("cp")])
        for hidden, labels in sequences(mesh.get_local_rank("dp"))
        for y in [shift_labels(labels)]
    ]
    counts = [(y != -100).sum() for _, y in micro]
    with contextlib.nullcontext() if streaming else acc.window(counts):
        for one in micro:
            acc.backward(model(*one))
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
    return repr(acc), repr(alone)


def meshes(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    acc = {
        "dp": LossAccumulator.from_mesh(mesh, "dp"),
        "both": LossAccumulator.from_mesh(mesh, ["tp", "dp"]),
        "none": LossAccumulator.from_mesh(mesh, []),
        "1-D": LossAccumulator(mesh["tp"]),
    }
    tokens = {}
    for name, one in acc.items():
        one.add(a_loss(rank + 1))
        tokens[name] = one.metrics()["n_tokens"]
    LossAccumulator.from_mesh(mesh, ["dp", "tp"])  # the same group again
    return (
        tokens,
        ranks.error_of(LossAccumulator, mesh),
        ranks.error_of(LossAccumulator.from_mesh, mesh, ["cp"]),
    )


def flattened(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mesh["dp", "cp"]._flatten("tokens_of_all")
    acc = LossAccumulator.from_mesh(mesh, "tokens_of_all")
    acc.add(a_loss(rank + 1))
    return acc.metrics()["n_tokens"], ranks.error_of(LossAccumulator.from_mesh, mesh, "dp_cp")


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
        if streaming and not pp:
            # The last stage sends a gradient averaged over "dp" and divided by its estimate.
            module.weight.grad = torch.full((1, 1), 8.0 / (2 * STREAMED))

        def loop():
            if pp:
                acc.backward((model(torch.full((1, 1), float(n))).sum(), torch.tensor(n)))

        windowed(acc, streaming, model.parameters(), [n] if pp else (), loop)
        found.append(float(module.weight.grad) if module.weight.grad is not None else None)
    metrics = acc.metrics()
    refused = None if pp else ranks.error_of(acc.scale, (module.weight.sum(), torch.tensor(1)))
    return pp, found, metrics, refused


TENSOR = {
    "tensor parallel, window": functools.partial(tensor_parallel, False),
    "tensor parallel, streaming": functools.partial(tensor_parallel, True),
}
CONTEXT = {
    "context parallel, window": functools.partial(context_parallel, "mean", False),
    "context parallel, streaming": functools.partial(context_parallel, "sum", True),
}
CASES = {
    "meshes": meshes,
    "flattened": flattened,
    "accelerate, mesh": accelerate_mesh,
    "pipeline": data_by_pipeline,
    **TENSOR,
    **CONTEXT,
}


@functools.cache
def results():
    return ranks.run(CASES, 4)


@FSDP2_MEAN
@pytest.mark.parametrize("name", TENSOR)
def test_tensor_parallel_replicas_are_not_counted_twice(name):
    for found in ranks.of(results(), name):
        parallel.assert_equal_to_single_process(found, 2)


@pytest.mark.parametrize("name", CONTEXT)
def test_context_parallel_slices_are_all_counted(name):
    exact, tokens = unsplit()
    found = ranks.of(results(), name)
    for grads, counted, _ in found:
        assert counted == tokens
        for a, b in zip(grads, exact, strict=True):
            assert distance(a, b) <= SAME_SUMS
    # Shifting after the split loses the token at every border inside a sequence's answer.
    assert sum(after for *_, after in found) < tokens


def test_accelerate_mesh():
    for found in ranks.of(results(), "accelerate, mesh"):
        assert ["(2 ranks" in found[0], "(1 rank," in found[1]] == [True, True]


def test_meshes():
    for rank, (tokens, two_dims, unknown) in enumerate(ranks.of(results(), "meshes")):
        dp, tp = divmod(rank, 2)
        assert tokens == {
            "dp": (tp + 1) + (tp + 3),
            "both": 1 + 2 + 3 + 4,
            "none": rank + 1,
            "1-D": (2 * dp + 1) + (2 * dp + 2),
        }
        assert "ValueError: process_group must be a one-dimensional DeviceMesh, got 2" in two_dims
        assert "ValueError: token_dims must name dimensions of the mesh ('dp', 'tp')" in unknown


def test_dimensions_that_were_flattened():
    for tokens, unknown in ranks.of(results(), "flattened"):
        assert tokens == 10
        assert "token_dims must name dimensions of the mesh" in unknown


def timeouts(rank):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "dp", "tp"))
    groups = [Ranks(submesh(mesh, dims)).group() for dims in ("dp", ["a", "tp"], ["dp", "tp"])]
    own = [own_group(group) for group in (*groups, dist.group.WORLD)]
    assert not {*own} & {*groups, dist.group.WORLD}  # gradients may be on their way in those
    made = (*groups[1:], *own)  # torch has made that of "dp"
    return [timeout_of(group).total_seconds() for group in made]


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_every_group_that_is_made_has_the_users_timeout(backend):
    for seconds in ranks.of(ranks.run({"t": timeouts}, 4, timeout=33, backend=backend), "t"):
        assert seconds == [33] * 6


def test_replicas_of_a_pipeline():
    for pp, found, metrics, refused in ranks.of(results(), "pipeline"):
        assert metrics["n_tokens"] == 16
        assert pp or "this rank has no loss" in refused
        if pp:
            assert found == pytest.approx([1.0, 1.0])
        else:
            assert found[0] is None
            assert found[1] == pytest.approx(1.0)
