"""Train a step's sequences in splits, naively and through one denominator, and compare."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedce import LossAccumulator, count_valid
from fusedce.tools import demo


class Run(NamedTuple):
    logged: list[float]  # nats per token, as this way of training reports each step
    true: list[float]  # sum over the step's tokens / their number
    first_grad_norm: float
    weights: Tensor  # all of them after the last step, flat, on the CPU
    seconds: float


def split(batch: demo.Batch, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Padded ``(input_ids, labels)`` micro-batches of ``rows`` sequences."""
    parts = [batch[i : i + rows] for i in range(0, len(batch), rows)]
    return [(demo.pad(part, 0), demo.pad(part, -100)) for part in parts]


def naive(model: nn.Module, micro: list[tuple[Tensor, Tensor]]) -> tuple[float, demo.Losses]:
    outs = []
    for input_ids, labels in micro:
        out = demo.loss_of(model, input_ids, labels)
        (out.mean() / len(micro)).backward()
        outs.append(out)
    return sum(out.mean().item() for out in outs) / len(outs), outs


class Fused:
    """Train through one accumulator, which is kept for the whole run."""

    def __init__(self) -> None:
        self.accumulator = LossAccumulator()

    def __call__(
        self, model: nn.Module, micro: list[tuple[Tensor, Tensor]]
    ) -> tuple[float, demo.Losses]:
        outs = []
        with self.accumulator.window([count_valid(labels) for _, labels in micro]):
            for input_ids, labels in micro:
                outs.append(demo.loss_of(model, input_ids, labels))
                self.accumulator.backward(outs[-1])
        return self.accumulator.metrics(reset=True)["loss"], outs


def train(
    model: nn.Module,
    start: dict[str, Tensor],
    batches: list[demo.Batch],
    rows: int,
    way: Callable,
    learning_rate: float,
) -> Run:
    begin = time.perf_counter()
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    logged, true, first = [], [], 0.0
    for batch in batches:
        optimizer.zero_grad()
        loss, outs = way(model, split(batch, rows))
        logged.append(loss)
        true.append(sum(x.loss_sum.item() for x in outs) / sum(int(x.n_valid) for x in outs))
        if len(true) == 1:
            first = float(nn.utils.get_total_norm(p.grad for p in model.parameters()))
        optimizer.step()
    return Run(logged, true, first, flat(model), time.perf_counter() - begin)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def permuted(batches: list[demo.Batch], seed: int) -> list[demo.Batch]:
    rng = torch.Generator().manual_seed(seed + 1)
    return [[batch[i] for i in torch.randperm(len(batch), generator=rng)] for batch in batches]


def compare(run: Run, full: Run, before: Tensor) -> dict[str, Any]:
    """The run's curves, and its distances from 32x1."""

    def worst(kind: str) -> float:
        pairs = zip(getattr(run, kind), getattr(full, kind), strict=True)
        return float(torch.tensor([abs(a - b) for a, b in pairs], dtype=torch.float64).max())

    moved = torch.linalg.vector_norm(full.weights - before)
    return {
        "logged": run.logged,
        "true": run.true,
        "logged_gap": worst("logged"),
        "true_gap": worst("true"),
        # relative to how far training moved the weights
        "weights_gap": float(torch.linalg.vector_norm(run.weights - full.weights) / moved),
        "first_grad_norm_ratio": run.first_grad_norm / full.first_grad_norm,
        "seconds": run.seconds,
    }
