"""Gradient accumulation at the end of an epoch: finish the shorter window, or carry it over.

    python examples/epoch_end.py

Look at: both are right, since a window is divided by the tokens it really holds. Leaving
gradients behind is wrong: `metrics` and `state_dict` raise an error while a window is open.
"""

from __future__ import annotations

import torch
from tiny import SEQUENCES_PER_MICRO_BATCH, SEQUENCES_PER_STEP, TinyLM, documents, micro_batches

import fusedce

ACCUMULATION = SEQUENCES_PER_STEP // SEQUENCES_PER_MICRO_BATCH


def train(epochs: int = 3, *, carry_over: bool = False) -> list[dict[str, float]]:
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acc = fusedce.LossAccumulator()
    acc.guard(optimizer, model)
    data = micro_batches(documents(20))  # 10 micro-batches: windows of 4, 4 and 2
    history, waiting = [], 0
    for epoch in range(epochs):
        for i, batch in enumerate(data):
            acc.backward(model(**batch))
            waiting += 1
            end = i == len(data) - 1 and not (carry_over and epoch < epochs - 1)
            if waiting == ACCUMULATION or end:
                acc.finish(model.parameters())
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                history.append(acc.metrics(reset=True))
                waiting = 0
    return history


def main() -> None:
    for carry_over in (False, True):
        print("carried over" if carry_over else "finished at the end of each epoch")
        for metrics in train(carry_over=carry_over):
            print(" ", metrics)


if __name__ == "__main__":
    main()
