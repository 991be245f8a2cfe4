"""fusedce: the loss of a language model, without ever building the logits.

Vocabulary used everywhere in this package:

* ``N``: token positions, batch and time flattened; ``N_valid``: those with a label to predict;
* ``H``: hidden size; ``V``: vocabulary size;
* logits ``z = logit_scale * (hidden @ weight.T + bias)``, then ``softcap * tanh(z / softcap)``;
* losses are in nats, denominators in tokens.

Names are imported at their first use, so that ``fusedce --help`` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedce import accumulate as accumulate
    from fusedce import head as head
    from fusedce import loss as loss
    from fusedce import recipes as recipes
    from fusedce import sharded as sharded
    from fusedce import testing as testing
    from fusedce import trainer as trainer
    from fusedce import trainer_rl as trainer_rl
    from fusedce.accumulate.accumulator import LossAccumulator
    from fusedce.auditing import audit
    from fusedce.contract.labels import count_valid, shift_labels
    from fusedce.contract.results import LossSum, TokenStats
    from fusedce.head.replace import head_report, replace_loss_head, restore_loss_head
    from fusedce.loss.cross_entropy import fused_cross_entropy
    from fusedce.loss.fused_ce import fused_ce
    from fusedce.loss.kl import fused_kl, fused_kl_tokens
    from fusedce.loss.logprobs import fused_argmax, fused_logprobs
    from fusedce.loss.names_of_peers import FusedLinearCrossEntropyLoss, linear_cross_entropy
    from fusedce.loss.reference import reference_ce, reference_kl
    from fusedce.trainer import FusedTrainerMixin

__version__ = "0.1.0"

_HOME = {
    "FusedLinearCrossEntropyLoss": "fusedce.loss.names_of_peers",
    "FusedTrainerMixin": "fusedce.trainer",
    "LossAccumulator": "fusedce.accumulate.accumulator",
    "LossSum": "fusedce.contract.results",
    "TokenStats": "fusedce.contract.results",
    "audit": "fusedce.auditing",
    "count_valid": "fusedce.contract.labels",
    "fused_argmax": "fusedce.loss.logprobs",
    "fused_ce": "fusedce.loss.fused_ce",
    "fused_cross_entropy": "fusedce.loss.cross_entropy",
    "fused_kl": "fusedce.loss.kl",
    "fused_kl_tokens": "fusedce.loss.kl",
    "fused_logprobs": "fusedce.loss.logprobs",
    "linear_cross_entropy": "fusedce.loss.names_of_peers",
    "reference_ce": "fusedce.loss.reference",
    "reference_kl": "fusedce.loss.reference",
    "head_report": "fusedce.head.replace",
    "replace_loss_head": "fusedce.head.replace",
    "restore_loss_head": "fusedce.head.replace",
    "shift_labels": "fusedce.contract.labels",
}
# `testing` needs hypothesis, and says so
_MODULES = (
    "accumulate",
    "head",
    "loss",
    "recipes",
    "sharded",
    "testing",
    "trainer",
    "trainer_rl",
)

__all__ = [
    "FusedLinearCrossEntropyLoss",
    "FusedTrainerMixin",
    "LossAccumulator",
    "LossSum",
    "TokenStats",
    "audit",
    "count_valid",
    "fused_argmax",
    "fused_ce",
    "fused_cross_entropy",
    "fused_kl",
    "fused_kl_tokens",
    "fused_logprobs",
    "head_report",
    "linear_cross_entropy",
    "reference_ce",
    "reference_kl",
    "replace_loss_head",
    "restore_loss_head",
    "shift_labels",
]


if not TYPE_CHECKING:  # type checkers read the imports above, and report a name that is not there

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), name)
        elif name in _MODULES:
            value = importlib.import_module(f"fusedce.{name}")
        else:
            raise AttributeError(f"module 'fusedce' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
