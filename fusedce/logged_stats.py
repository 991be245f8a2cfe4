"""Statistics that a trainer logs beside its loss: token accuracy, entropy, numbers of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .head.observe import LossObserver

MONITORED = ("correct", "entropy")  # sums that the fused loss also computes


class LoggedStats:
    """Statistics of a logging interval or an evaluation.

    They are quotients of sums over all tokens and ranks. With TRL's SFTTrainer they are means over
    micro-batches of the quotients over ranks, as in its own logs.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.of_trl = hasattr(trainer, "_metrics") and hasattr(trainer, "_total_train_tokens")
        # (5,) float64 of each micro-batch: valid tokens, correct tokens, entropy in nats, tokens
        # that are no padding, auxiliary loss
        self.sums: list[Tensor] = []

    def add(self, observer: LossObserver | None, inputs: Mapping[str, Any], outputs: Any) -> None:
        """Add a micro-batch; this makes no collective. Without observer, only count its tokens."""
        mask = inputs.get("attention_mask")
        if mask is not None:
            tokens = mask.sum()
        else:
            ids = next(inputs[k] for k in ("position_ids", "input_ids", "labels") if k in inputs)
            tokens = torch.full((), ids.numel(), device=ids.device)
        sums = torch.zeros(5, dtype=torch.float64, device=tokens.device)
        sums[3] += tokens
        losses, monitored = (observer.losses, observer.monitors) if observer else ([], [])
        for (_, n_valid, _), monitors in zip(losses, monitored, strict=True):
            found = (n_valid, monitors["correct"], monitors["entropy"])
            sums[:3] += torch.stack([x.double() for x in found]).to(sums.device)
        if outputs is not None and getattr(self.trainer, "aux_loss_enabled", False):
            sums[4] += outputs.aux_loss.detach().to(sums.device)
        self.sums.append(sums)

    def logged(self, prefix: str = "") -> dict[str, float]:
        """The statistics since the last call, their names with ``prefix``.

        Collectives: one all-reduce on all ranks, of 40 bytes (with TRL, per micro-batch).
        """
        if not self.sums:
            return {}
        trainer, by_batch = self.trainer, torch.stack(self.sums)
        if not self.of_trl:
            by_batch = by_batch.sum(0, keepdim=True)
        # ranks of one tensor-parallel group hold the same tokens
        by_batch = trainer.accelerator.reduce(by_batch, "sum") / trainer._parallel_size("tp")
        n, correct, entropy, tokens, aux = by_batch.cpu().unbind(1)
        self.sums = []
        found: dict[str, float] = {}
        if not trainer._by_labels:
            found["mean_token_accuracy"] = float((correct / n.clamp(min=1)).mean())
            found["entropy"] = float((entropy / n.clamp(min=1)).mean())
        if self.of_trl or not prefix:  # tokens of training without padding; a resumed run goes on
            history = reversed(trainer.state.log_history)
            before = next((log["num_tokens"] for log in history if "num_tokens" in log), 0)
            found["num_tokens"] = before if prefix else before + int(tokens.sum())
        if getattr(trainer, "aux_loss_enabled", False):
            found["aux_loss"] = float(aux.mean()) / trainer._n_ranks()
        return {f"{prefix}{name}": x for name, x in found.items()}
