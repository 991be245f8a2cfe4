"""Lightning with manual optimisation: the denominator first, then clipping, then the step.

    python examples/lightning_module.py        # needs lightning

Look at: `finish` comes before `clip_gradients`, and the last, shorter window of an epoch is closed
by `is_last_batch`.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from tiny import TinyLM, documents, micro_batches
from torch.utils.data import DataLoader

import fusedce


class Module(lightning.LightningModule):
    def __init__(self, accumulation: int = 4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.accumulation = TinyLM(), accumulation
        self.acc = fusedce.LossAccumulator()
        self.history: list[dict[str, float]] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.manual_backward(self.acc.scale(self.model(**batch)))
        if (index + 1) % self.accumulation and not self.trainer.is_last_batch:
            return
        self.acc.finish(self.parameters())
        optimizer: Any = self.optimizers()
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.history.append(self.acc.metrics(reset=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(epochs: int = 2) -> list[dict[str, float]]:
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = micro_batches(documents()[:-4])
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module.history


if __name__ == "__main__":
    for metrics in train():
        print(metrics)
