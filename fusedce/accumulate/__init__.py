"""One denominator for all tokens of an optimizer step."""

from fusedce.accumulate.accumulator import LossAccumulator

__all__ = ["LossAccumulator"]
