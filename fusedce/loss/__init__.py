"""The public functions: signature, docstring, and a call of the layer below."""

from fusedce.contract.results import LossSum as LossSum
from fusedce.contract.results import TokenStats as TokenStats
from fusedce.contract.results import TopK as TopK
from fusedce.loss.cross_entropy import fused_cross_entropy as fused_cross_entropy
from fusedce.loss.fused_ce import fused_ce as fused_ce
from fusedce.loss.kl import fused_kl as fused_kl
from fusedce.loss.kl import fused_kl_tokens as fused_kl_tokens
from fusedce.loss.logprobs import fused_argmax as fused_argmax
from fusedce.loss.logprobs import fused_logprobs as fused_logprobs
from fusedce.loss.reference import reference_ce as reference_ce
from fusedce.loss.reference import reference_kl as reference_kl
from fusedce.loss.topk import fused_topk as fused_topk
