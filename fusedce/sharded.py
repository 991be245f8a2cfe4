"""Public names of the losses with a sharded vocabulary."""

from fusedce.loss.sharded import sharded_ce, sharded_cross_entropy
from fusedce.loss.sharded_logprobs import sharded_argmax, sharded_logprobs

__all__ = ["sharded_argmax", "sharded_ce", "sharded_cross_entropy", "sharded_logprobs"]
