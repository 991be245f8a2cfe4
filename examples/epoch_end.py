"""Gradient accumulation at the end of an epoch: finish the shorter window, or carry it over.

    python examples/epoch_end.py

Look at: both are right, since a window is divided by the tokens it really holds. Leaving
gradients behind is wrong: `metrics` and `state_dict` raise an error while a window is open.
"""

from __future__ import annotations

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


def train(epochs: int = 3, *, carry_over: bool = False) -> list[dict[str, float]]:
    torch.manual_seed(0)
    model = fusedce.replace_loss_head(LlamaForCausalLM(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acc = fusedce.LossAccumulator(model)
    data = batches()  # 10 micro-batches: windows of 4, 4 and 2
    history, waiting = [], 0
    for epoch in range(epochs):
        for i, batch in enumerate(data):
            acc.backward(fusedce.model_loss(model, batch))
            waiting += 1
            end = i == len(data) - 1 and not (carry_over and epoch < epochs - 1)
            if waiting == ACCUMULATION or end:
                acc.finish()
                acc.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                history.append(acc.metrics(reset=True))
                waiting = 0
    return history


def main() -> None:
    for carry_over in (False, True):
        print("carried over" if carry_over else "finished at the end of each epoch")
        for metrics in train(carry_over=carry_over):
            print(" ", {name: round(x, 4) for name, x in metrics.items()})


if __name__ == "__main__":
    main()
