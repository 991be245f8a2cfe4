"""`fusedce audit`: the audit of a wrong and a right training loop over the demo's data.

Both are ordinary loops with the model's own loss; they call no other function of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

import fusedce
from fusedce.tools.demo import (
    LEARNING_RATE,
    build_model,
    draw_batches,
    sections,
    train_tokenizer,
)

MICRO_BATCHES = 8
# Computes the loss to differentiate from a model, a sequence, and all sequences of the step.
Divide = Callable[[Any, Tensor, list[Tensor]], Tensor]


def mean_of_means(model: Any, ids: Tensor, step: list[Tensor]) -> Tensor:
    """The wrong loss: each sequence's own mean, divided by the number of sequences."""
    return model(input_ids=ids, labels=ids).loss / len(step)


def one_denominator(model: Any, ids: Tensor, step: list[Tensor]) -> Tensor:
    """The right loss: a sum over tokens, divided by the tokens of the whole step."""
    tokens = sum(len(sequence) - 1 for sequence in step)  # no first token is predicted
    return model(input_ids=ids, labels=ids, num_items_in_batch=tokens).loss


LOOPS: dict[str, Divide] = {
    "loss.mean() / accumulation_steps": mean_of_means,
    "sum of losses / tokens of the step": one_denominator,
}


def run(*, steps: int) -> dict[str, dict[str, Any]]:
    """Audit both loops; by name their ``"text"`` as printed, ``"verdict"`` and ``"steps"``."""
    texts = sections()
    tokenize = train_tokenizer(texts)
    sequences = [torch.tensor(tokenize(text)) for text in texts]
    batches = [batch[:MICRO_BATCHES] for batch in draw_batches(sequences, steps, seed=0)]
    found = {}
    for name, divide in LOOPS.items():
        report = train(build_model(0), batches, divide)
        found[name] = {
            "text": str(report),
            "verdict": report.verdict(),
            "steps": [asdict(step) for step in report.steps],
        }
    return found


def train(model: nn.Module, batches: list[list[Tensor]], divide: Divide) -> Any:
    """Train inside an audit, and return its report."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    with fusedce.audit(model) as report:
        for step in batches:
            logged = 0.0
            for sequence in step:
                loss = divide(model, sequence[None], step)
                loss.backward()
                logged += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            report.log(logged)
    return report
