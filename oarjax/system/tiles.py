"""The order of a slice's chips in which neighbours are near each other, by their physical coordinates.

Every aligned group of 4 is a 2 x 2 tile, a ring without wrapped links and on one host; every aligned group of 8 is two
tiles side by side (or one above the other, in a slice two chips wide), where chips are stacked a cube. A group that
shares a copy of the policy while sampling (``rollout.tensor`` consecutive devices) adds up its states in every layer of
every token, so it should be such a tile; what the whole slice sends does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Place = tuple[int, ...]


def compact_order(devices: Sequence[Any]) -> list[Any] | None:
    """Return the devices of one slice tile by tile; None for a slice without coordinates or of another shape.

    Flat slices (v5e, v6e) go row by row; stacked ones (v4, v5p) go up one 2 x 2 column and down the next.
    """
    chips: dict[Place, list[Any]] = {}
    for device in devices:
        if not hasattr(device, "coords"):
            return None
        chips.setdefault(tuple(device.coords), []).append(device)
    corner = [min(coords[i] for coords in chips) for i in range(3)]
    sides = [max(coords[i] for coords in chips) - corner[i] + 1 for i in range(3)]
    if len(chips) != sides[0] * sides[1] * sides[2]:
        return None
    path = flat_path(sides[0], sides[1]) if sides[2] == 1 else column_path(*sides)
    if path is None:
        return None
    places = [tuple(c + x for c, x in zip(corner, (*coords, 0)[:3])) for coords in path]
    return [d for coords in places for d in sorted(chips[coords], key=lambda d: getattr(d, "core_on_chip", 0))]


def flat_path(width: int, height: int) -> list[Place] | None:
    """Return the places (x, y) of a rectangle of 2 x 2 tiles, row by row, as the chips within each tile.

    Chips at the same position of their groups of 2, 4 or 8 then form a grid. Where they do not (tiles to and fro,
    Hilbert's curve), the TPU's compiler fails on v5e: it finds no routes for collectives between the groups.
    """
    if width % 2 or height % 2:
        return None
    tile = [(0, 0), (1, 0), (0, 1), (1, 1)]
    return [(x + i, y + j) for y in range(0, height, 2) for x in range(0, width, 2) for i, j in tile]


def column_path(width: int, depth: int, height: int) -> list[Place] | None:
    """Return the places (x, y, z) of a block, column after column of 2 x 2 chips."""
    if width % 2 or depth % 2:
        return None
    tile = [(0, 0), (1, 0), (1, 1), (0, 1)]
    path = []
    for number, (x, y) in enumerate(_snake(width // 2, depth // 2)):
        up = number % 2 == 0
        for layer, z in enumerate(range(height) if up else reversed(range(height))):
            path += [(2 * x + i, 2 * y + j, z) for i, j in (tile if layer % 2 == 0 else reversed(tile))]
    return path


def _snake(width: int, depth: int) -> Iterator[tuple[int, int]]:
    for x in range(width):
        yield from ((x, y) for y in (range(depth) if x % 2 == 0 else reversed(range(depth))))
