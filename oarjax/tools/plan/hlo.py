"""Count the work of a compiled program over its optimized HLO text: matrix products, collectives, kernels.

XLA's own cost analysis counts the body of a loop once, whatever its length. Here every instruction is multiplied with
the trips of the loops around it. A TPU's text states no trip counts: they follow from the loop's condition, the step
in its body and its start. Loops that values decide (microbatches in use, counterfactuals of a row) are asked for.

The program is one device's, so all numbers are per device.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from oarjax.costs import Number
from oarjax.kernels.decode_attention import NAME as DECODE
from oarjax.models.delta_kernel import NAME as DELTA
from oarjax.tools.plan.hlo_text import Array, HloError, HloProgram, Instruction, parse, type_of
from oarjax.tools.plan.traffic import hbm_bytes

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

PRODUCTS = "matrix products"
"""Operations with matrix products, and what the compiler fused into them."""


@dataclass(frozen=True)
class Kernel:
    """A Pallas kernel, whose work its text does not show."""

    name: str
    operands: tuple[tuple[int, ...], ...]  # sizes


@dataclass
class Executed:
    """Totals of one run of a program on one device."""

    flops: float = 0.0  # of matrix products, 2 per multiply-add
    collectives: Counter[str] = field(default_factory=Counter)  # kind -> bytes that a device sends
    calls: Counter[str] = field(default_factory=Counter)  # kind -> how often
    kernels: Counter[Kernel] = field(default_factory=Counter)  # -> how often
    groups: Counter[int] = field(default_factory=Counter)  # devices of a collective -> bytes that a device sends
    group_calls: Counter[int] = field(default_factory=Counter)  # the same -> how often
    moved: float = 0.0  # bytes between HBM and the chip, by instructions with matrix products
    passed: float = 0.0  # the same by all others: elementwise passes, copies into another layout
    streamed: float = 0.0  # bytes of what has no cycles: decode kernels, and gathers and scatters of rows
    operations: Counter[str] = field(default_factory=Counter)  # PRODUCTS or a pass -> cycles, by the compiler

    @property
    def cycles(self) -> float:
        """Sum the cycles of all but kernels and collectives."""
        return float(self.operations.total())

    def add(self, other: Executed, times: int | float) -> None:
        """Add another's totals, so many times."""
        self.flops += times * other.flops
        self.moved += times * other.moved
        self.passed += times * other.passed
        self.streamed += times * other.streamed
        for part in ("collectives", "calls", "kernels", "groups", "group_calls", "operations"):
            totals, counts = getattr(self, part), getattr(other, part)
            for name, count in counts.items():
                totals[name] += times * count


Trips = Callable[[str, bool], int | float]
"""(op_name of a loop whose length the text does not say, whether its body branches) -> how often its body runs."""

Branches = Callable[[str, int], Sequence[int | float]]
"""(op_name of a conditional, branches) -> how often each runs when the conditional does."""


def executed(
    text: str, *, trips: Trips | None = None, branches: Branches | None = None, slots: Number | None = None
) -> Executed:
    """Count the totals of a program's optimized HLO text (``compiled.as_text()``).

    ``trips`` is asked for loops that values decide; ``branches`` for conditionals, where None counts the most
    expensive branch each time. ``slots`` as in ``hbm_bytes``.

    Collectives count the bytes that a device sends in a ring: (n - 1)/n of a gathered or scattered array, of what goes
    in and of what comes out of an all-reduce, the array for a permutation. A gather that the compiler spreads over
    several fusions counts once; an all-reduce of which each device keeps its part is a reduce-scatter.

    Raises:
        HloError: no entry computation, an unknown operand, or a loop of unknown length and no ``trips``.
    """
    program = parse(text)

    @cache
    def total(name: str) -> Executed:
        totals = Executed()
        seen_chains: set[tuple[str, str, str]] = set()
        for instruction in program.computations[name].values():
            _count(program, name, instruction, totals, seen_chains, total, trips, branches, slots)
        return totals

    return total(program.entry)


def _count(
    program: HloProgram,
    home: str,
    instruction: Instruction,
    totals: Executed,
    seen_chains: set[tuple[str, str, str]],
    total: Callable[[str], Executed],
    trips: Trips | None,
    branches: Branches | None,
    slots: Number | None,
) -> None:
    """Add one instruction, and all that it calls, to ``totals``."""
    opcode = instruction.opcode.removesuffix("-start")
    instructions = program.computations[home]
    start = totals.flops, totals.kernels.total(), totals.calls.total()
    if opcode == "convolution":
        totals.flops += convolution_flops(instruction, *(type_of(instructions, o) for o in instruction.operands[:2]))
    elif opcode == "dot":
        totals.flops += dot_flops(instruction, *(type_of(instructions, o) for o in instruction.operands[:2]))
    elif opcode in COLLECTIVES:
        _count_collective(instructions, home, instruction, opcode, totals)
    elif opcode == "custom-call" and "tpu_custom_call" in instruction.rest:
        operands = tuple(a.sizes for o in instruction.operands for a in type_of(instructions, o))
        totals.kernels[Kernel(re.sub(r"[.\d]+$", "", instruction.name), operands)] += 1
    elif opcode == "while":
        body, times = str(instruction.called("body")), loop_trips(program, home, instruction)
        if times is None:
            if trips is None:
                raise HloError(f"loop {instruction.name} ({instruction.op_name}): its length is not in the text")
            branching = any(i.opcode == "conditional" for i in program.computations[body].values())
            times = trips(instruction.op_name, branching)
        totals.add(total(body), times)
    elif opcode == "conditional":
        names = _branches(instruction)
        parts = [total(name) for name in names]
        if branches is None:
            totals.add(max(parts, key=lambda p: (p.flops, sum(p.collectives.values()))), 1)
        else:
            for part, times in zip(parts, branches(instruction.op_name, len(parts)), strict=True):
                totals.add(part, times)
    elif opcode in ("fusion", "call", "async") and (called := instruction.called("calls|to_apply")):
        _count_fusion(program, called, totals, seen_chains, total, fused=opcode == "fusion")
    if instruction.cycles:
        operation = instruction.op_name.rpartition("/")[2] or instruction.opcode
        name = PRODUCTS if totals.flops != start[0] else re.sub(r"[.\d]+$", "", operation)
        totals.operations[name] += instruction.cycles  # type: ignore[assignment]
    if totals.calls.total() == start[2]:  # of a collective the time is on the links
        traffic = hbm_bytes(program, instructions, instruction, slots=slots)
        called = instruction.called("calls") if opcode == "fusion" and not instruction.cycles else None
        unstated = called and any(i.opcode in ("gather", "scatter") for i in program.computations[called].values())
        by_kernel = opcode == "custom-call" and instruction.name.startswith((DECODE, DELTA))
        totals.streamed += traffic * bool(by_kernel or unstated)
        if (totals.flops, totals.kernels.total()) != start[:2]:
            totals.moved += traffic
        else:
            totals.passed += traffic


def _count_fusion(
    program: HloProgram,
    called: str,
    totals: Executed,
    seen_chains: set[tuple[str, str, str]],
    total: Callable[[str], Executed],
    *,
    fused: bool,
) -> None:
    """Count a fusion's work. Pieces of one asynchronous collective repeat it, under one channel and chain."""
    part = Executed()
    part.add(total(called), 1)
    if fused:  # between its own instructions nothing goes to HBM, and its cycles are stated for all of it
        part.moved = part.passed = part.streamed = 0.0
        part.operations.clear()
    chains = {
        (i.opcode, chain[1], channel[1])
        for i in program.computations[called].values()
        if i.opcode in COLLECTIVES
        and (chain := re.search(r'\bchain_id="(\d+)"', i.rest))
        and (channel := re.search(r"\bchannel_id=(\d+)", i.rest))
    }
    if chains and chains <= seen_chains:
        for counter in (part.collectives, part.calls, part.groups, part.group_calls):
            counter.clear()
    seen_chains |= chains
    totals.add(part, 1)


def _count_collective(
    instructions: dict[str, Instruction], home: str, instruction: Instruction, kind: str, totals: Executed
) -> None:
    size = sum(a.bytes for o in instruction.operands for a in type_of(instructions, o))
    if kind == "all-reduce" and home.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # as a TPU writes it: each device keeps its part
    members = group_size(instruction)
    share = (members - 1) / members
    out = sum(a.bytes for a in instruction.type)  # a sum may come back in a narrower type
    ring_bytes = {"all-gather": size * (members - 1), "all-reduce": (size + out) * share, "collective-permute": size}
    totals.collectives[kind] += ring_bytes.get(kind, size * share)  # type: ignore[assignment]
    totals.calls[kind] += 1
    totals.groups[members] += ring_bytes.get(kind, size * share)  # type: ignore[assignment]
    totals.group_calls[members] += 1


def group_size(instruction: Instruction) -> int:
    """Count the devices in a collective; 2 for a permutation, whose pairs are not a group.

    Raises:
        HloError: replica groups in a form unknown here.
    """
    if instruction.opcode.startswith("collective-permute"):
        return 2
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", instruction.rest):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", instruction.rest):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", instruction.rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        return math.prod(int(sizes[name.split(":")[0]]) for name in re.findall(r"'([^']+)'", match[2]))
    raise HloError(f"{instruction.name}: replica groups are not understood: {instruction.rest[:200]}")


# --- Matrix products -------------------------------------------------------------------------------------------------


def dot_flops(instruction: Instruction, left: tuple[Array, ...], right: tuple[Array, ...]) -> float:
    """Count 2 * output * contracted sizes."""
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
    axes = [int(i) for i in match[1].split(",") if i] if match else []
    return 2.0 * math.prod(instruction.type[0].sizes) * math.prod(left[0].sizes[i] for i in axes)


def convolution_flops(instruction: Instruction, left: tuple[Array, ...], right: tuple[Array, ...]) -> float:
    """Count a convolution's multiply-adds where window and input meet, times 2: a TPU's form of matrix products.

    Batch axes of a product are spatial axes here, with windows so strided, dilated and padded that only matching
    entries meet; the rest of the window is padding and is not counted.

    Raises:
        HloError: dimension labels are missing.
    """
    labels = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", instruction.rest)
    if labels is None:
        raise HloError(f"{instruction.name}: a convolution without dim_labels")
    into, kernel, out = labels[1], labels[2], labels[3]
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    settings = dict(item.split("=") for item in window[1].split()) if window else {}
    spatial = sorted(c for c in out if c.isdigit())
    batch_groups = re.search(r"batch_group_count=(\d+)", instruction.rest)
    meets = 1
    for i, axis in enumerate(spatial):
        meets *= _meeting_points(
            size=left[0].sizes[into.index(axis)],
            window=right[0].sizes[kernel.index(axis)],
            out=instruction.type[0].sizes[out.index(axis)],
            stride=_per_axis(settings, "stride", i),
            low=_per_axis(settings, "pad", i, default=0),
            dilate=_per_axis(settings, "lhs_dilate", i),
            window_dilate=_per_axis(settings, "rhs_dilate", i),
        )
    rows = left[0].sizes[into.index("b")] // (int(batch_groups[1]) if batch_groups else 1)
    columns, inner = right[0].sizes[kernel.index("o")], right[0].sizes[kernel.index("i")]
    return 2.0 * meets * rows * columns * inner


def _per_axis(settings: dict[str, str], name: str, axis: int, *, default: int = 1) -> int:
    """Return the setting of one spatial axis; of padding, its low end."""
    if name not in settings:
        return default
    return int(settings[name].split("x")[axis].split("_")[0])


@cache
def _meeting_points(*, size: int, window: int, out: int, stride: int, low: int, dilate: int, window_dilate: int) -> int:
    """Return the pairs (output position, window position) that read an entry of the input, not padding or a gap."""
    total = 0
    end = (size - 1) * dilate + 1
    for k in range(window):
        start = k * window_dilate - low
        if dilate == 1:  # o with 0 <= start + o * stride < end
            lowest, highest = max(0, -(start // stride)), (end - 1 - start) // stride
            total += max(0, min(out - 1, highest) - lowest + 1)
        else:
            total += sum(0 <= (at := start + o * stride) < end and at % dilate == 0 for o in range(out))
    return total


# --- Loops -----------------------------------------------------------------------------------------------------------


def loop_trips(program: HloProgram, home: str, loop: Instruction) -> float | None:
    """Return how often the body runs: (bound - start) / step, rounded up; None where the text lacks one of them.

    The condition compares an entry of the carry, perhaps with a constant added, with a constant; it may be joined by
    ``and`` with others, which can only end the loop earlier. Unrolled bodies have a larger step.
    """
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):  # CPUs and GPUs say so
        return float(match[1])
    condition = program.computations[str(loop.called("condition"))]
    body = program.computations[str(loop.called("body"))]
    for compare in (i for i in condition.values() if i.opcode == "compare"):
        if "direction=LT" not in compare.rest or condition[compare.operands[0]].type[0].dtype not in ("s32", "u32"):
            continue
        bound = _constant(condition, compare.operands[1])
        index, ahead = _entry(condition, compare.operands[0])
        if index is None:
            continue
        start = _start(program.computations[home], loop, index)
        if bound is None:
            bound_index, _ = _entry(condition, compare.operands[1])
            bound = None if bound_index is None else _start(program.computations[home], loop, bound_index)
        root = next(i for i in body.values() if i.root)
        step = None
        if root.opcode == "tuple":
            entry, increment = _entry(body, root.operands[index])
            step = increment if entry == index and increment > 0 else None
        if bound is None or start is None or step is None:
            return None
        return float(max(0, -(-(bound - ahead - start) // step)))
    return None


def _start(instructions: dict[str, Instruction], loop: Instruction, index: int) -> int | None:
    initial = instructions.get(loop.operands[0])
    return (
        _constant(instructions, initial.operands[index]) if initial is not None and initial.opcode == "tuple" else None
    )


def _constant(instructions: dict[str, Instruction], name: str) -> int | None:
    source = instructions.get(name)
    while source is not None and source.opcode in ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"):
        source = instructions.get(source.operands[0])
    if source is None or source.opcode != "constant" or not re.fullmatch(r"-?\d+", source.value):
        return None
    return int(source.value)


def _entry(instructions: dict[str, Instruction], name: str) -> tuple[int | None, int]:
    """Return (index, n) of a value that is the carry's entry plus n."""
    source, ahead = instructions.get(name), 0
    while source is not None:
        if source.opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", source.rest)
            return (int(index[1]) if index else None), ahead
        if source.opcode == "add":
            constants = [_constant(instructions, o) for o in source.operands]
            if (constants[0] is None) == (constants[1] is None):
                return None, 0
            ahead += next(n for n in constants if n is not None)
            source = instructions.get(source.operands[constants.index(None)])
        elif source.opcode in ("copy", "bitcast", "convert"):
            source = instructions.get(source.operands[0])
        else:
            return None, 0
    return None, 0


def _branches(instruction: Instruction) -> list[str]:
    if match := re.search(r"branch_computations=\{([^}]*)\}", instruction.rest):
        return [name.strip().lstrip("%") for name in match[1].split(",")]
    return [str(instruction.called("false_computation")), str(instruction.called("true_computation"))]
