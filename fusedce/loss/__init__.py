"""The public functions: signature, docstring, one call each."""

from fusedce.contract.results import LossSum, TokenStats, TopK
from fusedce.loss.cross_entropy import fused_cross_entropy
from fusedce.loss.fused_ce import fused_ce
from fusedce.loss.kl import fused_kl, fused_kl_tokens
from fusedce.loss.logprobs import fused_argmax, fused_logprobs
from fusedce.loss.reference import reference_ce, reference_kl
from fusedce.loss.topk import fused_topk

__all__ = [
    "LossSum",
    "TokenStats",
    "TopK",
    "fused_argmax",
    "fused_ce",
    "fused_cross_entropy",
    "fused_kl",
    "fused_kl_tokens",
    "fused_logprobs",
    "fused_topk",
    "reference_ce",
    "reference_kl",
]
