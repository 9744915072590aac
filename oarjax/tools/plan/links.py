"""Links between chips that a collective can use: rings and lines among the chips of its group, by their coordinates.

Which sides of a slice are closed to a ring is the vendor's word: v4 and v5p slices of whole 4 x 4 x 4 cubes are full
tori (cloud.google.com/tpu/docs/v5p), of v5e and v6e the sides of 16, a pod's (jax-ml.github.io/scaling-book/tpus). Any
other side is a line; a ring goes around a block of chips all the same, if two of its sides are longer than 1. v7x is
taken to close its sides as v5p does; its chips have two devices, which share the chip's links and are joined by one six
times as fast (cloud.google.com/tpu/docs/tpu7x).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from oarjax.costs import Number
from oarjax.tools.plan.topology import Slice

POD_SIDE = 16  # of v5e and v6e
CUBE_SIDE = 4  # of v4, v5p and v7x
WITHIN = 6  # links that the one between the two devices of a chip is as fast as

Place = tuple[int, ...]


@dataclass(frozen=True)
class Ways:
    """Links that a group of chips sends over. Fewer than 1 link: messages pass other chips, and share links."""

    ring: Number  # links that a chip sends over in one ring (2) or line (1)
    every: Number  # the same with all sides at work at once
    hops: int  # links that the farthest message passes


def closed_sides(where: Slice) -> tuple[bool, ...]:
    """Say of each side of a slice whether its last chip is linked with its first."""
    sides = [int(side) for side in where.shape.split("x")]
    if len(sides) == 2:
        return tuple(side == POD_SIDE for side in sides)
    return (all(side % CUBE_SIDE == 0 for side in sides),) * len(sides)


def ways_of(places: Sequence[Place], *, sides: Sequence[int], closed: Sequence[bool], devices: int = 1) -> Ways:
    """Find the ways of one group of chips: a block of the slice, or a block with equal gaps. Others count as a line.

    Of a chip's ``devices`` as many are in the group as its place occurs; other groups share the links with the rest.
    """
    group, places = len(places), sorted(set(places))
    if len(places) == 1:
        return Ways(ring=WITHIN, every=WITHIN, hops=1)
    shared = max(devices * len(places) // group, 1)
    axes = [sorted(set(axis)) for axis in zip(*places, strict=True)]
    gaps = [{b - a for a, b in itertools.pairwise(axis)} for axis in axes]
    if math.prod(len(axis) for axis in axes) != len(places) or any(len(gap) > 1 for gap in gaps):
        return Ways(ring=1 / shared, every=1 / shared, hops=len(places) - 1)
    spans = []
    for axis, gap, side, closes in zip(axes, gaps, sides, closed, strict=True):
        if len(axis) > 1:
            (step,) = gap
            spans.append((len(axis), step, closes and len(axis) > 2 and len(axis) * step == side))
    load = max(step for _, step, _ in spans) * shared
    ring = 2 if any(looped for *_, looped in spans) or (len(spans) > 1 and len(places) % 2 == 0) else 1
    every = sum(2 if looped else 1 for *_, looped in spans)
    hops = sum(step * (n // 2 if looped else n - 1) for n, step, looped in spans)
    return Ways(ring=ring / load, every=max(ring, every) / load, hops=hops)


def link_table(mesh: Mesh, where: Slice) -> dict[int, Ways]:
    """Return the ways of collectives over every choice of a mesh's axes, by the number of devices in a group.

    Of choices of the same number that of the inner axes counts. Groups across slices are left out: their network is no
    link.
    """
    sides, closed = [int(side) for side in where.shape.split("x")], closed_sides(where)
    inner_first = [name for name, size in mesh.shape.items() if size > 1][::-1]
    table: dict[int, Ways] = {}
    for count in range(1, len(inner_first) + 1):
        for names in itertools.combinations(inner_first, count):
            groups = [g for g in groups_of(mesh, names) if len({getattr(d, "slice_index", 0) for d in g}) == 1]
            devices = where.devices // where.chips
            places = [[tuple(d.coords)[: len(sides)] for d in group] for group in groups]
            ways = [ways_of(group, sides=sides, closed=closed, devices=devices) for group in places]
            if ways:  # of groups that lie differently the slowest counts
                table.setdefault(len(groups[0]), min(ways, key=lambda w: (w.ring, -w.hops)))
    return table


def groups_of(mesh: Mesh, names: Sequence[str]) -> list[list[Any]]:
    """Divide a mesh's devices into the groups of a collective over the chosen axes."""
    axes = sorted(mesh.axis_names.index(name) for name in names)
    other_axes = [i for i in range(mesh.devices.ndim) if i not in axes]
    size = math.prod(mesh.devices.shape[i] for i in axes)
    return [list(group) for group in mesh.devices.transpose(*other_axes, *axes).reshape(-1, size)]


def collective_seconds(
    sent: Mapping[int, Number], calls: Mapping[int, Number], ways: Mapping[int, Ways], *, link: Number, hop: Number
) -> float:
    """Estimate the seconds of collectives one after another, each over one ring or line of its group.

    Args:
        sent: devices of a group -> bytes that a device sends.
        calls: the same -> collectives. Each takes ``hop`` seconds per link that its farthest message passes.
        link: bytes per second, one way over one link.
    """
    line = Ways(ring=1, every=1, hops=1)
    total = 0.0
    for members, size in sent.items():
        way = ways.get(members, line)
        total += size / (way.ring * link) + calls.get(members, 0.0) * way.hops * hop
    return total
