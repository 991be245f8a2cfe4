"""What trainers log beside the loss: token accuracy, entropy, tokens seen.

They come from the pass of the loss, as sums over its tokens, and are read when they are logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedce.head.loss_observer import LossObserver

LOOKED_AT = ("correct", "entropy")


class TokenStats:
    """Of an interval: sums over all its tokens and ranks, and their quotients."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.sums: Tensor | None = None  # (4,) float64: valid tokens, correct, entropy, tokens seen
        self.seen = 0

    def add(self, observer: LossObserver, inputs: Mapping[str, Any], outputs: Any) -> None:
        sums = sums_of(observer, inputs)
        self.sums = sums if self.sums is None else self.sums + sums

    def logged(self, prefix: str = "") -> dict[str, float]:
        """Since the last call; one all-reduce of 32 bytes, on all ranks."""
        if self.sums is None:
            return {}
        n, correct, entropy, seen = _over_ranks(self.trainer, self.sums).tolist()
        self.sums, self.seen = None, self.seen + int(seen)
        found = {"mean_token_accuracy": correct / max(n, 1), "entropy": entropy / max(n, 1)}
        if not prefix:
            found["num_tokens"] = self.seen
        return {f"{prefix}{name}": x for name, x in found.items()}


class TrlStats:
    """The same as TRL's SFTTrainer counts them: means over micro-batches, which it logs itself.

    One all-reduce of 40 bytes a micro-batch; the host waits for none of them before they are
    logged.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def add(self, observer: LossObserver, inputs: Mapping[str, Any], outputs: Any) -> None:
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
        n, correct, entropy, seen, aux_sum = _over_ranks(trainer, mine).unbind()
        metrics["entropy"].append(entropy / n.clamp(min=1))
        metrics["mean_token_accuracy"].append(correct / n.clamp(min=1))
        if training:
            trainer._total_train_tokens = trainer._total_train_tokens + seen
        metrics["num_tokens"] = [trainer._total_train_tokens]
        if aux is not None:
            metrics["aux_loss"].append(aux_sum * _same(trainer) / trainer.accelerator.num_processes)

    def logged(self, prefix: str = "") -> dict[str, float]:
        """Nothing: SFTTrainer itself adds its metrics to what is logged."""
        return {}

    def make_numbers(self) -> None:
        """Read the metrics from their device, as SFTTrainer's own are."""
        trainer = self.trainer
        trainer._total_train_tokens = int(trainer._total_train_tokens)
        for metrics in trainer._metrics.values():
            for name, values in metrics.items():
                number = int if name == "num_tokens" else float
                metrics[name] = [number(x) for x in values]


def stats_of(trainer: Any) -> TokenStats | TrlStats | None:
    """What a trainer is to log; ``None`` where nobody asks."""
    if hasattr(trainer, "_metrics") and hasattr(trainer, "_total_train_tokens"):
        return TrlStats(trainer)
    return TokenStats(trainer) if trainer.log_token_stats else None


def sums_of(observer: LossObserver, inputs: Mapping[str, Any]) -> Tensor:
    """``(4,)`` float64 of a micro-batch: valid tokens, correct, entropy, tokens that are no
    padding."""
    mask = inputs.get("attention_mask")
    if mask is not None:
        seen = mask.sum()
    else:
        ids = next(inputs[k] for k in ("position_ids", "input_ids", "labels") if k in inputs)
        seen = torch.tensor(ids.numel(), device=ids.device)
    sums = torch.zeros(4, dtype=torch.float64, device=seen.device)
    sums[3] += seen
    for (_, n_valid, _), monitors in zip(observer.losses, observer.monitors, strict=True):
        found = (n_valid, monitors["correct"], monitors["entropy"])
        sums[:3] += torch.stack([x.double() for x in found]).to(sums.device)
    return sums


def _over_ranks(trainer: Any, sums: Tensor) -> Tensor:
    """The sum over ranks; those of tensor parallelism hold the same tokens."""
    total: Tensor = trainer.accelerator.reduce(sums, reduction="sum")
    return total / _same(trainer)


def _same(trainer: Any) -> int:
    return int(getattr(trainer, "get_tp_size", lambda: 1)())
