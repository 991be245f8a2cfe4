"""FSDP2 with streaming: counts become known while micro-batches come, `finish` corrects once.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Look at: the counts need not be known in advance. `finish` comes once for each step, before
clipping, and the head is whole where the loss is computed, inside the root module's `forward`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
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
    model = fusedce.replace_loss_head(LlamaForCausalLM(CONFIG))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)  # the head is whole inside forward, where the loss is computed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # FSDP2 averages. After set_gradient_divide_factor(1.0) on each sharded module, layers too, it
    # adds: grad_reduction="sum".
    acc = fusedce.LossAccumulator(model)
    mine, accumulation = batches()[rank::world], ACCUMULATION // world
    history = []
    for _ in range(epochs):
        for begin in range(0, len(mine), accumulation):
            window = mine[begin : begin + accumulation]
            for i, batch in enumerate(window):
                model.set_requires_gradient_sync(i == len(window) - 1)
                acc.backward(fusedce.model_loss(model, batch))
            acc.finish()
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
