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
from tiny import MAX_TOKENS, SEQUENCES_PER_STEP, TinyLM, collate, documents
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fusedce

MICRO_BATCHES = 4


class First(nn.Module):
    def __init__(self, model: TinyLM) -> None:
        super().__init__()
        self.embed, self.positions = model.embed, model.positions

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids) + self.positions.weight[: input_ids.shape[1]]


class Last(nn.Module):
    def __init__(self, model: TinyLM) -> None:
        super().__init__()
        self.layer, self.lm_head = model.layer, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, src_mask=mask, is_causal=True)


def steps() -> list[dict[str, Tensor]]:
    """Batches of one shape, as a schedule needs them."""
    sequences = documents()
    found = []
    for i in range(0, len(sequences), SEQUENCES_PER_STEP):
        batch = collate(sequences[i : i + SEQUENCES_PER_STEP])
        pad = (0, MAX_TOKENS - batch["labels"].shape[1])
        found.append(
            {
                "input_ids": nn.functional.pad(batch["input_ids"], pad, value=0),
                "labels": nn.functional.pad(batch["labels"], pad, value=-100),
            }
        )
    return found


def train(
    epochs: int = 2, *, streaming: bool = False, schedule: Any = Schedule1F1B
) -> tuple[list[dict[str, float]], nn.Module]:
    rank = dist.get_rank()
    stages = (First, Last)
    model = stages[rank](TinyLM())
    mesh = init_device_mesh("cpu", (len(stages),), mesh_dim_names=("pp",))
    # With data parallelism around the pipeline: from_mesh(mesh, "dp", pipeline_dim="pp").
    acc = fusedce.LossAccumulator.from_mesh(mesh, [], pipeline_dim="pp")

    def loss_fn(hidden: Tensor, labels: Tensor) -> Tensor:
        weight = model.get_submodule("lm_head").weight
        return acc.scale(fusedce.fused_ce(hidden, weight, fusedce.shift_labels(labels)))

    pipeline = schedule(
        PipelineStage(model, rank, len(stages), torch.device("cpu")),
        MICRO_BATCHES,
        loss_fn=loss_fn,
        scale_grads=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for _ in range(epochs):
        for batch in steps():
            if streaming:
                step(pipeline, batch)
                acc.finish(model.parameters())
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
            print(metrics)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
