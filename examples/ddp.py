"""DistributedDataParallel: one all-reduce of gradients per step, one denominator for all ranks.

    torchrun --nproc-per-node 2 examples/ddp.py

Look at: the loss is computed inside the model's `forward`, so that DDP sees its parameters used,
and no rank divides anything: the accumulator knows the tokens of all of them. What is logged is the
same on every rank, and the same as on one.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce

ACCUMULATION = 4  # micro-batches of a step, on all ranks
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


def batches(n: int = 10) -> list[dict[str, Tensor]]:
    """Micro-batches of very different numbers of tokens."""
    rng = torch.Generator().manual_seed(0)
    ids = [torch.randint(8, (2, 3 + 5 * (i % 4)), generator=rng) for i in range(n)]
    return [{"input_ids": x, "labels": x} for x in ids]


def train(epochs: int = 2) -> list[dict[str, float]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(fusedce.replace_loss_head(LlamaForCausalLM(CONFIG)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acc = fusedce.LossAccumulator(model)  # over all ranks; DDP averages gradients, the default
    mine, accumulation = batches()[rank::world], ACCUMULATION // world
    history = []
    for _ in range(epochs):
        for begin in range(0, len(mine), accumulation):
            window = mine[begin : begin + accumulation]
            with acc.window([fusedce.count_valid(batch) for batch in window]):
                for i, batch in enumerate(window):
                    # A batch without valid tokens takes part as well: the others wait for it.
                    with nullcontext() if i == len(window) - 1 else model.no_sync():
                        acc.backward(fusedce.model_loss(model, batch))
            acc.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            history.append(acc.metrics(reset=True))
    return history


def main() -> None:
    dist.init_process_group("gloo")
    for metrics in train():
        if dist.get_rank() == 0:
            print({name: round(x, 4) for name, x in metrics.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
