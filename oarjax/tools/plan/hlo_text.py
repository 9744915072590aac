"""The text of an optimized HLO program, as data: computations, their instructions, and the arrays of each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

WIDTHS = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}

UNKNOWN = 2**63 - 1
"""What the compiler writes where it has no estimate, as for scatters of experts' rows that it offloads."""


class HloError(ValueError):
    """A program whose text does not say what has to be known; names the instruction."""


@dataclass(frozen=True)
class Array:
    """One array of an instruction's type."""

    dtype: str
    sizes: tuple[int, ...]
    space: int = 0  # of memory: 0 is HBM, others lie on the chip

    @property
    def bytes(self) -> float:
        """4-bit types count half a byte."""
        digits = re.search(r"\d+", self.dtype)
        width = WIDTHS.get(self.dtype, int(digits[0]) / 8 if digits else 0)
        return float(math.prod(self.sizes) * width)


@dataclass(frozen=True)
class Instruction:
    name: str
    type: tuple[Array, ...]  # a tuple's arrays one after another
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes
    value: str  # text between the brackets: a constant's value
    root: bool

    @property
    def op_name(self) -> str:
        """The place in the traced function, such as jit(update)/while/body."""
        return match[1] if (match := re.search(r'op_name="([^"]*)"', self.rest)) else ""

    @property
    def cycles(self) -> float:
        """The cycles of one run as a TPU's compiler estimates them; 0 where it does not."""
        match = re.search(r'"estimated_cycles":"(-?\d+)"', self.rest)
        return float(match[1]) if match and 0 < int(match[1]) < UNKNOWN else 0.0

    def called(self, attribute: str) -> str | None:
        """Return the computation that an attribute such as ``body`` names."""
        return match[1] if (match := re.search(rf"\b(?:{attribute})=%?([\w.\-]+)", self.rest)) else None


@dataclass(frozen=True)
class HloProgram:
    computations: dict[str, dict[str, Instruction]]
    entry: str


HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,]*)\](?:\{[^{}]*?(?:S\((\d+)\))?\})?")


def parse(text: str) -> HloProgram:
    """Parse computations and their instructions. Other lines, such as the rest of a kernel's text, are skipped.

    Raises:
        HloError: there is no entry computation.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    entry, instructions = None, None
    for line in text.splitlines():
        if header := HEADER.match(line):
            instructions = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif instructions is not None and (start := LINE.match(line)):
            instruction = _instruction(line, start)
            if instruction is not None:
                instructions[instruction.name] = instruction
    if entry is None:
        raise HloError("expected optimized HLO text with an ENTRY computation")
    return HloProgram(computations, entry)


def _instruction(line: str, start: re.Match[str]) -> Instruction | None:
    """Parse ``%name = type opcode(operands), attributes``; None for a line of another form."""
    at = start.end()
    end = _closing(line, at) + 1 if line[at] == "(" else line.find(" ", at)
    opcode = re.match(r"\S*\s*([a-z][\w\-]*)\(", line[end:])
    if end <= 0 or opcode is None:
        return None
    bracket = end + opcode.end() - 1
    close = _closing(line, bracket)
    arguments = line[bracket + 1 : close]
    return Instruction(
        name=start[2],
        type=tuple(_array(m) for m in ARRAY.finditer(line[at:end])),
        opcode=opcode[1],
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        rest=line[close + 1 :],
        value=arguments,
        root=start[1] is not None,
    )


def _array(match: re.Match[str]) -> Array:
    return Array(match[1], tuple(int(n) for n in match[2].split(",") if n), int(match[3] or 0))


def _closing(line: str, at: int) -> int:
    """Find the bracket that closes the one at ``at``; the line's end if none does."""
    depth = 0
    for i in range(at, len(line)):
        depth += {"(": 1, ")": -1}.get(line[i], 0)
        if depth == 0:
            return i
    return len(line)


def type_of(instructions: dict[str, Instruction], name: str) -> tuple[Array, ...]:
    if name not in instructions:
        raise HloError(f"operand %{name} is not defined where it is used")
    return instructions[name].type
