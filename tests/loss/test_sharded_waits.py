"""A sharded vocabulary waits for its device where the ranks compare what they hold, and only there.

No device is needed: a tensor without data ("meta") raises where the host asks for it.
"""

import sys
from contextlib import nullcontext

import pytest
import torch

from fusedce.autograd import sharded_tokens
from fusedce.backends.sharded import exchange, per_token, tiles
from fusedce.backends.sharded.exchange import Shard
from fusedce.backends.torch.rows import valid_rows
from fusedce.backends.triton import archs, peers
from fusedce.backends.triton import sharded as triton_sharded
from fusedce.backends.triton.archs import BY_NAME
from fusedce.backends.triton.relaunch import Relaunch
from fusedce.contract.labels import bad_label_code
from fusedce.contract.problem import Problem, Wanted

N, H, V = 12, 8, 10


class Done:
    def wait(self):
        pass


@pytest.fixture
def alone(monkeypatch):
    for module in (tiles, exchange, per_token, peers, triton_sharded):
        monkeypatch.setattr(module, "all_gather", lambda x, group: torch.cat([x, x]))
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(exchange.dist, "all_reduce", lambda x, **_: Done())
    monkeypatch.setattr(
        exchange.dist, exchange.REDUCE_SCATTER, lambda out, x, **_: out.copy_(x[: len(out)])
    )


class Nothing:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid):
        return lambda *_, **__: self


@pytest.fixture
def no_kernels(monkeypatch):
    package = "fusedce.backends.triton."
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for kernel in (x for x in vars(module) if x.endswith("_kernel")):
                monkeypatch.setattr(module, kernel, Nothing())
            monkeypatch.setattr(module, "on", lambda device: nullcontext(), raising=False)
    cpu = BY_NAME["interpreter"]
    monkeypatch.setattr(archs, "architecture", lambda device: cpu)
    monkeypatch.setattr(Relaunch, "__call__", lambda self, grid, **changing: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [None, (N, N)])
@pytest.mark.parametrize("module", [tiles, triton_sharded])
def test_nothing_waits_after_the_ranks_have_met(alone, no_kernels, module, dtype, tokens):
    problem = Problem(
        torch.empty(N, H, dtype=dtype, device="meta"),
        torch.empty(V // 2, H, dtype=dtype, device="meta"),
        torch.empty(N, dtype=torch.int64, device="meta"),
        bias=torch.empty(V // 2, dtype=dtype, device="meta"),
        token_weight=torch.empty(N, device="meta"),
        softcap=3.0,
        label_smoothing=0.1,
        z_loss=0.1,
        chunk_tokens=4,
    )
    shard = Shard(None, 0, V, V // 2, tokens, counted=9, valid=9)
    wanted = Wanted(hidden=True, weight=True, bias=True)
    if module is triton_sharded:  # which sends smoothed logits with a cap another way
        problem = problem.but(softcap=None, backend="triton")
        total, n_valid = module.loss(problem, shard)
        assert total.shape == n_valid.shape == ()
    total, n_valid, _, *grads = module.loss_and_grads(problem, shard, wanted)
    assert total.shape == ()
    assert [grad.shape for grad in grads] == [(N, H), (V // 2, H), (V // 2,)]
    for waits in (bool, int, torch.nonzero):  # this is how it would be seen
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            waits(n_valid)


def test_nothing_waits_for_the_losses_of_tokens(alone, no_kernels, monkeypatch):
    monkeypatch.setattr(sharded_tokens, "resolve_backend", lambda backend, hidden: backend)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    problem = Problem(
        torch.empty(N, H, device="meta", requires_grad=True),
        torch.empty(V // 2, H, device="meta", requires_grad=True),
        torch.empty(N, dtype=torch.int64, device="meta"),
        class_weight=torch.empty(V, device="meta"),
        label_smoothing=0.1,
        backend="triton",
    )
    shard = Shard(None, 0, V, V // 2, None, counted=9, valid=9)
    losses, _ = sharded_tokens.losses(problem, shard)
    assert losses.shape == (N,)


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
    assert int(code) == bad_label_code(2, value)
    assert rows.tolist() == [0, 2, 3]
