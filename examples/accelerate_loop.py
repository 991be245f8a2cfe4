"""accelerate, in the two ways it is used: its own `accumulate`, and windows drawn in advance.

    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py

Look at: `accelerator.backward` divides every loss by `gradient_accumulation_steps`, in a shorter
last window as well; `LossAccumulator.from_accelerator` undoes it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from tiny import SEQUENCES_PER_MICRO_BATCH, SEQUENCES_PER_STEP, TinyLM, collate, documents
from tiny import windows as windows_of
from torch.utils.data import DataLoader

import fusedce


def prepare(accelerator: Accelerator) -> tuple[Any, Any, Any]:
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(documents()[:-4], batch_size=SEQUENCES_PER_MICRO_BATCH, collate_fn=collate)
    return accelerator.prepare(model, optimizer, loader)


def streaming(accelerator: Accelerator, epochs: int = 2) -> list[dict[str, float]]:
    """accelerate decides when a window ends, also at the end of an epoch (not with DeepSpeed)."""
    model, optimizer, loader = prepare(accelerator)
    acc = fusedce.LossAccumulator.from_accelerator(accelerator)
    acc.guard(optimizer, model)
    history = []
    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                acc.backward(model(**batch))
                if accelerator.sync_gradients:
                    acc.finish(model.parameters())
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
    acc = fusedce.LossAccumulator.from_accelerator(accelerator)
    acc.guard(optimizer, model)
    history = []
    for _ in range(epochs):
        for window in windows_of(loader, accelerator.gradient_accumulation_steps):
            with acc.window([fusedce.count_valid(batch) for batch in window]):
                for i, batch in enumerate(window):
                    last = i == len(window) - 1
                    with nullcontext() if last else accelerator.no_sync(model):
                        acc.backward(model(**batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            history.append(acc.metrics(reset=True))
    return history


def main() -> None:
    for loop in (streaming, declared):
        accelerator = Accelerator(cpu=True)
        per_rank = SEQUENCES_PER_STEP // SEQUENCES_PER_MICRO_BATCH // accelerator.num_processes
        accelerator.gradient_accumulation_steps = per_rank
        for metrics in loop(accelerator):
            accelerator.print(loop.__name__, metrics)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
