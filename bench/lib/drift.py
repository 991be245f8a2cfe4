"""Train a step's sequences in splits, naively and through one denominator, and compare."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedce import LossAccumulator

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import demo


class Run(NamedTuple):
    logged: list[float]  # nats per token, as this way of training reports each step
    true: list[float]  # sum over the step's tokens / their number
    first_grad_norm: float
    weights: Tensor  # all of them after the last step, flat, on the CPU
    seconds: float


naive = demo.mean_of_means


def fused() -> Callable:
    """A way to train through one accumulator, which is kept for the whole run."""
    return functools.partial(demo.one_denominator, LossAccumulator())


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
        loss, outs = way(model, demo.split(batch, rows))
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
