"""`fusedce audit`: the audit of a wrong and a right training loop over lines of real text.

Both are ordinary loops with the model's own loss; they call no other function of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

import fusedce

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
    batches = draw_batches(steps)
    found = {}
    for name, divide in LOOPS.items():
        report = train(build_model(), batches, divide)
        found[name] = {
            "text": str(report),
            "verdict": report.verdict(),
            "steps": [asdict(step) for step in report.steps],
        }
    return found


def draw_batches(steps: int) -> list[list[Tensor]]:
    """`MICRO_BATCHES` lines of Python's own documentation for each step, as bytes ``(T,)``."""
    from pydoc_data.topics import topics

    lines = [line.encode() for _, text in sorted(topics.items()) for line in text.splitlines()]
    lines = [line for line in lines if len(line) > 1]
    drawn = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [
        torch.tensor(list(lines[drawn[i % len(drawn)]])) for i in range(steps * MICRO_BATCHES)
    ]
    return [chosen[i : i + MICRO_BATCHES] for i in range(0, len(chosen), MICRO_BATCHES)]


def build_model() -> nn.Module:
    """A small Llama over bytes in float32, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).float().train()


def train(model: nn.Module, batches: list[list[Tensor]], divide: Divide) -> Any:
    """Train inside an audit, and return its report."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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
