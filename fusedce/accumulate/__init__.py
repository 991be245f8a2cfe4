"""One denominator for all tokens of an optimizer step."""

from .accumulator import LossAccumulator
from .meter import LossMeter

__all__ = ["LossAccumulator", "LossMeter"]
