"""PTX text to a :class:`Program`: registers, parameters, instructions with their labels resolved.

Only the grammar is read here; the meaning of an instruction is for
:mod:`ptx.decode`. Text around the one kernel of a module is skipped.
"""

import re
from typing import NamedTuple

import numpy as np

WIDTHS = {"pred": np.bool_, "16": np.uint16, "32": np.uint32, "64": np.uint64}


class NotUnderstood(NotImplementedError):
    """Text or an instruction that this interpreter does not know; it never guesses."""


class Address(NamedTuple):
    """``[base + offset]``; with ``coordinates``, of a tile of a tensor map."""

    base: str
    offset: int = 0
    coordinates: tuple[str, ...] = ()


class Instruction(NamedTuple):
    opcode: str  # with all its modifiers
    operands: tuple  # str, Address, tuple of str for {a, b}
    guard: tuple[str, bool] | None  # predicate, and the value for which a lane takes part
    line: int  # in the PTX text, from 1
    place: str  # in the Python source, as the compiler says
    text: str


class Program(NamedTuple):
    name: str
    threads: int  # of a CTA
    parameters: dict[str, str]  # name: type, "b8" for a tensor map
    registers: dict[str, type]  # name: numpy type of its bits
    code: tuple[Instruction, ...]  # a branch's only operand is the index where it goes
    text: str


_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", re.S)
_PLACE = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+[^/]*(?://\s*(.*))?")


def parse(text: str) -> Program:
    """The module's one kernel.

    Raises:
        NotUnderstood: text that is no PTX of Triton's; the message names the line.
    """
    entry = _ENTRY.search(text)
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3]) if entry else None
    if entry is None or threads is None:
        raise NotUnderstood("no kernel with .reqntid in the text")
    body = _Body(text, entry.end())
    body.read()
    return Program(
        entry[1], int(threads[1]), _parameters(entry[2]), body.registers, body.resolved(), text
    )


def _parameters(text: str) -> dict[str, str]:
    found = {}
    for parameter in filter(None, map(str.strip, text.split(","))):
        kind = re.search(r"\.([busf]\d+)\b", parameter)
        found[re.sub(r"\[\d+\]$", "", parameter.split()[-1])] = kind[1]
    return found


class _Body:
    """Statements between the braces of a kernel. Braces inside are scopes of inline assembly."""

    def __init__(self, text: str, begin: int) -> None:
        self.text, self.begin = text, begin
        self.registers: dict[str, type] = {}
        self._ranges: dict[str, type] = {}  # "%r": of all registers called so
        self._code: list[tuple[Instruction, tuple[int, ...]]] = []  # and the scopes it stands in
        self._labels: dict[tuple[int, str], int] = {}
        self._local: dict[tuple[int, str], str] = {}  # registers declared in a scope
        self._scopes, self._made = [0], 0
        self._place, self._line = "", 0

    def read(self) -> None:
        statement = ""
        first = self.text.count("\n", 0, self.begin) + 1
        for number, line in enumerate(self.text[self.begin :].split("\n"), first):
            self._line = number
            place = _PLACE.match(line.strip())
            if place:
                self._place = place[3] or f"file {place[1]}:{place[2]}"
                continue
            statement = f"{statement} {line.split('//')[0]}".strip()
            while statement:
                head = re.match(r"[{}]|[\w$]+\s*:(?!:)", statement)
                if head:
                    self._structure(head[0])
                    if not self._scopes:
                        return
                    statement = statement[head.end() :].strip()
                elif ";" in statement:
                    this, statement = (part.strip() for part in statement.split(";", 1))
                    self._statement(this)
                else:
                    break  # it goes on in the next line
        raise NotUnderstood("the kernel does not end")

    def _structure(self, head: str) -> None:
        if head == "{":
            self._made += 1
            self._scopes.append(self._made)
        elif head == "}":
            self._scopes.pop()
        else:
            self._labels[self._scopes[-1], head[:-1].strip()] = len(self._code)

    def _statement(self, text: str) -> None:
        declared = re.fullmatch(r"\.reg\s+\.([a-z]*?)(pred|\d+)\s+(%?\w+)(<\d+>)?", text)
        if declared:
            width = WIDTHS.get(declared[2])
            if width is None:
                raise NotUnderstood(f"line {self._line}: {text}")
            if declared[4]:
                self._ranges[declared[3]] = width
            else:
                scope = self._scopes[-1]
                own = self._local[scope, declared[3]] = f"{declared[3]}@{scope}"
                self.registers[own] = width
        elif text and not text.startswith(".pragma"):
            if text.startswith("."):
                raise NotUnderstood(f"line {self._line}: {text}")
            self._instruction(text)

    def _instruction(self, text: str) -> None:
        found = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
        if found is None:
            raise NotUnderstood(f"line {self._line}: {text}")
        guard = (self._name(found[2]), not found[1]) if found[2] else None
        operands = tuple(self._operand(part) for part in _split(found[4]))
        this = Instruction(found[3], operands, guard, self._line, self._place, text)
        self._code.append((this, tuple(self._scopes)))

    def _operand(self, text: str) -> object:
        if text.startswith("{"):
            return tuple(self._name(part) for part in _split(text[1:-1]))
        if text.startswith("["):
            base, *more = _split(text[1:-1])
            if more:
                return Address(self._name(base), 0, self._operand(more[0]))
            base, _, offset = (part.strip() for part in base.partition("+"))
            return Address(self._name(base), int(offset or "0", 0))
        return "|".join(self._name(part) for part in text.split("|"))

    def _name(self, name: str) -> str:
        """A name as it is unique in the kernel; registers are declared by the way."""
        name = name.strip()
        for scope in reversed(self._scopes):
            if (scope, name) in self._local:
                return self._local[scope, name]
        register = re.fullmatch(r"(!?)(%[a-z]+)\d+", name)
        if register and register[2] in self._ranges:
            self.registers[name.lstrip("!")] = self._ranges[register[2]]
        return name

    def resolved(self) -> tuple[Instruction, ...]:
        code = []
        for this, scopes in self._code:
            if this.opcode.split(".")[0] == "bra":
                to = [(s, this.operands[0]) for s in reversed(scopes)]
                to = next((self._labels[key] for key in to if key in self._labels), None)
                if to is None:
                    raise NotUnderstood(f"line {this.line}: no label for {this.text}")
                this = this._replace(operands=(to,))
            code.append(this)
        return tuple(code)


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, part = [], 0, ""
    for c in text:
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += c
    return [*parts, part.strip()] if part.strip() else parts
