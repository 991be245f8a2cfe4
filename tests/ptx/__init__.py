"""Runs PTX that Triton compiles for sm_80 and sm_90, in numpy, and looks for hazards on the way.

README.md says what it finds, what it cannot show and what each file holds. A hazard is a
:class:`~ptx.cta.Fault`; an instruction, modifier or operand that is not known is a
:class:`~ptx.parse.NotUnderstood`, with its line.
"""
