"""A sharded vocabulary waits for its device where the ranks compare what they hold, and only there.

No device is needed: a tensor without data ("meta") raises where the host asks for it.
"""

import pytest
import torch

from fusedce.backends.shards import collectives, merge
from fusedce.backends.torch import sums
from fusedce.backends.torch.rows import valid_rows
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [None, (N, N)])
def test_nothing_waits_after_the_ranks_have_met(alone, dtype, tokens):
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
    shard = Shard("", 0, V, V // 2, tokens, counted=9, valid=9)
    wanted = Wanted(hidden=True, weight=True, bias=True)
    total, n_valid, _, *grads = sums.loss_and_grads(Task(problem, wanted, shard=shard))
    assert total.shape == ()
    assert [grad.shape for grad in grads] == [(N, H), (V // 2, H), (V // 2,)]
    for waits in (bool, int, torch.nonzero):  # a wait would raise like this
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            waits(n_valid)


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
