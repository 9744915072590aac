"""One colour per method in every plot and page, and dashes or markers for what shares a colour."""

from __future__ import annotations

from collections.abc import Sequence

LIGHT = ("#0072b2", "#c24e00", "#00805c", "#a8437f", "#2a86c0", "#9a6a00", "#5b6470", "#7b4fb5")
"""Colours on a light background, to which each has a contrast of at least 3."""
DARK = ("#56b4e9", "#f0803c", "#2fc79b", "#e08fc4", "#9ad6f7", "#e6b035", "#aab4c0", "#b79be8")
"""The same on a dark background."""
DASHES = ("-", "--", "-.", ":")
SVG_DASHES = ("none", "7 4", "9 3 2 3", "2 4")
"""Dashes of the first, second, ... line of a colour; for matplotlib and for SVG."""

FAMILIES = (
    ("permut", 5),
    ("screen", 6),
    ("grpo", 0),
    ("uniform", 0),
    ("oar-g", 1),
    ("oar-p", 2),
    ("oar-f", 3),
    ("oar-l", 7),
    ("entropy", 4),
)
"""Words in a method's name and its colour; the first that matches counts."""


def styles(names: Sequence[str]) -> list[tuple[int, int]]:
    """Return (colour, number among the names of that colour) for each name; that of a known method is fixed."""
    fixed = [next((colour for word, colour in FAMILIES if word in name.lower()), None) for name in names]
    free = [c for c in range(len(LIGHT)) if c not in fixed] + [c for c in range(len(LIGHT)) if c in fixed]
    colours, unnamed = [], 0
    for colour in fixed:
        if colour is None:
            colour, unnamed = free[unnamed % len(free)], unnamed + 1
        colours.append(colour)
    return [(colour, colours[:i].count(colour)) for i, colour in enumerate(colours)]
