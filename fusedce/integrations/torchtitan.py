"""torchtitan's loss with the model's own head, without logits: ``loss=FusedCELoss.Config()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss

from fusedce import replace_loss_head


# Trainer gives its head to this class alone, and then leaves it out of the model's forward.
class FusedCELoss(ChunkedLossWrapper):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        memory_budget: int | None = None

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.memory_budget = config.memory_budget
        self.lm_head: Any = None
        self.loss_fn = CrossEntropyLoss.Config().build()

    def set_lm_head(self, lm_head: nn.Module) -> None:
        self.lm_head = replace_loss_head(
            lm_head, head=lm_head, memory_budget=self.memory_budget
        )
        self.loss_fn.global_vocab_size = lm_head.out_features

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss_fn(self.lm_head(pred), labels, global_valid_tokens)
