"""A sharded vocabulary waits for its device where the ranks compare what they hold, and only there.

No device is needed: a tensor without data ("meta") raises where the host asks for it.
"""

import sys
from contextlib import nullcontext

import pytest
import torch

from fusedce.backends.shards import collectives, merge
from fusedce.backends.shards import tokens as tokens_of_shards
from fusedce.backends.torch.rows import valid_rows
from fusedce.backends.triton import archs
from fusedce.backends.triton.archs import BY_NAME
from fusedce.contract.labels import bad_label_code
from fusedce.contract.problem import Problem, Wanted
from fusedce.contract.task import Shard, Task

N, H, V = 12, 8, 10


class Done:
    def wait(self):
        pass


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(Shard, "group", None)
    for module in (collectives, merge):
        monkeypatch.setattr(module, "all_gather", lambda x, group: torch.cat([x, x]))
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda x, **_: Done())
    monkeypatch.setattr(
        collectives.dist, collectives.REDUCE_SCATTER, lambda out, x, **_: out.copy_(x[: len(out)])
    )


class Launched:
    """A kernel that does nothing."""

    arg_names = ()

    def __getitem__(self, grid):
        return lambda *_, **__: None


@pytest.fixture
def nothing_launched(monkeypatch):
    for name, module in list(sys.modules.items()):
        if name.startswith("fusedce.backends.triton."):
            for kernel in (x for x in vars(module) if x.endswith("_kernel")):
                monkeypatch.setattr(module, kernel, Launched())
            monkeypatch.setattr(module, "on", lambda device: nullcontext(), raising=False)
    cpu = BY_NAME["interpreter"]
    monkeypatch.setattr(archs, "architecture", lambda device: cpu)


def test_nothing_waits_for_the_losses_of_tokens(alone, nothing_launched):
    problem = Problem(
        torch.empty(N, H, device="meta"),
        torch.empty(V // 2, H, device="meta"),
        torch.empty(N, dtype=torch.int64, device="meta"),
        class_weight=torch.empty(V, device="meta"),
        label_smoothing=0.1,
        backend="triton",
    )
    shard = Shard("", 0, V, V // 2, None, counted=9, valid=9)
    task = Task(problem, Wanted(lse=True, zmean=True), shard=shard)
    nll, lse, _, zmean, *_ = tokens_of_shards.stats(task, shard)
    assert nll.shape == lse.shape == zmean.shape == (N,)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_found_without_waiting(weighted):
    rng = torch.Generator().manual_seed(0)
    for n in (0, 1, 40):
        labels = torch.randint(V, (n,), generator=rng)
        labels[torch.rand(n, generator=rng) < 0.4] = -100
        weights = torch.randint(2, (n,), generator=rng).float() if weighted else None
        problem = Problem(torch.empty(n, H), torch.empty(V, H), labels, token_weight=weights)
        rows, n_valid = valid_rows(problem, V)
        found, count = valid_rows(problem, V, len(rows))
        assert found.tolist() == rows.tolist()
        assert int(count) == int(n_valid)


@pytest.mark.parametrize("value", [-3, V, 2**40, -(2**40)])
def test_a_bad_label_is_a_code(value):
    labels = torch.tensor([1, -100, value, -2])
    problem = Problem(torch.empty(4, H), torch.empty(V, H), labels)
    rows, code = valid_rows(problem, V, 3)
    assert code == bad_label_code(torch.tensor(2), torch.tensor(value))
    assert rows.tolist() == [0, 2, 3]
