"""Write Python and numpy values as strict JSON: it has no NaN and no infinities, so they become null."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float


def to_plain(value: Any) -> Any:
    """Convert a value to types of strict JSON: None for a number that is not finite, lists for tuples and arrays."""
    if isinstance(value, Mapping):
        return {name: to_plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as strict JSON in ASCII: lone surrogates and line separators of model text stay escaped.

    Raises:
        TypeError: it holds anything but numbers, text, lists and dicts.
    """
    return json.dumps(to_plain(value), indent=indent, allow_nan=False)


def number(value: float | int | None) -> float:
    """Read a number back: NaN for null."""
    return math.nan if value is None else float(value)


def numbers(values: Iterable[float | int | None]) -> Float[np.ndarray, "n"]:
    """Read numbers back as an array: NaN for null."""
    return np.array([number(v) for v in values], float)
