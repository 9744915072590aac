"""Ranges of numbers: of settings, which a config validates, and of arguments, which ``oarjax.rl.checked`` checks.

Importing this imports neither JAX nor pydantic. Pydantic asks an annotation for its schema by name; schemas are dicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

Schema = dict[str, Any]
Handler = Callable[[Any], Any]
"""Pydantic's own schema of a type."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number, which true and false are not."""

    ge: int | float | None = None
    gt: int | float | None = None
    le: int | float | None = None

    def __contains__(self, value: float) -> bool:
        low = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        return low and (self.le is None or value <= self.le) and not math.isnan(value)

    def of(self, noun: str, *, whole: bool) -> str:
        """Describe a number in the range, such as "a number in (0, 1]"; the least of whole numbers is one of them."""
        low, above = (self.ge, False) if self.gt is None else (self.gt, True)
        if low is None:
            return noun
        if self.le is not None:
            return f"{noun} in {'(' if above else '['}{low:g}, {self.le:g}]"
        return f"{noun} >= {low + above:g}" if whole or not above else f"{noun} > {low:g}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Schema:
        return before(a_number, handler(source) | {name: n for name, n in vars(self).items() if n is not None})


def before(check: Callable[[Any], Any], schema: Any) -> Schema:
    """Return the schema of values that pass through ``check`` first."""
    return {"type": "function-before", "function": {"type": "no-info", "function": check}, "schema": schema}


def a_number(value: Any) -> Any:
    """Refuse true and false for a number, which Python takes for 1 and 0; YAML reads yes, no, on and off so.

    Raises:
        ValueError: it is one of them.
    """
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


Positive = Annotated[int, Range(gt=0)]
Count = Annotated[int, Range(ge=0)]
Rate = Annotated[float, Range(ge=0)]
Share = Annotated[float, Range(ge=0, le=1)]
PositiveShare = Annotated[float, Range(gt=0, le=1)]
PositiveFloat = Annotated[float, Range(gt=0)]
