"""Distillation: a student learns from the K likeliest classes of a teacher, token by token.

    python examples/distillation.py

Look at: only K classes of the teacher and their log-probabilities are kept, which can lie on disk;
the student's logits are never made. All other classes form one class, the tail, so that the loss is
a divergence: never negative, and 0 only where both agree. Where the teacher runs while the student
learns (`stored=False`), `fusedce.fused_kl` compares all classes, without the logits of either.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fusedce
from fusedce.recipes import distillation_loss

K = 8  # of 64 classes
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)


def batches(n: int = 12) -> list[dict[str, Tensor]]:
    """Micro-batches of very different numbers of tokens."""
    rng = torch.Generator().manual_seed(0)
    ids = [torch.randint(8, (2, 3 + 5 * (i % 4)), generator=rng) for i in range(n)]
    return [{"input_ids": x, "labels": x} for x in ids]


def trained_teacher() -> LlamaForCausalLM:
    torch.manual_seed(0)
    teacher = fusedce.replace_loss_head(LlamaForCausalLM(CONFIG))
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
    for batch in batches() * 2:
        teacher(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return teacher


@torch.no_grad()
def likeliest(teacher: LlamaForCausalLM, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """``(classes, log-probabilities)``, (B, T, K) each; unused positions have no classes."""
    hidden = teacher.model(batch["input_ids"]).last_hidden_state
    top = fusedce.fused_topk(hidden, teacher.lm_head.weight, K)
    unused = fusedce.shift_labels(batch["labels"]) == -100
    return top.index.masked_fill(unused[..., None], -100), top.logprob


def train(epochs: int = 3, *, stored: bool = True) -> list[float]:
    """The mean divergence from the teacher over each epoch, nats per token."""
    data, teacher = batches(), trained_teacher()
    answers = [likeliest(teacher, batch) for batch in data]
    torch.manual_seed(1)
    student = LlamaForCausalLM(CONFIG)
    weight = student.lm_head.weight
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    acc, history = fusedce.LossAccumulator(student), []
    for _ in range(epochs):
        for batch, (classes, teaching) in zip(data, answers, strict=True):
            hidden = student.model(batch["input_ids"]).last_hidden_state
            if stored:
                loss = distillation_loss(hidden, weight, classes, teaching)
            else:
                with torch.no_grad():
                    there = teacher.model(batch["input_ids"]).last_hidden_state
                labels = fusedce.shift_labels(batch["labels"])
                loss = fusedce.fused_kl(hidden, weight, there, teacher.lm_head.weight, labels)
            acc.backward(loss)
            acc.finish()
            optimizer.step()
            optimizer.zero_grad()
        history.append(acc.metrics(reset=True)["loss"])
    return history


def main() -> None:
    for stored in (True, False):
        print(f"{K} stored classes" if stored else "all classes, from the teacher's hidden states")
        for epoch, divergence in enumerate(train(stored=stored)):
            print(f"  epoch {epoch + 1}: {divergence:.4f} nats per token from the teacher")


if __name__ == "__main__":
    main()
