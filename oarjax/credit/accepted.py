"""Annotations that say which values a setting accepts, beside ``oarjax.rl.ranges``. A config validates by them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from oarjax.credit.record import Role
from oarjax.credit.registry import choices
from oarjax.rl.ranges import Handler, Schema, before


def setting(default: Any, about: str) -> Any:
    """Return a dataclass field with a default and one sentence for the reference of the config."""
    return field(default=default, metadata={"description": about})


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
        return before(self._fields, handler(source))

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


Word = Annotated[str, NotEmpty()]
