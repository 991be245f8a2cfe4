"""The public functions: signature, docstring, and a call of the layer below."""

from ..contract.results import LossSum as LossSum
from ..contract.results import TokenStats as TokenStats
from ..contract.results import TopK as TopK
from .cross_entropy import fused_cross_entropy as fused_cross_entropy
from .fused_ce import fused_ce as fused_ce
from .kl import fused_kl as fused_kl
from .kl import fused_kl_tokens as fused_kl_tokens
from .logprobs import fused_argmax as fused_argmax
from .logprobs import fused_logprobs as fused_logprobs
from .reference import reference_ce as reference_ce
from .reference import reference_kl as reference_kl
from .topk import fused_topk as fused_topk
