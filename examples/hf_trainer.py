"""The Trainer of transformers with one denominator per optimizer step.

    python examples/hf_trainer.py

Look at: the mixin is the only change. Both runs see the same sequences in the same order, as 8
micro-batches of one sequence and as one batch of 8, and log the same losses.
"""

from __future__ import annotations

import tempfile

import torch
from tiny import V, documents
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fusedce


class FusedTrainer(fusedce.FusedTrainerMixin, Trainer):
    pass


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True, padding_value=0),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }


def train(batch_size: int, steps: int = 2) -> list[float]:
    """The logged losses of ``steps`` optimizer steps over 8 sequences each."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch_size, max_steps=steps, logging_steps=1,
            gradient_accumulation_steps=8 // batch_size, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, learning_rate=1e-2,
        )  # fmt: skip
        trainer = FusedTrainer(
            model=LlamaForCausalLM(config), args=arguments, data_collator=collate,
            train_dataset=[{"input_ids": d} for d in documents(16)],
        )  # fmt: skip
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    print("8 x 1:", train(8))
    print("1 x 8:", train(1))


if __name__ == "__main__":
    main()
