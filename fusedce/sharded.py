"""Public names of the losses with a sharded vocabulary."""

from fusedce.loss.logprobs import sharded_argmax, sharded_logprobs
from fusedce.loss.sharded import sharded_ce, sharded_cross_entropy

__all__ = ["sharded_argmax", "sharded_ce", "sharded_cross_entropy", "sharded_logprobs"]
