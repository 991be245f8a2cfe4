"""accelerate, in the two ways it is used: its own `accumulate`, and windows drawn in advance.

    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py

Look at: `accelerator.backward` divides every loss by `gradient_accumulation_steps`, in a shorter
last window as well; `LossAccumulator.from_accelerator` undoes it.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
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


def prepare(accelerator: Accelerator) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = fusedce.replace_loss_head(LlamaForCausalLM(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(batches(), collate_fn=lambda one: one[0])  # accelerate shards it over ranks
    return accelerator.prepare(model, optimizer, loader)


def streaming(accelerator: Accelerator, epochs: int = 2) -> list[dict[str, float]]:
    """accelerate decides when a window ends, also at the end of an epoch (not with DeepSpeed)."""
    model, optimizer, loader = prepare(accelerator)
    acc = fusedce.LossAccumulator.from_accelerator(accelerator, model)
    history = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                acc.backward(fusedce.model_loss(model, batch))
                if accelerator.sync_gradients:
                    acc.finish()
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                history.append(acc.metrics(reset=True))
    return history


def declared(accelerator: Accelerator, epochs: int = 2) -> list[dict[str, float]]:
    """Counts are declared first, without `accumulate`: the loader is exhausted once the last window
    has been drawn, and `accumulate` would then end the step at each micro-batch of that window."""
    model, optimizer, loader = prepare(accelerator)
    acc = fusedce.LossAccumulator.from_accelerator(accelerator, model)
    history = []
    for _ in range(epochs):
        stream = iter(loader)
        while window := list(islice(stream, accelerator.gradient_accumulation_steps)):
            with acc.window([fusedce.count_valid(batch) for batch in window]):
                for i, batch in enumerate(window):
                    last = i == len(window) - 1
                    with nullcontext() if last else accelerator.no_sync(model):
                        acc.backward(fusedce.model_loss(model, batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            history.append(acc.metrics(reset=True))
    return history


def main() -> None:
    for loop in (streaming, declared):
        accelerator = Accelerator(cpu=True)
        accelerator.gradient_accumulation_steps = ACCUMULATION // accelerator.num_processes
        for metrics in loop(accelerator):
            accelerator.print(loop.__name__, {name: round(x, 4) for name, x in metrics.items()})
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
