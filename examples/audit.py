"""Find the weight of every token in a training loop, read from its gradients.

    python examples/audit.py

Look at: the two loops differ in one division, nothing in them is ours, and only the `with` around
them is new; it prints its table when it ends. The mean of micro-batch means weighs tokens of short
sequences more, by `spread`; the right one weighs all alike. `report.log` adds what the loop logs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tiny import Batch, TinyLM, collate, documents, windows
from torch import Tensor

import fusedce


class Model(TinyLM):
    """A model that returns logits, as most do."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.lm_head(self.hidden(input_ids))


def lines() -> list[Tensor]:
    """Sequences of natural lengths."""
    text = torch.cat(documents())
    ends = (text == ord("\n")).nonzero()[:, 0] + 1
    return [line for line in text.tensor_split(ends) if len(line) > 1]


def loss_sum(model: Model, batch: Batch) -> Tensor:
    logits, labels = model(**batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def audited(*, mean_of_means: bool, steps: int = 3, accumulation: int = 4) -> Any:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [collate([line]) for line in lines()]
    with fusedce.audit(model) as report:
        for step in list(windows(batches, accumulation))[:steps]:
            tokens = [int((batch["labels"][:, 1:] != -100).sum()) for batch in step]
            logged = 0.0
            for batch, n in zip(step, tokens, strict=True):
                loss = loss_sum(model, batch) / (n * len(step) if mean_of_means else sum(tokens))
                loss.backward()
                logged += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            report.log(logged)
    return report


def main() -> None:
    for mean_of_means in (True, False):
        name = "mean of means" if mean_of_means else "one denominator"
        print(f"{name}: {audited(mean_of_means=mean_of_means)}\n", flush=True)


if __name__ == "__main__":
    main()
