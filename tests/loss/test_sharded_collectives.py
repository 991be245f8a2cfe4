"""What ranks that share a vocabulary send each other, and how many logits each holds."""

import functools

import pytest
import torch
import torch.distributed as dist
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
    cases = {name: functools.partial(sent, *call[:3]) for name, call in CALLS.items()}
    cases["blocks"] = blocks
    return ranks.run({k: v for k, v in cases.items() if k.startswith("Triton") == triton}, world)


@WORLDS
@pytest.mark.parametrize("name", [slow(k) if k.startswith("Triton") else k for k in CALLS])
def test_the_collectives_are_those_of_the_docstring(name, world):
    assert 8 * LENGTH <= 1024
    for found in ranks.of(results(world, name.startswith("Triton")), name):
        assert found == CALLS[name][3](world)


# ---- chunks -------------------------------------------------------------------------------------


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


@WORLDS
def test_only_a_block_of_logits_is_held(world):
    for training, evaluation in ranks.of(results(world), "blocks"):
        assert training == evaluation == 64
