"""A Hugging Face model in a loop of your own, with accelerate on two ranks.

    accelerate launch --cpu --num_processes 2 examples/own_loop.py

Look at: the head is replaced before accelerate wraps the model, and `fusedce.model_loss` stands
where `model(**batch).loss` did. The ranks may have different numbers of micro-batches.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


def micro_batches(step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """Batches of about equally many tokens: few long rows, or more of short ones."""
    rng = torch.Generator().manual_seed(2 * step + rank)
    sizes = [(2, 9), (1, 17), (4, 5)][: 2 + (step + rank) % 2]
    ids = [torch.randint(64, size, generator=rng) for size in sizes]
    return [{"input_ids": x, "labels": x} for x in ids]


def train(accelerator: Accelerator, steps: int = 3) -> list[dict[str, float]]:
    torch.manual_seed(0)  # in place of a model that from_pretrained loads
    model = fusedce.replace_loss_head(LlamaForCausalLM(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    acc = fusedce.LossAccumulator.from_accelerator(accelerator, model)
    history = []
    for step in range(steps):
        *others, last = micro_batches(step, accelerator.process_index)
        for batch in others:
            with accelerator.no_sync(model):
                acc.backward(fusedce.model_loss(model, batch))
        acc.backward(fusedce.model_loss(model, last))
        acc.finish()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(acc.metrics(reset=True))
    return history


def main() -> None:
    accelerator = Accelerator(cpu=True)
    for metrics in train(accelerator):
        accelerator.print({name: round(x, 4) for name, x in metrics.items()})


if __name__ == "__main__":
    main()
