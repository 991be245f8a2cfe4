"""Distillation: a student learns from the K likeliest classes of a teacher, token by token.

    python examples/distillation.py

Look at: only K classes of the teacher and their log-probabilities are kept, which can lie on disk;
the student's logits are never made. All other classes form one class, the tail, so that the loss is
a divergence: never negative, and 0 only where both agree. Where the teacher runs while the student
learns, `fusedce.fused_kl` compares all classes, without the logits of either.
"""

from __future__ import annotations

import torch
from tiny import Batch, TinyLM, documents, micro_batches
from torch import Tensor

import fusedce
from fusedce.recipes import distillation_loss

K = 16  # of 256 classes


def trained_teacher(batches: list[Batch]) -> TinyLM:
    teacher = TinyLM()
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-2)
    for batch in batches * 2:
        teacher(**batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return teacher


@torch.no_grad()
def likeliest(teacher: TinyLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """``(classes, log-probabilities)``, (B, T, K) each; padding has no classes."""
    log_q = teacher.lm_head(teacher.hidden(batch["input_ids"])).log_softmax(-1)
    values, classes = log_q.topk(K)
    unused = fusedce.shift_labels(batch["labels"]) == -100
    return classes.masked_fill(unused[..., None], -100), values


def train(epochs: int = 3) -> list[float]:
    """The mean divergence from the teacher over each epoch, nats per token."""
    batches = micro_batches(documents())
    teacher = trained_teacher(batches)
    stored = [likeliest(teacher, batch) for batch in batches]
    torch.manual_seed(1)
    student = TinyLM()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    acc, history = fusedce.LossAccumulator(), []
    acc.guard(optimizer, student)
    for _ in range(epochs):
        for batch, (classes, teaching) in zip(batches, stored, strict=True):
            hidden = student.hidden(batch["input_ids"])
            acc.backward(distillation_loss(hidden, student.lm_head.weight, classes, teaching))
            acc.finish(student.parameters())
            optimizer.step()
            optimizer.zero_grad()
        history.append(acc.metrics(reset=True)["loss"])
    return history


def train_on_all_classes(epochs: int = 3) -> list[float]:
    """The same with the teacher at hand: the divergence over all classes."""
    batches = micro_batches(documents())
    teacher = trained_teacher(batches)
    torch.manual_seed(1)
    student = TinyLM()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    acc, history = fusedce.LossAccumulator(), []
    acc.guard(optimizer, student)
    for _ in range(epochs):
        for batch in batches:
            with torch.no_grad():
                teaching = teacher.hidden(batch["input_ids"])
            acc.backward(
                fusedce.fused_kl(
                    student.hidden(batch["input_ids"]),
                    student.lm_head.weight,
                    teaching,
                    teacher.lm_head.weight,
                    fusedce.shift_labels(batch["labels"]),
                )
            )
            acc.finish(student.parameters())
            optimizer.step()
            optimizer.zero_grad()
        history.append(acc.metrics(reset=True)["loss"])
    return history


def main() -> None:
    for epoch, divergence in enumerate(train()):
        print(f"epoch {epoch + 1}: {divergence:.4f} nats per token from the teacher")
    for epoch, divergence in enumerate(train_on_all_classes()):
        print(f"all classes, epoch {epoch + 1}: {divergence:.4f} nats per token")


if __name__ == "__main__":
    main()
