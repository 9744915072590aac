"""Write Python values and arrays as strict JSON: it has no NaN and no infinities, so they become null.

Importing this imports neither numpy nor JAX: configs check their settings with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any


def to_plain(value: Any) -> Any:
    """Convert a value to types of strict JSON: None for a number that is not finite, lists for tuples and arrays."""
    if isinstance(value, Mapping):
        return {name: to_plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as strict JSON in ASCII: lone surrogates and line separators of model text stay escaped.

    Raises:
        TypeError: it holds anything but numbers, text, lists and dicts.
    """
    try:  # converting first takes twice as long as writing
        return json.dumps(value, indent=indent, allow_nan=False)
    except (TypeError, ValueError):  # arrays, or numbers that are not finite
        return json.dumps(to_plain(value), indent=indent, allow_nan=False)


def storable(value: Any) -> bool:
    """Return whether all numbers of a value are ones that JSON has."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        return False
    return True


def plain_floats(values: Iterable[float]) -> list[float | str | None]:
    """Convert to numbers that JSON has, all told apart: NaN becomes null, an overflow "inf" or "-inf"."""
    return [v if math.isfinite(v) else None if math.isnan(v) else str(v) for v in values]


def number(value: float | int | str | None) -> float:
    """Read a number back: NaN for null."""
    return math.nan if value is None else float(value)


def numbers(values: Iterable[float | int | str | None]) -> list[float]:
    """Read back what ``plain_floats`` or ``to_plain`` made of numbers."""
    return [number(v) for v in values]
