"""Runs PTX that Triton compiles for sm_80 and sm_90, in numpy, and looks for hazards on the way.

README.md says what it finds, what it cannot show and what each file holds. A hazard is a
:class:`Fault`; an instruction, modifier or operand that is not known is a :class:`NotUnderstood`,
with its line.
"""

from ptx.assembly import run
from ptx.breakages import Breakage, breakages
from ptx.cta import Fault
from ptx.device import on_device
from ptx.parse import NotUnderstood
from ptx.tensor_map import TensorMap

__all__ = ["Breakage", "Fault", "NotUnderstood", "TensorMap", "breakages", "on_device", "run"]
