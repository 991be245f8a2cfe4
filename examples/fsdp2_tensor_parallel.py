"""FSDP2 around a head whose vocabulary is sharded: two data-parallel replicas of two ranks each.

    torchrun --nproc-per-node 4 examples/fsdp2_tensor_parallel.py

Look at: the head's weight is a `DTensor` on the mesh's "tp" dimension, and `fused_ce` needs no more
than that. FSDP2 shards what is left over "dp". The accumulator counts the ranks of "dp" alone,
whose tokens differ, so its `n_tokens` and loss are those of one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from tiny import TinyLM, documents, micro_batches
from tiny import windows as windows_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fusedce


def train(dp: int = 2, tp: int = 2) -> list[dict[str, float]]:
    """Metrics of each step of AdamW on ``dp * tp`` ranks, one process for ``dp = tp = 1``."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = TinyLM()
    rows = distribute_tensor(model.lm_head.weight.detach(), mesh["tp"], [Shard(0)])
    model.lm_head.weight = torch.nn.Parameter(rows)
    fully_shard(model.layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    acc = fusedce.LossAccumulator.from_mesh(mesh, ["dp"])
    acc.guard(optimizer, model)
    mine = micro_batches(documents(16))[mesh.get_local_rank("dp") :: dp]
    history = []
    for window in windows_of(mine, 4 // dp):
        for i, batch in enumerate(window):
            model.set_requires_gradient_sync(i == len(window) - 1)
            acc.backward(model(**batch))
        acc.finish(model.parameters())
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
