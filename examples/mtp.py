"""Multi-token prediction: the next token and the one after it, each loss over its own tokens.

    python examples/mtp.py

Look at: the two lists of counts, which differ since the second loss has a token less in each
sequence, and one `backward` for both losses. The weights are named once, where the accumulator is
made; it logs each loss under its name. Drafts and auxiliary tasks are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import fusedce

ACCUMULATION = 4  # micro-batches
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


class Model(nn.Module):
    """Two predictions with one output head: of the body, and of one more layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = LlamaModel(CONFIG)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, ids: Tensor) -> dict[str, fusedce.LossSum]:
        hidden = self.body(ids).last_hidden_state
        ahead = hidden + torch.tanh(self.second(hidden))
        return {
            "main": fusedce.fused_ce(hidden, self.head.weight, fusedce.shift_labels(ids)),
            "next2": fusedce.fused_ce(ahead, self.head.weight, fusedce.shift_labels(ids, offset=2)),
        }


def batches(n: int = 8) -> list[Tensor]:
    """Micro-batches of very different numbers of tokens."""
    rng = torch.Generator().manual_seed(0)
    return [torch.randint(8, (2, 3 + 5 * (i % 4)), generator=rng) for i in range(n)]


def train(epochs: int = 2, dtype: torch.dtype = torch.float32) -> list[dict[str, float]]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acc = fusedce.LossAccumulator(model, losses={"main": 1, "next2": 0.3})
    history = []
    for _ in range(epochs):
        for window in zip(*[iter(batches())] * ACCUMULATION, strict=True):
            counts = [fusedce.count_valid(ids) for ids in window]
            ahead = [fusedce.count_valid(ids, offset=2) for ids in window]
            with acc.window(main=counts, next2=ahead):
                for ids in window:
                    acc.backward(**model(ids))
            optimizer.step()
            optimizer.zero_grad()
            history.append(acc.metrics(reset=True))
    return history


if __name__ == "__main__":
    for metrics in train():
        print({name: round(x, 4) for name, x in metrics.items()})
