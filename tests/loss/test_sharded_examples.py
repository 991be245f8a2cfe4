"""Random calls on a vocabulary spread over real gloo processes equal those on the whole one."""

import functools
import os
import random

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.coverage import covered
from support.oracle import finished_logits
from support.vocabulary import compare_to_whole, inputs

from fusedce import fused_ce, fused_cross_entropy, fused_logprobs
from fusedce.sharded import sharded_ce, sharded_cross_entropy, sharded_logprobs

FIRST = int(os.environ.get("FUSEDCE_SEED", "0"))
COUNT = int(os.environ.get("FUSEDCE_SHARDED_EXAMPLES", "15"))
FUNCTIONS = (
    (sharded_ce, fused_ce),
    (sharded_cross_entropy, fused_cross_entropy),
    (sharded_logprobs, fused_logprobs),
)
OF_ALL = {"softcap": (1.0, 30.0), "logit_scale": (0.25, -1.5)}
OF_LOSSES = {"label_smoothing": (0.1, 1.0), "z_loss": (1e-4, 0.3)}
ROUNDINGS = ((torch.float64, 2**16), (torch.float32, 32), (torch.bfloat16, 0.5))
FLOOR = {dtype: n * torch.finfo(dtype).eps for dtype, n in ROUNDINGS}  # where both are lucky


def example(seed, world):
    """Draw functions, rows of each rank, tensors, options and dtype, alike on every rank."""
    rng = random.Random(seed)
    sharded, whole = rng.choice(FUNCTIONS)
    sizes = [rng.choice([0, 1, rng.randint(1, 40)]) for _ in range(world)]
    sizes[rng.randrange(world)] += 3
    dtype = rng.choice([torch.float64, torch.float32, torch.float32, torch.bfloat16])
    x = inputs(sum(sizes), dtype, n=rng.randint(1, 30), seed=seed, bias=rng.random() < 0.5)
    of_tokens = sharded is sharded_logprobs
    options = {
        name: rng.choice(values)
        for name, values in (OF_ALL if of_tokens else OF_ALL | OF_LOSSES).items()
        if rng.random() < 0.4
    }
    n = len(x["labels"])
    draws = torch.Generator().manual_seed(seed)
    if of_tokens and rng.random() < 0.5:
        options["temperature"] = rng.choice([0.4, 2.0, 0.5 + torch.rand(n, generator=draws)])
    if of_tokens and rng.random() < 0.4:
        x["labels"] = torch.randint(sum(sizes), (n, rng.randint(1, 5)), generator=draws)
        x["hidden"] = x["hidden"].nan_to_num(0.3)
    if sharded is sharded_cross_entropy:
        options["reduction"] = rng.choice(["mean", "sum", "none"])
        if rng.random() < 0.5:
            options["class_weight"] = torch.rand(sum(sizes), generator=draws) + 0.1
    if not of_tokens and rng.random() < 0.5:
        options["token_weight"] = torch.rand(n, generator=draws) - 0.3
    if rng.random() < 0.3:
        options["chunk_tokens"] = rng.randint(1, 12)
    backend = "triton" if dtype != torch.float64 and rng.random() < 0.15 else "torch"
    return sharded, whole, sizes, x, options, backend


def one_example(seed, rank):
    """Compare the example of a seed; return its function, dtype and options."""
    sharded, whole, sizes, x, options, backend = example(seed, dist.get_world_size())
    argmax = 3 if sharded is sharded_logprobs else None
    out = compare_to_whole(
        x, sharded, whole, sizes, options, backend, rank, FLOOR, f"seed {seed},", argmax
    )
    if argmax:
        likeliest(out[argmax], x, options, seed)
    dtype = str(x["hidden"].dtype).removeprefix("torch.")
    return sharded.__name__, (dtype, f"backend={backend}", *options)


def likeliest(argmax, x, options, seed):
    """Check that each ``argmax`` has the largest logit; a soft-cap makes several nearly equal."""
    options = {k: v for k, v in options.items() if k in OF_ALL}
    bias = x["bias"].double() if "bias" in x else None
    z = finished_logits(x["hidden"].double(), x["weight"].double(), bias, **options)
    labels = x["labels"].reshape(len(z), -1)
    valid = labels.ne(-100).any(1)
    assert argmax[~valid].eq(-1).all(), seed
    below = z.amax(1) - z.gather(1, argmax.clamp(min=0)[:, None])[:, 0]
    # eps times sums of H products, which may be a hundred times their result
    assert (below[valid] <= 1e-5 * z.abs().amax(1)[valid]).all(), seed


def examples(first, count, rank):
    return [one_example(seed, rank) for seed in range(first, first + count)]


@pytest.mark.slow
@pytest.mark.hypothesis
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4])
def test_any_call_on_ranks(world):
    count = COUNT if world == 2 else COUNT // 3
    found = ranks.run({"examples": functools.partial(examples, FIRST, count)}, world)
    for name, facts in ranks.of(found, "examples")[0]:
        covered(name, f"{world} ranks", *facts)
