"""Token losses: ranks that pass different arguments raise the same error at once."""

import functools

import pytest
import torch
import torch.distributed as dist
from support import ranks

from fusedce import fused_cross_entropy
from fusedce.sharded import sharded_argmax, sharded_ce, sharded_cross_entropy, sharded_logprobs

N, H, V = 7, 4, 6


def inputs():
    rng = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(N, H, generator=rng),
        "weight": torch.randn(V // 2, H, generator=rng, requires_grad=True),
        "labels": torch.randint(V, (N,), generator=rng),
    }


def differ(function, mine, theirs, rank):
    """Rank 1 passes another argument; afterwards both are in step."""
    if rank:
        function, options = theirs if isinstance(theirs, tuple) else (function, theirs)
    else:
        options = mine
    group = {"process_group": dist.group.WORLD}
    error, seconds = ranks.timed(function, **inputs() | options, **group)
    after = sharded_cross_entropy(**inputs(), **group, reduction="none")
    return error, seconds, len(after)


def c(*numbers):
    return {"class_weight": torch.tensor(numbers), "reduction": "none"}


NONE = {"reduction": "none"}
LOSS, STATS = sharded_cross_entropy, sharded_logprobs
FROZEN = {"weight": torch.zeros(V // 2, H)}
CASES = {
    "one without class weights": (
        LOSS, c(*range(V)), NONE, "class_weight must be the same on all ranks that share",
    ),
    "other class weights": (
        LOSS, c(*range(V)), c(0, 1, 2, 3, 5, 4), "class_weight must be the same on all ranks",
    ),
    "class weights of a shard": (
        LOSS, c(1, 2, 3), c(1, 2, 3), "class_weight must be (V,) = (6,), the weights of all ranks",
    ),
    "class weights with a gradient": (
        LOSS, NONE, {"class_weight": torch.ones(V, requires_grad=True), **NONE},
        "class_weight must not require grad",
    ),
    "reduction": (LOSS, NONE, {"reduction": "median"}, "reduction must be 'mean', 'sum' or 'none'"),
    "losses and their sum": (
        LOSS, NONE, {}, "function must be the same on all ranks that share the vocabulary, here it "
        "is ['losses of tokens', 'a sum of losses']",
    ),
    "other functions": (
        STATS, {}, (sharded_ce, {}), "['statistics of tokens', 'a sum of losses']",
    ),
    "mean logit": (STATS, {}, {"mean_logit": True}, "'statistics of tokens with mean_logit'"),
    "temperature": (
        STATS, {"temperature": 0.5}, {}, "logit_scale / temperature must be the same on all ranks",
    ),
    "temperatures": (
        STATS, {"temperature": torch.ones(N)}, {}, "temperature must be the same on all ranks",
    ),
    "cold": (STATS, {}, {"temperature": 0.0}, "temperature must be positive, got 0.0"),
    "cold tokens": (
        STATS, {"temperature": torch.ones(N)}, {"temperature": torch.zeros(N)},
        "temperature must be positive and finite, got 0.0 at flattened position 0",
    ),
    "frozen on one rank": (STATS, {}, FROZEN, "weight.requires_grad must be the same on all ranks"),
    "bad label": (
        STATS, {"labels": torch.full((N,), V)}, {"labels": torch.full((N,), V)},
        "labels must hold class indices in 0 <= label < V=6",
    ),
    "several classes on one rank": (
        STATS, {"labels": torch.zeros(N, 2, dtype=torch.int64)}, {},
        "['statistics of tokens, 2 classes each', 'statistics of tokens']",
    ),
    "other classes": (
        STATS, {"labels": torch.zeros(N, 2, dtype=torch.int64)},
        {"labels": torch.ones(N, 2, dtype=torch.int64)}, "labels must be the same on all ranks",
    ),
    "several classes of a loss": (
        LOSS, *[{"labels": torch.zeros(N, 2, dtype=torch.int64), **NONE}] * 2,
        "labels must have the leading shape of hidden (7,), got (7, 2)",
    ),
    "backend": (LOSS, NONE, {"backend": "cuda", **NONE}, "backend must be None, 'torch'"),
    "float64 kernels": (
        LOSS,
        *[{"backend": "triton", "hidden": torch.zeros(N, H, dtype=torch.float64), **NONE,
           "weight": torch.zeros(V // 2, H, dtype=torch.float64)}] * 2,
        "RuntimeError: backend='triton' cannot run",
    ),
}  # fmt: skip


def argmax_of_no_tensor(rank):
    x = inputs()
    hidden = None if rank else x["hidden"]
    error = ranks.error_of(sharded_argmax, hidden, x["weight"], process_group=dist.group.WORLD)
    return error, 0.0, N


@functools.cache
def results():
    cases = {name: functools.partial(differ, *case[:3]) for name, case in CASES.items()}
    return ranks.run(cases | {"argmax": argmax_of_no_tensor})


@pytest.mark.parametrize("name", [*CASES, "argmax"])
def test_all_ranks_raise_the_same(name):
    (a, fast, after), (b, fast_too, _) = ranks.of(results(), name)
    assert a == b
    assert (CASES[name][3] if name in CASES else "hidden must be a tensor") in a
    assert max(fast, fast_too) < ranks.SOON
    assert after == N


def test_torch_distributed_must_be_initialised():
    x = inputs()
    for function in (sharded_ce, sharded_cross_entropy, sharded_logprobs):
        with pytest.raises(ValueError, match=r"process_group: torch.distributed must be init"):
            function(**x)
    with pytest.raises(TypeError, match="process_group must be a process group"):
        fused_cross_entropy(**x, process_group="tp")
