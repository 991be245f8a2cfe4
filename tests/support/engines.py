"""A run of the tiny model under an engine, and accelerate in a forked process."""

import contextlib
import os

import torch
import torch.distributed as dist

from fusedce import count_valid
from support import parallel


def train(model, acc, data_rank, streaming, *, silent=None):
    """Every window of `parallel`, by declared counts or streaming; ``acc`` knows the model.

    ``silent(model)``: the engine's context (or switch) for micro-batches before the last one.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=parallel.LEARNING_RATE)
    grads = []
    for window in range(len(parallel.WINDOWS)):
        optimizer.zero_grad()
        micro = parallel.micro_batches(window, data_rank)
        counts = [count_valid(y, offset=0) for _, y in micro]
        with contextlib.nullcontext() if streaming else acc.window(counts):
            for i, (hidden, labels) in enumerate(micro):
                last = i == len(micro) - 1
                with silent(model, last) if silent else contextlib.nullcontext():
                    acc.backward(model(hidden, labels))
        if streaming:
            acc.finish()
        grads.append([parallel.whole(p.grad) for p in model.parameters()])
        optimizer.step()
    return grads, [parallel.whole(p) for p in model.parameters()], acc.metrics()


def accelerator(rank, **kwargs):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    return Accelerator(cpu=True, **kwargs)
