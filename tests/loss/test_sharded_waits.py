"""A sharded vocabulary waits for its device where the ranks compare what they hold, and only there.

No device is needed: a tensor without data ("meta") raises where the host asks for it.
"""

import sys
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedce.backends.shards import collectives, merge
from fusedce.backends.shards import tokens as tokens_of_shards
from fusedce.backends.torch.rows import valid_rows
from fusedce.backends.triton import archs, training
from fusedce.backends.triton import sharded_sum as triton_sharded
from fusedce.backends.triton.archs import BY_NAME
from fusedce.backends.triton.launch import CachedLaunch
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
    """A kernel of which nothing but the launches is seen."""

    arg_names = ()

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def __getitem__(self, grid):
        return lambda *_, **__: self.seen.append((self.name, grid))


@pytest.fixture
def launches(monkeypatch):
    """``[(name, grid)]`` of kernels, which do nothing."""
    seen = []
    for name, module in list(sys.modules.items()):
        if name.startswith("fusedce.backends.triton."):
            for kernel in (x for x in vars(module) if x.endswith("_kernel")):
                monkeypatch.setattr(module, kernel, Launched(kernel, seen))
            monkeypatch.setattr(module, "on", lambda device: nullcontext(), raising=False)
    cpu = BY_NAME["interpreter"]
    monkeypatch.setattr(archs, "architecture", lambda device: cpu)
    monkeypatch.setattr(archs, "processors", lambda device: 3)

    def again(self, grid, **changing):
        seen.append((self._kernel.name, grid))

    monkeypatch.setattr(CachedLaunch, "__call__", again)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [None, (N, N)])
def test_nothing_waits_after_the_ranks_have_met(alone, launches, dtype, tokens):
    problem = Problem(
        torch.empty(N, H, dtype=dtype, device="meta"),
        torch.empty(V // 2, H, dtype=dtype, device="meta"),
        torch.empty(N, dtype=torch.int64, device="meta"),
        bias=torch.empty(V // 2, dtype=dtype, device="meta"),
        token_weight=torch.empty(N, device="meta"),
        softcap=3.0,
        z_loss=0.1,
        chunk_tokens=4,
        backend="triton",
    )
    shard = Shard("", 0, V, V // 2, tokens, counted=9, valid=9)
    wanted = Wanted(hidden=True, weight=True, bias=True)
    total, n_valid, _, *grads = triton_sharded.loss_and_grads(problem, shard, wanted)
    assert total.shape == ()
    assert [grad.shape for grad in grads] == [(N, H), (V // 2, H), (V // 2,)]
    for waits in (bool, int, torch.nonzero):  # a wait would raise like this
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            waits(n_valid)


class Products(TorchDispatchMode):
    """Matrix products among the launches."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.seen.append((name, tuple(out.shape)))
        return out


def test_the_launches_over_tiles_are_those_of_a_whole_vocabulary(alone, launches, monkeypatch):
    """Ranks exchange rows' numbers between them, and d_hidden beside the weight's product."""
    seen = launches
    ones = torch.ones((), device="meta")
    monkeypatch.setattr(training, "rows_and_factor", lambda problem, packed: (N, 1.0, ones))

    def reduced(x, **_):
        seen.append(("all_reduce", tuple(x.shape)))
        return Done()

    monkeypatch.setattr(collectives.dist, "all_reduce", reduced)
    problem = Problem(
        torch.empty(N, H, dtype=torch.bfloat16, device="meta"),
        torch.empty(V, H, dtype=torch.bfloat16, device="meta"),
        torch.empty(N, dtype=torch.int64, device="meta"),
        token_weight=torch.ones(N, device="meta"),
        chunk_tokens=5,
        backend="triton",
    )
    wanted = Wanted(hidden=True, weight=True)
    with Products(seen):
        training.loss_and_grads(problem, wanted, None)
    whole, seen[:] = list(seen), []
    with Products(seen):
        shard = Shard("", 0, 2 * V, V, None, counted=N, valid=N)
        triton_sharded.loss_and_grads(problem, shard, wanted)
    small = ("label_logit_kernel", "all_reduce")
    chunks = 3
    assert [x for x in seen if x[0] not in small] == [x for x in whole if x[0] not in small]
    assert [x for x in whole if x[0] == "exp_tile_kernel"]
    names = [name for name, _ in seen]
    assert [names.count(name) for name in small] == [1, 1 + chunks]
    assert [x for x in seen if x[0] == "all_reduce"] == [
        ("all_reduce", shape) for shape in ((N,), (5, H), (5, H), (2, H))
    ]
    for i, name in enumerate(names):  # the product for the weight runs beside the sum over ranks
        if name == "all_reduce" and i > names.index("softmax_rows_kernel"):
            assert names[i - 1] == "hidden_grad_kernel"
            assert seen[i + 1][0] in ("mm", "addmm")
            assert seen[i + 1][1] == (V, H)


def test_nothing_waits_for_the_losses_of_tokens(alone, launches):
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
