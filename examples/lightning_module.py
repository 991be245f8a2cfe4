"""Lightning with manual optimisation, a Hugging Face model and two ranks.

    python examples/lightning_module.py        # needs lightning

Look at: `fusedce.model_loss` stands where `self.model(**batch).loss` did; `finish` comes before
`clip_gradients`, and `is_last_batch` closes the last, shorter window of an epoch. Fabric is the
same with `fabric.backward(acc.scale(fusedce.model_loss(model, batch)))`.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce

Batch = dict[str, torch.Tensor]
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


def batches(n: int = 10) -> list[Batch]:
    """Micro-batches of very different numbers of tokens; Lightning deals them out to the ranks."""
    rng = torch.Generator().manual_seed(0)
    ids = [torch.randint(8, (2, 3 + 5 * (i % 4)), generator=rng) for i in range(n)]
    return [{"input_ids": x, "labels": x} for x in ids]


class Module(lightning.LightningModule):
    def __init__(self, accumulation: int = 4) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulation = accumulation
        torch.manual_seed(0)  # in place of a model that from_pretrained loads
        self.model = fusedce.replace_loss_head(LlamaForCausalLM(CONFIG))
        self.history: list[dict[str, float]] = []

    def on_train_start(self) -> None:
        self.acc = fusedce.LossAccumulator(self.trainer.model)  # DDP around this module

    def training_step(self, batch: Batch, index: int) -> None:
        self.manual_backward(self.acc.scale(fusedce.model_loss(self.model, batch)))
        if (index + 1) % self.accumulation and not self.trainer.is_last_batch:
            return
        self.acc.finish()
        optimizer: Any = self.optimizers()
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        optimizer.zero_grad()
        self.history.append(self.acc.metrics(reset=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(epochs: int = 2, ranks: int = 2) -> list[dict[str, float]]:
    module = Module(4 // ranks)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=ranks, logger=False,
        strategy="ddp" if ranks > 1 else "auto", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return module.history


if __name__ == "__main__":
    for metrics in train():
        print({name: round(x, 4) for name, x in metrics.items()})
