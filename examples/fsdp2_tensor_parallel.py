"""FSDP2 around a head whose vocabulary is sharded: two data-parallel replicas of two ranks each.

    torchrun --nproc-per-node 4 examples/fsdp2_tensor_parallel.py

Look at: the head's weight is a `DTensor` on the mesh's "tp" dimension, and `fused_ce` needs no more
than that. FSDP2 shards what is left over "dp". The accumulator counts the ranks of "dp" alone,
whose tokens differ, so its `n_tokens` and loss are those of one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


def batches(n: int = 10) -> list[dict[str, Tensor]]:
    """Micro-batches of very different numbers of tokens."""
    rng = torch.Generator().manual_seed(0)
    ids = [torch.randint(8, (2, 3 + 5 * (i % 4)), generator=rng) for i in range(n)]
    return [{"input_ids": x, "labels": x} for x in ids]


def train(dp: int = 2, tp: int = 2) -> list[dict[str, float]]:
    """Metrics of each step of AdamW on ``dp * tp`` ranks, one process for ``dp = tp = 1``."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = fusedce.replace_loss_head(LlamaForCausalLM(CONFIG))
    rows = distribute_tensor(model.lm_head.weight.detach(), mesh["tp"], [Shard(0)])
    model.lm_head.weight = torch.nn.Parameter(rows)
    fully_shard(model.model.layers[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    acc = fusedce.LossAccumulator.from_mesh(mesh, ["dp"], model)
    mine = batches(8)[mesh.get_local_rank("dp") :: dp]
    history = []
    for begin in range(0, len(mine), 4 // dp):
        window = mine[begin : begin + 4 // dp]
        for i, batch in enumerate(window):
            model.set_requires_gradient_sync(i == len(window) - 1)
            acc.backward(fusedce.model_loss(model, batch))
        acc.finish()
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
