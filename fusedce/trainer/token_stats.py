"""Statistics that trainers log beside the loss: token accuracy, entropy, number of tokens.

They come from the pass of the loss as sums over its tokens, and are read when they are logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedce.head.observe import LossObserver

MONITORED = ("correct", "entropy")


class IntervalStats:
    """Statistics of a logging interval: quotients of sums over all its tokens and ranks."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.sums: Tensor | None = None  # (4,) float64, see sums_of
        self.n_tokens = 0  # tokens without padding, since the run began

    def add(self, observer: LossObserver, inputs: Mapping[str, Any], outputs: Any) -> None:
        """Add a micro-batch; this makes no collective."""
        sums = sums_of(observer, inputs)
        self.sums = sums if self.sums is None else self.sums + sums

    def logged(self, prefix: str = "") -> dict[str, float]:
        """The statistics since the last call, their names with ``prefix``.

        Collectives: one all-reduce of 32 bytes, on all ranks.
        """
        if self.sums is None:
            return {}
        n, correct, entropy, tokens = _over_ranks(self.trainer, self.sums).tolist()
        self.sums, self.n_tokens = None, self.n_tokens + int(tokens)
        found = {"mean_token_accuracy": correct / max(n, 1), "entropy": entropy / max(n, 1)}
        if not prefix:
            found["num_tokens"] = self.n_tokens
        return {f"{prefix}{name}": x for name, x in found.items()}


class TrlStats:
    """Statistics as TRL's SFTTrainer counts them: means over micro-batches, which it logs itself.

    Collectives: one all-reduce of 40 bytes per micro-batch. The host waits for none of them before
    they are logged.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def add(self, observer: LossObserver, inputs: Mapping[str, Any], outputs: Any) -> None:
        """Add a micro-batch to the trainer's metrics."""
        trainer = self.trainer
        training = trainer.model.training
        metrics = trainer._metrics["train" if training else "eval"]
        aux = (
            getattr(outputs, "aux_loss", None)
            if getattr(trainer, "aux_loss_enabled", False)
            else None
        )
        sums = sums_of(observer, inputs)
        mine = torch.stack([*sums, sums.new_zeros(()) if aux is None else aux.detach().double()])
        n, correct, entropy, tokens, aux_sum = _over_ranks(trainer, mine).unbind()
        metrics["entropy"].append(entropy / n.clamp(min=1))
        metrics["mean_token_accuracy"].append(correct / n.clamp(min=1))
        if training:
            trainer._total_train_tokens = trainer._total_train_tokens + tokens
        metrics["num_tokens"] = [trainer._total_train_tokens]
        if aux is not None:
            metrics["aux_loss"].append(aux_sum / trainer._n_ranks())

    def logged(self, prefix: str = "") -> dict[str, float]:
        """Return nothing: SFTTrainer adds its metrics to the logs itself."""
        return {}

    def make_numbers(self) -> None:
        """Turn the metrics into Python numbers, as SFTTrainer's own are. Waits for the device."""
        trainer = self.trainer
        trainer._total_train_tokens = int(trainer._total_train_tokens)
        for metrics in trainer._metrics.values():
            for name, values in metrics.items():
                number = int if name == "num_tokens" else float
                metrics[name] = [number(x) for x in values]


def stats_of(trainer: Any) -> IntervalStats | TrlStats | None:
    """The statistics that a trainer logs; ``None`` if it logs none."""
    if hasattr(trainer, "_metrics") and hasattr(trainer, "_total_train_tokens"):
        return TrlStats(trainer)
    return IntervalStats(trainer) if trainer.log_token_stats else None


def sums_of(observer: LossObserver, inputs: Mapping[str, Any]) -> Tensor:
    """Sums of a micro-batch, ``(4,)`` float64.

    They are valid tokens, correct tokens, entropy in nats, and tokens that are no padding.
    """
    mask = inputs.get("attention_mask")
    if mask is not None:
        tokens = mask.sum()
    else:
        ids = next(inputs[k] for k in ("position_ids", "input_ids", "labels") if k in inputs)
        tokens = torch.tensor(ids.numel(), device=ids.device)
    sums = torch.zeros(4, dtype=torch.float64, device=tokens.device)
    sums[3] += tokens
    for (_, n_valid, _), monitors in zip(observer.losses, observer.monitors, strict=True):
        found = (n_valid, monitors["correct"], monitors["entropy"])
        sums[:3] += torch.stack([x.double() for x in found]).to(sums.device)
    return sums


def _over_ranks(trainer: Any, sums: Tensor) -> Tensor:
    """The sum over ranks; those of one tensor-parallel group hold the same tokens."""
    total: Tensor = trainer.accelerator.reduce(sums, reduction="sum")
    return total / trainer._parallel_size("tp")
