"""DistributedDataParallel: one all-reduce of gradients per step, one denominator for all ranks.

    torchrun --nproc-per-node 2 examples/ddp.py

Look at: the loss is computed inside `forward`, so that DDP sees its parameters used, and no rank
divides anything: the accumulator knows the tokens of all of them. What is logged is the same on
every rank, and the same as on one.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from tiny import SEQUENCES_PER_MICRO_BATCH, SEQUENCES_PER_STEP, TinyLM, documents, micro_batches
from tiny import windows as windows_of
from torch.nn.parallel import DistributedDataParallel

import fusedce


def train(epochs: int = 2) -> list[dict[str, float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(TinyLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acc = fusedce.LossAccumulator()  # over all ranks; DDP averages gradients, the default
    acc.guard(optimizer, model)
    accumulation = SEQUENCES_PER_STEP // SEQUENCES_PER_MICRO_BATCH // world
    history = []
    for _ in range(epochs):
        mine = micro_batches(documents()[:-4])[rank::world]
        for window in windows_of(mine, accumulation):
            with acc.window([fusedce.count_valid(batch) for batch in window]):
                for i, batch in enumerate(window):
                    # A batch without valid tokens takes part as well: the others wait for it.
                    with nullcontext() if i == len(window) - 1 else model.no_sync():
                        acc.backward(model(**batch))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            history.append(acc.metrics(reset=True))
    return history


def main() -> None:
    dist.init_process_group("gloo")
    for metrics in train():
        if dist.get_rank() == 0:
            print(metrics)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
