"""Plain PyTorch: gradient accumulation, clipping, evaluation and a tracker.

    python examples/plain.py [--logdir runs]      # with --logdir: TensorBoard

Look at: counts first, then one window around the micro-batches of a step, and clipping after it.
Logged loss and evaluation are over tokens, whatever the batch size.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce

ACCUMULATION = 4  # micro-batches
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


def batches(n: int = 10) -> list[dict[str, Tensor]]:
    """Micro-batches of very different numbers of tokens."""
    rng = torch.Generator().manual_seed(0)
    ids = [torch.randint(8, (2, 3 + 5 * (i % 4)), generator=rng) for i in range(n)]
    return [{"input_ids": x, "labels": x} for x in ids]


def train(epochs: int = 2, writer: Any = None) -> list[dict[str, float]]:
    torch.manual_seed(0)
    model = fusedce.replace_loss_head(LlamaForCausalLM(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acc, evaluation = fusedce.LossAccumulator(model), fusedce.LossMeter()
    *train_set, held_out = batches(11)
    history: list[dict[str, float]] = []
    for _ in range(epochs):
        for i in range(0, len(train_set), ACCUMULATION):
            window = train_set[i : i + ACCUMULATION]
            with acc.window([fusedce.count_valid(batch) for batch in window]):
                for batch in window:
                    acc.backward(fusedce.model_loss(model, batch))
            acc.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            history.append(acc.metrics(reset=True))

            with torch.no_grad():  # the batch size of evaluation does not matter
                evaluation.update(fusedce.model_loss(model, held_out))
            held = evaluation.compute()
            evaluation.reset()
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
        print({name: round(x, 4) for name, x in metrics.items()})


if __name__ == "__main__":
    main()
