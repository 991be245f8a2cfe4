"""A sharded vocabulary waits for its device where the ranks compare what they hold, and only there.

No device is needed: a tensor without data ("meta") raises where the host asks for it.
"""

import sys
from contextlib import nullcontext

import pytest
import torch

from fusedce.backends import shards
from fusedce.backends.triton import archs
from fusedce.backends.triton.archs import BY_NAME
from fusedce.contract.labels import bad_label_code, count_or_code
from fusedce.contract.problem import Outputs, Problem, Shard, Task
from fusedce.ranks import merge

N, H, V = 12, 8, 10


class Launched:
    """A kernel that does nothing."""

    arg_names = ()

    def __getitem__(self, grid):
        return lambda *_, **__: None


def test_nothing_waits_for_the_losses_of_tokens(monkeypatch):
    monkeypatch.setattr(Shard, "group", None)
    monkeypatch.setattr(merge.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(shards, "all_gather", lambda x, group: torch.cat([x, x]))
    for name, module in list(sys.modules.items()):
        if name.startswith("fusedce.backends.triton."):
            for kernel in (x for x in vars(module) if x.endswith("_kernel")):
                monkeypatch.setattr(module, kernel, Launched())
            monkeypatch.setattr(module, "device_guard", lambda device: nullcontext(), raising=False)
    cpu = BY_NAME["interpreter"]
    monkeypatch.setattr(archs, "architecture", lambda device: cpu)
    problem = Problem(
        torch.empty(N, H, device="meta"),
        torch.empty(V // 2, H, device="meta"),
        torch.empty(N, dtype=torch.int64, device="meta"),
        class_weight=torch.empty(V, device="meta"),
        label_smoothing=0.1,
        backend="triton",
    )
    task = Task(problem, Outputs(lse=True, zmean=True))
    (nll, lse, _, zmean, *_), _ = merge.token_stats(task, shard=Shard("", 0, V, V // 2))
    assert nll.shape == lse.shape == zmean.shape == (N,)


@pytest.mark.parametrize("value", [-3, V, 2**40, -(2**40)])
def test_a_bad_label_is_a_code(value):
    labels = torch.tensor([1, -100, value, -2])
    valid = torch.tensor([True, False, True, True])
    bad = torch.tensor([False, False, True, True])
    code = bad_label_code(torch.tensor(2), torch.tensor(value))
    assert count_or_code(labels, valid, bad) == code
    assert int(count_or_code(labels, valid, torch.zeros_like(bad))) == 3
