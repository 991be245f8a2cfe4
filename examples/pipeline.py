"""Pipeline parallelism: the last stage computes the losses, all stages share one denominator.

    torchrun --nproc-per-node 2 examples/pipeline.py

Look at: the schedule must not divide gradients by its number of micro-batches
(`scale_grads=False`), since they are divided by tokens. It calls the loss once more in its first
step, to learn shapes; that call is not counted, and neither is its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fusedce

V, H, MICRO_BATCHES = 64, 16, 4


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(V, H)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.lm_head = nn.Linear(H, H), nn.Linear(H, V, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


def steps() -> list[dict[str, Tensor]]:
    """Batches of one shape, as a schedule needs them, whose rows have different lengths."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(8, (3, 8, 24), generator=rng)
    padding = torch.arange(24) >= torch.randint(4, 25, (3, 8, 1), generator=rng)
    labels = ids.masked_fill(padding, -100)
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def train(
    epochs: int = 2, *, streaming: bool = False, schedule: Any = Schedule1F1B
) -> tuple[list[dict[str, float]], nn.Module]:
    rank = dist.get_rank()
    stages = (First, Last)
    model = stages[rank]()
    mesh = init_device_mesh("cpu", (len(stages),), mesh_dim_names=("pp",))

    def loss_fn(hidden: Tensor, labels: Tensor) -> Tensor:
        weight = model.get_submodule("lm_head").weight
        return acc.scale(fusedce.fused_ce(hidden, weight, fusedce.shift_labels(labels)))

    pipeline = schedule(
        PipelineStage(model, rank, len(stages), torch.device("cpu")),
        MICRO_BATCHES,
        loss_fn=loss_fn,
        scale_grads=False,
    )
    # With data parallelism around the pipeline: from_mesh(mesh, "dp", ...).
    acc = fusedce.LossAccumulator.from_mesh(mesh, [], model, pipeline_dim="pp", schedule=pipeline)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for _ in range(epochs):
        for batch in steps():
            if streaming:
                step(pipeline, batch)
                acc.finish()
            else:
                labels = batch["labels"].chunk(MICRO_BATCHES)
                # Only the last stage has losses, so only its counts matter.
                with acc.window([fusedce.count_valid(x) for x in labels] if rank else ()):
                    step(pipeline, batch)
            optimizer.step()
            optimizer.zero_grad()
            history.append(acc.metrics(reset=True))
    return history, model


def step(pipeline: Any, batch: dict[str, Tensor]) -> None:
    if dist.get_rank() == 0:
        pipeline.step(batch["input_ids"])
    else:
        pipeline.step(target=batch["labels"])


def main() -> None:
    dist.init_process_group("gloo")
    history, _ = train()
    for metrics in history:
        if dist.get_rank() == 0:
            print({name: round(x, 4) for name, x in metrics.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
