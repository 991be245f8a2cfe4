"""torchtitan's loss through the model's own head, without logits: ``loss=FusedCELoss.Config()``."""

from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss, ChunkedLossWrapper

from .. import replace_loss_head


class FusedCELoss(ChunkedLossWrapper):  # torchtitan's Trainer gives its head to this class alone
    """The sum of the cross-entropy over tokens, over ``global_valid_tokens`` where given.

    The head's own code runs, with FSDP's hooks, on sequences of any length and in pipelines. A head
    that tensor parallelism splits, and the backend "full_dtensor", keep torchtitan's chunks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        memory_budget: int | None = None
        """Bytes that the loss may hold, as in :func:`fusedce.fused_ce`."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(ChunkedLossWrapper.Config(), compile_config=compile_config)
        self.memory_budget, self.fn, self.is_split = config.memory_budget, self._sum, False

    def set_lm_head(self, lm_head: nn.Module) -> None:
        """Replace the head; called by the Trainer, after parallelism and before the first step."""
        self.lm_head = lm_head
        mesh = getattr(lm_head.weight, "device_mesh", None)
        names = getattr(mesh, "mesh_dim_names", None) or ()
        self.is_split = mesh is not None and "tp" in names and mesh["tp"].size() > 1
        if self.is_split:
            self.loss_fn.global_vocab_size = lm_head.out_features
        else:
            replace_loss_head(lm_head, head=lm_head, memory_budget=self.memory_budget)

    def __call__(
        self,
        pred: Tensor,  # hidden states (B, T, H)
        labels: Tensor,  # (B, T)
        global_valid_tokens: Tensor | None = None,  # ()
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and no metrics."""
        chunked = self.is_split or isinstance(pred, DTensor)
        call = super().__call__ if chunked else super(ChunkedLossWrapper, self).__call__
        return call(pred, labels, global_valid_tokens, **loss_inputs)

    def _sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        with spmd.no_typecheck():
            logits = self.lm_head(hidden).flatten(0, 1).float()
            labels = labels.flatten(0, 1)
            return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
