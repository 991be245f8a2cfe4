"""FSDP2 with streaming: counts become known while micro-batches come, `finish` corrects once.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Look at: the counts need not be known in advance. `finish` comes once for each step, before
clipping, and the head is whole where the loss is computed, inside the root module's `forward`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from tiny import SEQUENCES_PER_MICRO_BATCH, SEQUENCES_PER_STEP, TinyLM, documents, micro_batches
from tiny import windows as windows_of
from torch.distributed.fsdp import fully_shard

import fusedce


def train(epochs: int = 2) -> list[dict[str, float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = TinyLM()
    fully_shard(model.layer)
    fully_shard(model)  # the head is whole inside forward, where the loss is computed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # FSDP2 averages. After model.set_gradient_divide_factor(1.0) it adds: grad_reduction="sum".
    acc = fusedce.LossAccumulator()
    acc.guard(optimizer, model)
    accumulation = SEQUENCES_PER_STEP // SEQUENCES_PER_MICRO_BATCH // world
    history = []
    for _ in range(epochs):
        mine = micro_batches(documents()[:-4])[rank::world]
        for window in windows_of(mine, accumulation):
            for i, batch in enumerate(window):
                model.set_requires_gradient_sync(i == len(window) - 1)
                acc.backward(model(**batch))
            acc.finish(model.parameters())  # before clipping
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
