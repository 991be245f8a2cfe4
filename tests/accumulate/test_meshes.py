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
from support.loops import H, V, batches, distance, new_weight, run_window, windowed
from support.versions import FSDP2_MEAN
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator, count_valid, shift_labels
from fusedce.accumulate.gradients import STREAMED
from fusedce.agreement import own_group, timeout_of
from fusedce.contract.groups import Ranks, submesh

SEQUENCES = [[16, 8], [40, 4]]  # lengths of the two micro-batches of each data rank


def sequences(data_rank):
    rng = torch.Generator().manual_seed(data_rank)
    for length in SEQUENCES[data_rank]:
        labels = torch.randint(0, V, (length,), generator=rng)
        labels[: length // 3] = -100  # a prompt
        yield torch.randn(length, H, generator=rng), labels


on_four_ranks = ranks.together(4)


@on_four_ranks
def test_context_parallel_slices_are_all_counted(rank):
    """2 x 2: each rank holds a slice of every sequence; labels are shifted before the split."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    exact = parallel.Model()
    whole = [one for data_rank in range(2) for one in sequences(data_rank)]
    out = sum(exact(hidden, shift_labels(labels)) for hidden, labels in whole)
    out.mean().backward()
    micro = [
        (hidden.chunk(2)[cp], shift_labels(labels).chunk(2)[cp]) for hidden, labels in sequences(dp)
    ]
    for reduction, streaming in (("mean", False), ("sum", True)):
        model = parallel.Model()
        acc = LossAccumulator.from_mesh(mesh, ["dp", "cp"], model, grad_reduction=reduction)
        with contextlib.nullcontext() if streaming else acc.window([count(y) for _, y in micro]):
            for one in micro:
                acc.backward(model(*one))
        if streaming:
            acc.finish()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 4 if reduction == "mean" else 1
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            assert distance(p.grad, q.grad) <= SAME_SUMS
        assert acc.metrics()["n_tokens"] == out.n_valid
    # Shifting after the split loses the token at every border inside a sequence's answer.
    late = sum(count_valid(labels.chunk(2)[cp]) for _, labels in sequences(dp))
    dist.all_reduce(late)
    assert late < out.n_valid


def count(labels):
    return (labels != -100).sum()


@on_four_ranks
def test_ranks_that_an_accelerators_mesh_calls_tp_hold_the_same_tokens(rank):
    engine = SimpleNamespace(
        distributed_type="FSDP",
        gradient_accumulation_steps=1,
        backward=None,
        parallelism_config=SimpleNamespace(sp_enabled=False),
    )
    for shape, names, said in (
        ((2, 2), ("dp_shard", "tp"), "(2 ranks"), ((4,), ("tp",), "(1 rank,"),
    ):  # fmt: skip
        engine.torch_device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        assert said in repr(LossAccumulator.from_accelerator(engine))


@on_four_ranks
def test_meshes(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat["dp", "cp"]._flatten("tokens_of_all")
    dp, tp = divmod(rank, 2)
    for make, tokens in (
        (lambda: LossAccumulator.from_mesh(mesh, "dp"), (tp + 1) + (tp + 3)),
        (lambda: LossAccumulator.from_mesh(mesh, ["tp", "dp"]), 1 + 2 + 3 + 4),
        (lambda: LossAccumulator.from_mesh(mesh, []), rank + 1),
        (lambda: LossAccumulator(process_group=mesh["tp"]), (2 * dp + 1) + (2 * dp + 2)),
        (lambda: LossAccumulator.from_mesh(mesh, ["dp", "tp"]), 10),  # the same group again
        (lambda: LossAccumulator.from_mesh(flat, "tokens_of_all"), 10),
    ):
        acc = make()
        run_window(acc, new_weight(), batches([rank + 1]))
        assert acc.metrics()["n_tokens"] == tokens
    with pytest.raises(ValueError, match="must be a one-dimensional DeviceMesh, got 2"):
        LossAccumulator(process_group=mesh)
    with pytest.raises(ValueError, match=r"must name dimensions of the mesh \('dp', 'tp'\)"):
        LossAccumulator.from_mesh(mesh, ["cp"])
    with pytest.raises(ValueError, match="token_dims must name dimensions of the mesh"):
        LossAccumulator.from_mesh(flat, "dp_cp")


@on_four_ranks
def test_replicas_of_a_pipeline(rank):
    """2 x 2: the denominator counts the last stages of both replicas once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    n, pp = (3, 5)[mesh.get_local_rank("dp")], mesh.get_local_rank("pp")
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(module.weight)
    model = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    acc = LossAccumulator.from_mesh(mesh, "dp", model, pipeline_dim="pp")

    def loop():
        if pp:
            acc.backward((model(torch.full((1, 1), float(n))).sum(), torch.tensor(n)))

    for streaming in (False, True):
        model.zero_grad()
        if streaming and not pp:
            # The last stage sends a gradient averaged over "dp" and divided by its estimate.
            module.weight.grad = torch.full((1, 1), 8.0 / (2 * STREAMED))
        windowed(acc, streaming, None, [n] if pp else (), loop)
        if pp or streaming:
            assert float(module.weight.grad) == pytest.approx(1.0)
        else:
            assert module.weight.grad is None
    assert acc.metrics()["n_tokens"] == 16
    if not pp:
        with pytest.raises(RuntimeError, match="this rank has no loss"):
            acc.scale((module.weight.sum(), torch.tensor(1)))


def tensor_parallel(streaming, rank):
    """2 x 2: FSDP2 over "dp", the head's vocabulary over "tp" (31 classes: 16 and 15 rows)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel.Model()
    model.head.weight = torch.nn.Parameter(
        distribute_tensor(model.head.weight.detach(), mesh["tp"], [Shard(0)])
    )
    fully_shard(model, mesh=mesh["dp"])
    acc = LossAccumulator.from_mesh(mesh, "dp", model)
    found = train(model, acc, mesh.get_local_rank("dp"), streaming)
    grads = [parallel.whole(p.grad) for p in model.parameters()]
    norm = acc.clip_grad_norm_(0.01)  # the head lies on a mesh of two dimensions, the body on one
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert distance(parallel.whole(p.grad), grad * (0.01 / (norm + 1e-6))) <= SAME_SUMS
    assert float(norm) == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-5)
    return found


tensor_parallels = ranks.shared({x: functools.partial(tensor_parallel, x) for x in (0, 1)}, 4)


@FSDP2_MEAN
@pytest.mark.parametrize("streaming", [0, 1])
def test_tensor_parallel_replicas_are_not_counted_twice(streaming):
    for found in tensor_parallels(streaming):
        parallel.assert_equal_to_single_process(found, 2)


def timeouts(rank):
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "dp", "tp"))
    groups = [Ranks(submesh(mesh, dims)).group() for dims in ("dp", ["a", "tp"], ["dp", "tp"])]
    own = [own_group(group) for group in (*groups, dist.group.WORLD)]
    assert not {*own} & {*groups, dist.group.WORLD}  # gradients may be on their way in those
    made = (*groups[1:], *own)  # torch has made that of "dp"
    return [timeout_of(group).total_seconds() for group in made]


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_every_group_that_is_made_has_the_users_timeout(backend):
    for seconds in ranks.shared({"t": timeouts}, 4, timeout=33, backend=backend)("t"):
        assert seconds == [33] * 6
