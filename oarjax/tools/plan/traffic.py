"""Bytes of HBM that one instruction of a compiled program reads and writes.

Operands and results count once each where they lie in HBM; what the compiler keeps on the chip is free. Of an array
that is only sliced, the slices count; of one that is updated in place, the part that is written. Elementwise passes
over logits and copies into another layout show here, and nowhere in the FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from oarjax.costs import Number
from oarjax.kernels.attention_tangent import NAME as TANGENT
from oarjax.kernels.decode_attention import NAME as DECODE
from oarjax.kernels.splash import block_of
from oarjax.models.delta_kernel import NAME as DELTA
from oarjax.tools.plan.hlo_text import Array, HloProgram, Instruction, type_of

FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "opt-barrier", "iota", "rng-get-and-update-state", "add-dependency", "domain",
}  # fmt: skip
"""Names, and instructions whose inside is counted for itself."""

SLICES = {"dynamic-slice", "slice", "gather"}


def hbm_bytes(
    program: HloProgram, instructions: dict[str, Instruction], instruction: Instruction, *, slots: Number | None = None
) -> float:
    """Count the bytes that an instruction outside fusions moves between HBM and the chip.

    ``slots``: those that a decode kernel reads of each row's own cache; None: all.
    """
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done"):
        return 0.0
    if opcode == "fusion" and (called := instruction.called("calls")):
        return _fusion(program, program.computations[called], instruction)
    if opcode in SLICES:
        return 2 * _far(instruction.type)
    if opcode.removesuffix("-start") in SLICES:  # its type is its operands again, its result, and a semaphore
        part = instruction.type[len(instruction.operands)]
        return part.bytes * (bool(_far(type_of(instructions, instruction.operands[0]))) + (part.space == 0))
    if opcode == "dynamic-update-slice":
        return 2 * _far(type_of(instructions, instruction.operands[1]))
    operands = [type_of(instructions, name) for name in instruction.operands]
    bytes_read = sum(map(_far, operands))
    if opcode == "custom-call" and instruction.name.startswith(DECODE):  # copies of its own, of one layer's rows
        caches = [array for array in operands if len(array[0].sizes) == 5]
        rows, (layers, _, size, _, length) = operands[-len(caches) - 1][0].sizes[1], caches[0][0].sizes
        part = rows / size / layers * (slots / length if slots and instruction.name.startswith(f"{DECODE}_rows") else 1)
        bytes_read -= (1 - part) * sum(map(_far, caches))
    if opcode == "custom-call" and TANGENT in instruction.name:
        bytes_read = _read_by_tangent(operands)
    if opcode == "custom-call" and instruction.name.startswith(DELTA):  # in place, one layer of all states
        states = operands[-1]
        return bytes_read + _far(instruction.type) - 2 * (1 - 1 / states[0].sizes[0]) * _far(states)
    # A start's type is its result, its operands again, and its semaphores.
    results = instruction.type[:1] if opcode.endswith("-start") else instruction.type
    return bytes_read + _far(results)


def _read_by_tangent(operands: Sequence[tuple[Array, ...]]) -> float:
    """Count what the grid of ``device_tangent`` copies, whose pairs of blocks are the size of its first operand.

    A head reads its queries once, and a block of keys for every block of queries that sees it. What all draws share is
    read for each of them.
    """
    (pairs,), q, k, v, *ids, out, dq, dk, dv = operands
    (*heads, _, width), keys = dq[0].sizes, dk[0].sizes[-2]
    draws, block = math.prod(dq[0].sizes) / math.prod(q[0].sizes), block_of(keys)
    elements = math.prod(heads) * pairs.sizes[-1] * block * width if keys > block else math.prod(dk[0].sizes)
    repeats = elements / math.prod(dk[0].sizes)
    shared, per_draw = _far((*q, *out)) + repeats * _far((*k, *v)), _far(dq) + repeats * _far((*dk, *dv))
    return sum(map(_far, ids)) + draws * shared + per_draw


def _fusion(program: HloProgram, body: dict[str, Instruction], instruction: Instruction) -> float:
    """Count the parameters of a fusion as far as they are read, and its results as far as they are written."""
    users = _users(body)
    root = next(i for i in body.values() if i.root)
    results = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    updates = {name for r in results if (name := _updated(body, r)) is not None}
    total = 0.0
    for inner in body.values():
        if inner.opcode == "parameter" and inner.name not in updates and _far(inner.type):
            total += _read(program, users, inner)
    result_types = instruction.type if len(results) == len(instruction.type) else ()
    for at, result in enumerate(results):
        array = result_types[at : at + 1] or result.type
        if _updated(body, result) is None:
            total += _far(array)
        elif _far(array):
            total += _size(_through(body, result, "dynamic-update-slice", part=1).type)
    return total


def _users(body: dict[str, Instruction]) -> dict[str, list[Instruction]]:
    """List who reads each value."""
    users: dict[str, list[Instruction]] = {}
    for user in body.values():
        for name in user.operands:
            users.setdefault(name, []).append(user)
    return users


def _read(program: HloProgram, users: dict[str, list[Instruction]], parameter: Instruction) -> float:
    """Count what a fusion reads of a parameter: the slices, also those that fusions within it take, or all of it."""
    total, full_size = 0.0, _size(parameter.type)
    readers = _readers(users, parameter.name)
    for reader, name in readers:
        if reader.opcode in SLICES and reader.operands[0] == name:
            total += _size(reader.type)
        elif reader.opcode == "fusion" and (called := reader.called("calls")):
            body = program.computations[called]
            if _through(body, next(i for i in body.values() if i.root), "parameter").opcode == "parameter":
                total += _read(program, users, reader)  # in another layout: as far as that is read
                continue
            inner_users = _users(body)
            places = [at for at, operand in enumerate(reader.operands) if operand == name]
            parameters = [p for p in body.values() if p.opcode == "parameter" and int(p.value) in places]
            total += sum(_read(program, inner_users, p) for p in parameters)
        else:
            return full_size
    return min(total, full_size) if readers else full_size


def _updated(body: dict[str, Instruction], result: Instruction) -> str | None:
    """Return the parameter that a result is, but for a part that was written; None for other results."""
    at = _through(body, result, "dynamic-update-slice")
    if at.opcode != "dynamic-update-slice":
        return None
    base = _through(body, body[at.operands[0]], "parameter")
    return base.name if base.opcode == "parameter" else None


def _through(body: dict[str, Instruction], at: Instruction, opcode: str, *, part: int | None = None) -> Instruction:
    """Follow bitcasts and copies up to an instruction, or further to one of its operands."""
    while at.opcode != opcode and at.opcode in ("bitcast", "copy", "convert", "reshape"):
        at = body[at.operands[0]]
    return at if part is None or at.opcode != opcode else body[at.operands[part]]


def _readers(users: dict[str, list[Instruction]], name: str) -> list[tuple[Instruction, str]]:
    """List who reads a value, through bitcasts, with the name that it has there."""
    readers: list[tuple[Instruction, str]] = []
    for reader in users.get(name, []):
        readers += _readers(users, reader.name) if reader.opcode == "bitcast" else [(reader, name)]
    return readers


def _far(arrays: Sequence[Array]) -> float:
    return sum((a.bytes for a in arrays if a.space == 0), 0.0)


def _size(arrays: Sequence[Array]) -> float:
    return sum((a.bytes for a in arrays), 0.0)
