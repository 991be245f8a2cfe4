"""fusedce: the loss of a language model, computed in chunks of its logits.

Vocabulary used everywhere in this package:

* ``N``: token positions, batch and time flattened; ``N_valid``: those with a label to predict;
* ``H``: hidden size; ``V``: vocabulary size;
* logits ``z = logit_scale * (hidden @ weight.T + bias)``, then ``softcap * tanh(z / softcap)``;
* losses are in nats, denominators in tokens.

Names are imported at their first use, so that ``fusedce --help`` need not wait for torch.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import accumulate as accumulate
    from . import head as head
    from . import loss as loss
    from . import recipes as recipes
    from . import sharded as sharded
    from . import testing as testing
    from . import trainer as trainer
    from .accumulate.accumulator import LossAccumulator as LossAccumulator
    from .accumulate.meter import LossMeter as LossMeter
    from .auditing import audit as audit
    from .contract.labels import count_valid as count_valid
    from .contract.labels import shift_labels as shift_labels
    from .contract.results import LossSum as LossSum
    from .contract.results import TokenStats as TokenStats
    from .contract.results import TopK as TopK
    from .head.model_logprobs import model_logprobs as model_logprobs
    from .head.model_loss import model_loss as model_loss
    from .head.replace import head_report as head_report
    from .head.replace import replace_loss_head as replace_loss_head
    from .head.replace import restore_loss_head as restore_loss_head
    from .loss.cross_entropy import (
        FusedLinearCrossEntropyLoss as FusedLinearCrossEntropyLoss,
    )
    from .loss.cross_entropy import fused_cross_entropy as fused_cross_entropy
    from .loss.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .loss.fused_ce import fused_ce as fused_ce
    from .loss.kl import fused_kl as fused_kl
    from .loss.kl import fused_kl_tokens as fused_kl_tokens
    from .loss.logprobs import fused_argmax as fused_argmax
    from .loss.logprobs import fused_logprobs as fused_logprobs
    from .loss.reference import reference_ce as reference_ce
    from .loss.reference import reference_kl as reference_kl
    from .loss.topk import fused_topk as fused_topk
    from .trainer import FusedTrainerMixin as FusedTrainerMixin

__version__ = "0.1.0"

_NAMES = {
    "accumulate.accumulator": ("LossAccumulator",),
    "accumulate.meter": ("LossMeter",),
    "auditing": ("audit",),
    "contract.labels": ("count_valid", "shift_labels"),
    "contract.results": ("LossSum", "TokenStats", "TopK"),
    "head.model_logprobs": ("model_logprobs",),
    "head.model_loss": ("model_loss",),
    "head.replace": ("head_report", "replace_loss_head", "restore_loss_head"),
    "loss.cross_entropy": (
        "FusedLinearCrossEntropyLoss", "fused_cross_entropy", "linear_cross_entropy",
    ),
    "loss.fused_ce": ("fused_ce",),
    "loss.kl": ("fused_kl", "fused_kl_tokens"),
    "loss.logprobs": ("fused_argmax", "fused_logprobs"),
    "loss.reference": ("reference_ce", "reference_kl"),
    "loss.topk": ("fused_topk",),
    "trainer": ("FusedTrainerMixin",),
}  # fmt: skip
_HOME = {name: home for home, names in _NAMES.items() for name in names}
"""The module of each public name."""
_MODULES = ("accumulate", "head", "loss", "recipes", "sharded", "testing", "trainer")
__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # type checkers read the imports above, and report a name that is not there

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        elif name in _MODULES:
            value = importlib.import_module(f".{name}", __name__)
        else:
            message = f"module {__name__!r} has no attribute {name!r}"
            # With the name and its owner, Python suggests the name that was meant.
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
