"""`fusedce audit`: the audit of a wrong and a right training loop over lines of real text.

Both are ordinary loops; they call no other function of this package.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusedce

MICRO_BATCHES = 8
WRONG, RIGHT = "loss.mean() / accumulation_steps", "sum of losses / tokens of the step"


def run(*, steps: int) -> dict[str, dict[str, Any]]:
    """Audit both loops; by name their ``"text"`` as printed, ``"verdict"`` and ``"steps"``."""
    batches, found = draw_batches(steps), {}
    for name in (WRONG, RIGHT):
        report = train(batches, averaged=name == WRONG)
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


def train(batches: list[list[Tensor]], *, averaged: bool) -> Any:
    """Train a small model of bytes inside an audit, and return its report."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fusedce.audit(model) as report:
        for step in batches:
            logged = 0.0
            for ids in step:
                logits, labels = model(ids[:-1]), ids[1:]
                if averaged:
                    loss = F.cross_entropy(logits, labels) / len(step)
                else:
                    tokens = sum(len(sequence) - 1 for sequence in step)
                    loss = F.cross_entropy(logits, labels, reduction="sum") / tokens
                loss.backward()
                logged += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            report.log(logged)
    return report
