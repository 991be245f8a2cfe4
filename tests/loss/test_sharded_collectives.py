"""What ranks that share a vocabulary send each other, and the chunks and budgets they agree on."""

import functools
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import ranks
from support.params import slow
from support.vocabulary import UNEQUAL, H, K, Largest, Layout, N, inputs, watched_collectives

from fusedce import fused_ce, fused_cross_entropy, fused_logprobs
from fusedce.agreement import ALL_GATHER
from fusedce.backends import plan
from fusedce.ranks.agreement import LENGTH

WORLDS = pytest.mark.parametrize("world", [2, 4])


def sent(function, options, grad, rank):
    """Collectives of one training step or evaluation."""
    x = inputs(sum(UNEQUAL[dist.get_world_size()]), torch.float32)
    if options.get("kind") == "several":
        options = {k: v for k, v in options.items() if k != "kind"}
        x["labels"] = x["labels"][:, None].expand(N, K)
    local, _, _ = Layout().held(x, rank)
    with watched_collectives() as calls, torch.set_grad_enabled(grad):
        out = function(**local, process_group=dist.group.WORLD, **options)[0]
        forward = list(calls)
        if grad:
            out.sum().backward()
    return forward, calls[len(forward) :]


def met(world):
    return (ALL_GATHER, world * LENGTH, True)


def of_tokens(world, n=N):
    return [met(world), (ALL_GATHER, world * 2 * n, False)], [("all_reduce", n * H, False)]


def of_smoothing(world):
    """With the mean logit."""
    return [met(world), (ALL_GATHER, world * 3 * N, False)], [("all_reduce", N * H, False)]


def of_evaluation(world):
    return of_tokens(world)[0], []


def of_own_tokens(world):
    (first, *others), backward = of_tokens(world, world * N)
    gathered = [(ALL_GATHER, world * size, False) for size in (N * H, N)]
    return [first, *gathered, *others], backward


def of_losses_of_own_tokens(world):
    forward, backward = of_own_tokens(world)
    return forward, [(ALL_GATHER, world * N, False), *backward]


def of_statistics(world):
    """With entropy, maximum and its class."""
    return [met(world), (ALL_GATHER, world * 5 * N, False)], [("all_reduce", N * H, False)]


def of_classes(world):
    (first, *others), backward = of_statistics(world)
    return [first, ("all_reduce", N * K, False), *others], backward


def losses(*arguments, **options):
    return [fused_cross_entropy(*arguments, reduction="none", **options)]


TORCH, TRITON = ({"backend": name, "chunk_tokens": 8} for name in ("torch", "triton"))
CALLS = {
    "sum": (fused_ce, TORCH, True, of_tokens),
    "statistics": (fused_logprobs, {}, True, of_statistics),
    "statistics of several": (fused_logprobs, {"kind": "several"}, True, of_classes),
    "smoothing": (fused_ce, TORCH | {"label_smoothing": 0.1}, True, of_smoothing),
    "evaluation": (fused_ce, TORCH, False, of_evaluation),
    "own tokens": (fused_ce, TORCH | {"tokens_sharded": True}, True, of_own_tokens),
    "losses of own tokens": (losses, {"tokens_sharded": True}, True, of_losses_of_own_tokens),
    "Triton": (fused_ce, TRITON, True, of_tokens),
}


@functools.cache
def results(world, triton=False):
    cases = {name: functools.partial(sent, *call[:3]) for name, call in CALLS.items()} | OTHERS
    if world == 4:  # takes long
        del cases["Triton, budgets"]
    return ranks.run({k: v for k, v in cases.items() if k.startswith("Triton") == triton}, world)


@WORLDS
@pytest.mark.parametrize("name", [slow(k) if k.startswith("Triton") else k for k in CALLS])
def test_the_collectives_are_those_of_the_docstring(name, world):
    assert 8 * LENGTH <= 1024
    for found in ranks.of(results(world, name.startswith("Triton")), name):
        assert found == CALLS[name][3](world)


# ---- chunks and budgets -------------------------------------------------------------------------


def blocks(rank):
    """No more than a block of tokens' logits is ever held, in training and in evaluation."""
    world = dist.get_world_size()
    local, _, _ = Layout({world: (64 // world,) * world}).held(inputs(64, n=200), rank)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "CPU", plan.CPU._replace(block_tokens=64))
        for grad in (True, False):
            with torch.set_grad_enabled(grad), Largest(64 // world) as largest:
                out = fused_ce(**local, process_group=dist.group.WORLD)
                if grad:
                    out.loss_sum.backward()
            found.append(largest.tokens)
    return found


def budgets(backend, two, rank):
    """The loss and gradients under ``two`` budgets, and errors for too small or differing ones."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 24, generator=rng).bfloat16().requires_grad_()
    weight = torch.randn(1500, 24, generator=rng).bfloat16().requires_grad_()
    x = {
        "hidden": hidden, "weight": weight, "labels": torch.arange(300),
        "process_group": dist.group.WORLD,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "SCRATCH_CPU", 0)
        losses, grads = [], []
        for budget in two:
            loss = fused_ce(**x, backend=backend, memory_budget=budget).loss_sum
            losses.append(float(loss.detach()))
            grads.append(torch.autograd.grad(loss, (hidden, weight)))
        small = ranks.error_of(functools.partial(fused_ce, **x, memory_budget=2**16))
        other = ranks.error_of(functools.partial(fused_ce, **x, memory_budget=2**20 + rank))
        patch.setenv("FUSEDCE_MEMORY_BUDGET", str(2**20 + rank))
        of_environment = ranks.error_of(functools.partial(fused_ce, **x))
        patch.delenv("FUSEDCE_MEMORY_BUDGET")
        capped = functools.partial(fused_cross_entropy, **x, reduction="none", softcap=5.0)
        least = re.search(r"at least (\d+) bytes", ranks.error_of(capped, memory_budget=1))
        assert least is not None
        capped(memory_budget=int(least[1])).sum().backward()  # has room, too
        x["hidden"].grad = x["weight"].grad = None
    torch.testing.assert_close(losses, losses[:1] * len(losses))
    rows = slice(1500 * rank, 1500 * (rank + 1))
    whole = weight.detach().repeat(dist.get_world_size(), 1)  # every rank has drawn the same
    exact = [x.detach().double().requires_grad_() for x in (whole, hidden)]
    logits = exact[1] @ exact[0].T
    of_weight, of_hidden = torch.autograd.grad(
        F.cross_entropy(logits, x["labels"], reduction="sum"), exact
    )
    for found in grads:  # of each way, within two roundings
        for g, e in zip(found, (of_hidden, of_weight[rows]), strict=True):
            assert (g.double() - e).norm() <= 2 * 2**-9 * e.norm()
    return small, other, of_environment


OTHERS = {
    "blocks": blocks,
    "budgets": functools.partial(budgets, "torch", (2**24, 2**19)),
    "Triton, budgets": functools.partial(budgets, "triton", (2**24, 2**21)),
}


@WORLDS
def test_only_a_block_of_logits_is_held(world):
    for training, evaluation in ranks.of(results(world), "blocks"):
        assert training == evaluation == 64


@pytest.mark.parametrize(
    ("world", "name"), [(2, "budgets"), (4, "budgets"), slow(2, "Triton, budgets")]
)
def test_a_budget_is_one_of_all_ranks(name, world):
    of_ranks = ranks.of(results(world, name.startswith("Triton")), name)
    for small, other, of_environment in of_ranks:
        assert "ValueError: memory_budget must be at least" in small
        assert "memory_budget must be the same on all ranks" in other
        assert "memory_budget must be the same on all ranks" in of_environment
