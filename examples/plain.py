"""Plain PyTorch: gradient accumulation, clipping, evaluation and a tracker.

    python examples/plain.py [--logdir runs]      # with --logdir: TensorBoard

Look at: counts first, then one window around the micro-batches of a step, and clipping after it.
Logged loss and evaluation are over tokens, whatever the batch size.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tiny import SEQUENCES_PER_MICRO_BATCH, SEQUENCES_PER_STEP, TinyLM, documents, micro_batches
from tiny import windows as windows_of

import fusedce

ACCUMULATION = SEQUENCES_PER_STEP // SEQUENCES_PER_MICRO_BATCH


def train(epochs: int = 2, writer: Any = None) -> list[dict[str, float]]:
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acc, evaluation = fusedce.LossAccumulator(), fusedce.LossAccumulator()
    acc.guard(optimizer, model)
    train_set, held_out = documents()[:-4], documents()[-4:]
    history: list[dict[str, float]] = []
    for _ in range(epochs):
        for window in windows_of(micro_batches(train_set), ACCUMULATION):
            with acc.window([fusedce.count_valid(batch) for batch in window]):
                for batch in window:
                    acc.backward(model(**batch))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            history.append(acc.metrics(reset=True))  # the only wait for the device

            with torch.no_grad():  # the batch size of evaluation does not matter
                for batch in micro_batches(held_out):
                    evaluation.add(model(**batch))
            held = evaluation.metrics(reset=True)
            if writer is not None:
                for name, value in history[-1].items():
                    writer.add_scalar(f"train/{name}", value, len(history))
                writer.add_scalar("eval/loss", held["loss"], len(history))
    return history


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logdir")
    logdir = parser.parse_args().logdir
    writer = None
    if logdir is not None:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(logdir)
    for metrics in train(writer=writer):
        print(metrics)


if __name__ == "__main__":
    main()
