"""fusedce: the loss of a language model, without ever building the logits.

Vocabulary used everywhere in this package:

* ``N``: token positions, batch and time flattened; ``N_valid``: those with a label to predict;
* ``H``: hidden size; ``V``: vocabulary size;
* logits ``z = logit_scale * (hidden @ weight.T + bias)``, then ``softcap * tanh(z / softcap)``;
* losses are in nats, denominators in tokens.
"""

from fusedce.accumulate.accumulator import LossAccumulator
from fusedce.audit import audit
from fusedce.contract.labels import count_valid, shift_labels
from fusedce.contract.results import LossSum, TokenStats
from fusedce.head.replace import head_report, replace_loss_head, restore_loss_head
from fusedce.loss.cross_entropy import fused_cross_entropy
from fusedce.loss.fused_ce import fused_ce
from fusedce.loss.logprobs import fused_argmax, fused_logprobs
from fusedce.loss.names_of_peers import FusedLinearCrossEntropyLoss, linear_cross_entropy
from fusedce.loss.reference import reference_ce
from fusedce.trainer import FusedTrainerMixin

__version__ = "0.1.0"

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
    "fused_logprobs",
    "head_report",
    "linear_cross_entropy",
    "reference_ce",
    "replace_loss_head",
    "restore_loss_head",
    "shift_labels",
]
