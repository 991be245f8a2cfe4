"""Loops of one's own, in each precision, on one and two ranks, beside one batch in float64.

Trainer, TRL and accelerate have tests of their own beside this file and in tests/examples.
"""

import contextlib
import functools
import itertools

import pytest
import torch
from support import ranks
from support.loops import batches, distance, windowed
from support.parallel import Model
from torch.nn.parallel import DistributedDataParallel

from fusedce import LossAccumulator

# Tokens of each micro-batch, [rank][micro-batch].
LENGTHS = {
    "even": [[8, 8, 8], [8, 8, 8]],
    "uneven": [[1, 30, 5], [2, 3, 60]],
    "empty": [[0, 9, 0], [0, 0, 4]],
}
# Bounds: as many roundings as a sum of the gradients of a few dozen tokens has.
PRECISIONS = {
    "float32": (torch.float32, 1e-6),
    "bfloat16": (torch.bfloat16, 3 * 2**-8),
    "float16": (torch.float16, 3 * 2**-11),
}


def exact(lengths, world):
    model = Model().double()
    parts = [one for rank in range(world) for one in batches(LENGTHS[lengths][rank], rank)]
    hidden, labels = (torch.cat(x) for x in zip(*parts, strict=True))
    model(hidden.double(), labels).mean().backward()
    return [p.grad for p in model.parameters()]


def check(world, rank):
    for lengths, precision, streaming in itertools.product(LENGTHS, PRECISIONS, (False, True)):
        dtype, bound = PRECISIONS[precision]
        model = Model() if world == 1 else DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
        acc = LossAccumulator(model, grad_scaler=scaler)
        micro = batches(LENGTHS[lengths][rank], rank)

        def loop(model=model, acc=acc, dtype=dtype, micro=micro):
            for i, one in enumerate(micro):
                waits = world == 1 or i == len(micro) - 1
                with contextlib.nullcontext() if waits else model.no_sync():
                    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                        out = model(*one)
                    acc.backward(out)

        for _ in range(2):
            windowed(acc, streaming, None, LENGTHS[lengths][rank], loop)
            scaler.unscale_(optimizer)
            for p, grad in zip(model.parameters(), exact(lengths, world), strict=True):
                assert distance(p.grad, grad) <= bound, (lengths, precision, streaming)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert acc.metrics()["n_tokens"] == 2 * sum(map(sum, LENGTHS[lengths][:world]))


@pytest.mark.parametrize("world", [1, 2])
def test_a_loop_in_each_precision_is_that_of_one_batch(world):
    if world == 1:
        check(1, 0)
    else:
        ranks.shared({"check": functools.partial(check, world)}, world)("check")
