"""One denominator for all tokens of an optimizer step."""

from fusedce.accumulate.accumulator import LossAccumulator
from fusedce.accumulate.meter import LossMeter

__all__ = ["LossAccumulator", "LossMeter"]
