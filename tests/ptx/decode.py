"""Instructions to functions of a CTA, once for each kernel.

A family of instructions is a function marked with :func:`form`: a pattern of whole opcodes, all
modifiers included, and what makes a step of one. An opcode that no pattern matches, an operand of
another width than its instruction and an undeclared name are errors with their line.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ptx.parse import Address, Instruction, NotUnderstood, Program

if TYPE_CHECKING:
    from ptx.cta import Cta

Value = Callable[["Cta"], np.ndarray]  # of all lanes
Put = Callable[["Cta", np.ndarray], None]

TYPES = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
    "bf16x2": np.uint32, "f16x2": np.uint32,
}  # fmt: skip
_FORMS: list[tuple[re.Pattern[str], Callable[..., Callable[[Cta], None]]]] = []


def form(pattern: str, *, control: bool = False):
    """Marks the maker of steps for opcodes that ``pattern`` matches whole.

    It is called with a :class:`Decoder` and the pattern's groups. ``control``: the step changes
    which lanes run next.
    """

    def mark(make):
        make.control = control
        _FORMS.append((re.compile(pattern), make))
        return make

    return mark


@functools.cache
def _forms_of(opcode: str) -> list[tuple[Callable[..., Callable[[Cta], None]], tuple]]:
    fitting = ((make, pattern.fullmatch(opcode)) for pattern, make in _FORMS)
    return [(make, found.groups()) for make, found in fitting if found]


class Step(NamedTuple):
    run: Callable[[Cta], None]
    guard: tuple[int, bool] | None  # slot of a predicate, and its value where lanes take part
    control: bool
    reads: frozenset[int]  # slots
    writes: frozenset[int]
    instruction: Instruction


class Kernel(NamedTuple):
    program: Program
    steps: tuple[Step, ...]
    slots: dict[str, int]  # of the registers
    widths: tuple[type, ...]  # of the slots


def decode(program: Program) -> Kernel:
    """Everything a CTA needs to run ``program``.

    Raises:
        NotUnderstood: an instruction that has no form, or an operand that does not fit it.
    """
    slots = {name: slot for slot, name in enumerate(program.registers)}
    steps = tuple(Decoder(program, slots, x).step() for x in program.code)
    return Kernel(program, steps, slots, tuple(program.registers.values()))


class Decoder:
    """One instruction and its operands, on the way to a :class:`Step`."""

    def __init__(self, program: Program, slots: dict[str, int], this: Instruction) -> None:
        self.program, self.slots, self.this = program, slots, this
        self.operands, self.threads = this.operands, program.threads
        self.reads: set[int] = set()
        self.writes: set[int] = set()

    def step(self) -> Step:
        this = self.this
        forms = _forms_of(this.opcode)
        if len(forms) != 1:
            raise self.unknown(f"{len(forms)} forms of {this.opcode}")
        make, groups = forms[0]
        run = make(self, *groups)
        guard = None
        if this.guard is not None:
            guard = (self.slot(this.guard[0], np.bool_), this.guard[1])
        reads, writes = frozenset(self.reads), frozenset(self.writes)
        return Step(run, guard, make.control, reads, writes, this)

    def unknown(self, why: str) -> NotUnderstood:
        return NotUnderstood(
            f"{self.program.name}, PTX line {self.this.line}: {self.this.text}: {why}"
        )

    def need(self, condition: bool, why: str) -> None:
        if not condition:
            raise self.unknown(why)

    def count(self, *numbers: int) -> None:
        """The instruction must have so many operands."""
        self.need(len(self.operands) in numbers, f"{len(self.operands)} operands")

    # ---- registers and values -------------------------------------------------------------

    def slot(self, name: object, width: type) -> int:
        """Slot of the register ``name``, which must hold ``width``."""
        self.need(isinstance(name, str) and name in self.slots, f"no register {name}")
        self._must_hold(name, width)
        self.reads.add(self.slots[name])
        return self.slots[name]

    def _must_hold(self, name: str, width: type) -> None:
        held = self.program.registers[name]
        if held is not width:
            raise self.unknown(f"{name} holds {np.dtype(held)}, not {np.dtype(width)}")

    def width_of(self, name: object) -> type:
        """The numpy dtype that a register holds."""
        self.need(isinstance(name, str) and name in self.slots, f"no register {name}")
        return self.program.registers[name]

    def value(self, operand: object, dtype: type) -> Value:
        """A register's bits as ``dtype``, or a constant."""
        bits = _bits(dtype)
        if not isinstance(operand, str):
            raise self.unknown(f"{operand} where a value belongs")
        if operand in self.slots:
            slot = self.slot(operand, bits)
            if dtype is bits:
                return lambda cta: cta.registers[slot]
            return lambda cta: cta.registers[slot].view(dtype)
        if operand.startswith("!") and dtype is np.bool_:
            slot = self.slot(operand[1:], np.bool_)
            return lambda cta: ~cta.registers[slot]
        if operand.startswith("%"):
            special = operand[1:]
            self.need(bits is np.uint32, f"{operand} in another width than 32")
            self.need(re.fullmatch(r"tid\.[xyz]|n?ctaid\.[xyz]|laneid", special) is not None,
                      f"no register {operand}")  # fmt: skip
            return lambda cta: cta.special[special].view(dtype)
        if self.program.parameters.get(operand) == "b8" and bits in (np.uint32, np.uint64):
            # Where a tensor map is: its handle.
            return lambda cta: np.full(cta.threads, cta.grid.arguments[operand], bits)
        constant = np.full(self.threads, self._number(operand, bits)).view(dtype)
        constant.setflags(write=False)
        return lambda cta: constant

    def _number(self, text: str, bits: type) -> np.generic:
        if text == "global_smem":  # where a CTA's shared memory begins
            return bits(0)
        if bits is np.bool_:
            return np.bool_(self.integer(text) != 0)
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text):
            self.need(bits is np.uint32, f"{text} in another width than 32")
            return np.uint32(int(text[2:], 16))
        if re.fullmatch(r"0d[0-9A-Fa-f]{16}", text):
            self.need(bits is np.uint64, f"{text} in another width than 64")
            return np.uint64(int(text[2:], 16))
        mask = (1 << 8 * np.dtype(bits).itemsize) - 1
        return bits(self.integer(text) & mask)

    def integer(self, text: object) -> int:
        """A constant that the instruction itself holds."""
        found = isinstance(text, str) and re.fullmatch(r"(-?(?:0[xX][0-9A-Fa-f]+|\d+))U?", text)
        if not found:
            raise self.unknown(f"{text} where a number belongs")
        return int(found[1], 0)

    def put(self, operand: object, dtype: type) -> Put:
        """Writes values of ``dtype`` to a register, in the lanes that are active."""
        if operand == "_":
            return lambda cta, value: None
        bits = _bits(dtype)
        self.need(isinstance(operand, str) and operand in self.slots, f"no register {operand}")
        self._must_hold(operand, bits)
        slot, expected = self.slots[operand], np.dtype(dtype)
        self.writes.add(slot)

        def put(cta, value):
            if value.dtype is not expected:
                raise TypeError(f"{value.dtype} for {expected}: {self.this.text}")
            if not cta.full:
                value = np.where(cta.active, value.view(bits), cta.registers[slot])
            cta.registers[slot] = value.view(bits)
            cta.written[slot] = cta.clock

        return put

    def wider(self, operand: object, dtype: type) -> type:
        """Dtype of a register that ld, st or cvt may use for ``dtype``, as wide or wider.

        (PTX ISA, "Operand Size Exceeding Instruction-Type Size".)
        """
        bits = _bits(dtype)
        if operand not in self.slots:  # a constant
            return np.uint16 if bits is np.uint8 else bits
        held = self.program.registers[operand]
        if held is not np.bool_ and np.dtype(held).itemsize >= max(np.dtype(bits).itemsize, 2):
            return held
        raise self.unknown(f"{operand} is too narrow")

    def names(self, operand: object, most: int = 1 << 30) -> tuple[str, ...]:
        """The registers of ``{a, b}``, or the one register."""
        names = operand if isinstance(operand, tuple) else (operand,)
        names = () if isinstance(operand, Address) else names
        self.need(0 < len(names) <= most, f"{operand} where registers belong")
        return names

    def address(self, operand: object, *, wide: bool) -> Value:
        """``[base + offset]`` as int64, of global memory (``wide``) or of shared memory."""
        self.need(isinstance(operand, Address) and not operand.coordinates,
                  f"{operand} where an address belongs")  # fmt: skip
        base, offset = operand.base, operand.offset
        width = np.uint64 if wide else np.uint32
        if base in self.slots and not wide and self.width_of(base) is np.uint64:
            width = np.uint64
        of_base = self.value(base, width)
        return lambda cta: of_base(cta).astype(np.int64) + offset

    # ---- steps of one shape ---------------------------------------------------------------

    def elementwise(self, function: Callable[..., np.ndarray], result: type, *arguments: type):
        """The step ``operands[0] = function(operands[1], ...)``."""
        self.count(1 + len(arguments))
        put = self.put(self.operands[0], result)
        pairs = zip(self.operands[1:], arguments, strict=True)
        gets = [self.value(operand, dtype) for operand, dtype in pairs]
        if len(gets) == 2:
            a, b = gets
            return lambda cta: put(cta, function(a(cta), b(cta)))
        return lambda cta: put(cta, function(*[get(cta) for get in gets]))


def _bits(dtype: type) -> type:
    """The unsigned type that holds ``dtype``."""
    if dtype is np.bool_:
        return np.bool_
    return np.dtype(f"u{np.dtype(dtype).itemsize}").type
