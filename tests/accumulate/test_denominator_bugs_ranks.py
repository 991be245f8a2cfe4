"""Known denominator bugs over ranks: the naive loop is visibly wrong here, ours right."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.bounds import SAME_SUMS
from support.loops import batches, distance, new_weight, run_window, weight_and_grad
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator, fused_ce


def rank_means(rank):
    """Gradient distances (naive, ours) of DDP from the big batch; 1 token here, 20 there."""
    mine, parts = batches([(1, 20)[rank]], rank), batches([1], 0) + batches([20], 1)
    _, exact, _ = weight_and_grad(parts)
    found = []
    for naive in (True, False):
        head = _Head()
        model, acc = DistributedDataParallel(head), LossAccumulator()
        if naive:
            model(*mine[0]).mean().backward()
        else:
            with acc.window([(1, 20)[rank]]):
                acc.backward(model(*mine[0]))
        found.append(distance(head.weight.grad, exact))
    return found


def skipped_backward(rank):
    """Rank 1 has nothing valid: it skips its backward (naive), or takes part (ours)."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    one = batches([4 * (1 - rank)], rank)[0]
    model, acc = DistributedDataParallel(_Head()), LossAccumulator()
    with acc.window([4 * (1 - rank)]):
        acc.backward(model(*one))
    ours = model.module.weight.grad.norm().item()
    model = DistributedDataParallel(_Head(), process_group=group)
    naive = None
    if rank == 0:
        naive = ranks.error_of(model(*one).mean().backward)
    dist.barrier()
    return ours, naive


def counted_twice(rank):
    """Two replicas of the same 6 tokens: norm of the gradient over the right one, and tokens."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    micro = batches([6])
    _, exact, _ = weight_and_grad(micro)
    found = []
    for acc in (
        LossAccumulator(grad_reduction="sum"),
        LossAccumulator.from_mesh(mesh, "dp", grad_reduction="sum"),
    ):
        weight = new_weight()
        run_window(acc, weight, micro)
        found.append((float(weight.grad.norm() / exact.norm()), acc.metrics()["n_tokens"]))
    return found


class _Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(new_weight().detach())

    def forward(self, hidden, labels):
        return fused_ce(hidden, self.weight, labels)


@pytest.fixture(scope="module")
def two_ranks():
    return ranks.run({f.__name__: f for f in (rank_means, counted_twice, skipped_backward)})


@pytest.mark.slow
def test_rank_means(two_ranks):
    """transformers#34242: 1 token on one rank weighs as much as 20 on the other."""
    for naive, ours in ranks.of(two_ranks, "rank_means"):
        assert naive > 0.3
        assert ours <= SAME_SUMS


def test_replicas_counted_twice(two_ranks):
    """transformers#45994, #48167, #46775, #35808, Megatron-LM#673."""
    for naive, ours in ranks.of(two_ranks, "counted_twice"):
        assert naive == (pytest.approx(0.5), 12)
        assert ours == (pytest.approx(1, rel=1e-6), 6)


def test_a_rank_that_skips_its_backward(two_ranks):
    """Automodel#3796, #2468: the others wait for it until they time out."""
    (ours, naive), (same, _) = ranks.of(two_ranks, "skipped_backward")
    assert ours == same > 0
    assert "RuntimeError" in naive
