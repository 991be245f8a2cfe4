"""Public name of the loss with a sharded vocabulary."""

from fusedce.loss.sharded import sharded_ce

__all__ = ["sharded_ce"]
