"""Annotations that say which values a setting accepts. A config validates by them; here nothing is imported for it.

Pydantic asks an annotation for its schema by name, and schemas are plain dicts: settings need not know who validates.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from oarjax.credit.record import Role
from oarjax.credit.registry import choices

Schema = dict[str, Any]
Handler = Callable[[Any], Any]
"""Pydantic's own schema of a type."""


def setting(default: Any, about: str) -> Any:
    """Return a dataclass field with a default and one sentence for the reference of the config."""
    return field(default=default, metadata={"description": about})


def _before(check: Callable[[Any], Any], schema: Any) -> Schema:
    return {"type": "function-before", "function": {"type": "no-info", "function": check}, "schema": schema}


@dataclass(frozen=True)
class Range:
    """Bounds of a number, which true and false are not."""

    ge: int | float | None = None
    gt: int | float | None = None
    le: int | float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Schema:
        return _before(a_number, handler(source) | {name: n for name, n in vars(self).items() if n is not None})


def a_number(value: Any) -> Any:
    """Refuse true and false for a number, which Python takes for 1 and 0; YAML reads yes, no, on and off so.

    Raises:
        ValueError: it is one of them.
    """
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


@dataclass(frozen=True)
class NotEmpty:
    """A text or list of at least one character or entry."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Schema:
        return handler(source) | {"min_length": 1}


@dataclass(frozen=True)
class Preset:
    """A section that may also be the name of a preset of its fields."""

    presets: Mapping[str, Mapping[str, Any]] = field(hash=False)

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Schema:
        return _before(self._fields, handler(source))

    def _fields(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in self.presets:
            raise ValueError(f"expected fields, or one of the presets {', '.join(self.presets)}, got {value!r}")
        return self.presets[value]


class MethodName:
    """The name of a built-in method that may stand in the field ``role``, or one of ``others``.

    The records are read when a field is validated.
    """

    def __init__(self, role: Role | None, *others: str) -> None:
        self._role: Role | None = role
        self._others = others

    def _accepted(self) -> list[str]:
        return [*choices(self._role), *self._others]

    def _check(self, name: str) -> str:
        accepted = self._accepted()
        if self._role is None and name == "own":
            raise ValueError("own was renamed to custom; set custom")
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"expected one of {', '.join(accepted)}, got {name!r}{hint}")
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Schema:
        check = {"type": "no-info", "function": self._check}
        return {"type": "function-after", "function": check, "schema": handler(source)}

    def __get_pydantic_json_schema__(self, schema: Any, handler: Handler) -> Schema:
        return {"enum": self._accepted()}


Positive = Annotated[int, Range(gt=0)]
Count = Annotated[int, Range(ge=0)]
Rate = Annotated[float, Range(ge=0)]
Share = Annotated[float, Range(ge=0, le=1)]
Word = Annotated[str, NotEmpty()]
