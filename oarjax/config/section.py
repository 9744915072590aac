"""Build sections of a config: the base class, kinds of values, and what fields a section has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from oarjax.rl.ranges import a_number
from oarjax.system.json import storable

LARGEST = 2**31 - 1
"""Of whole numbers: sizes and counts become 32-bit integers of arrays and of loops."""


def _countable(size: int) -> int:
    if size > LARGEST:
        raise ValueError(f"expected at most {LARGEST}")
    return size


Positive = Annotated[int, Field(gt=0), AfterValidator(_countable)]
Count = Annotated[int, Field(ge=0), AfterValidator(_countable)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[str, Field(min_length=1)]


def _finite_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Refuse numbers that a run's config could not give back: strict JSON has no NaN and no infinity."""
    for name, value in settings.items():
        if not storable(value):
            raise ValueError(f"{name}: expected finite numbers, got {value!r:.60}; set a finite one")
    return settings


Settings = Annotated[dict[str, Any], AfterValidator(_finite_settings)]
"""Keyword arguments of somebody's function."""


def _axis_size(size: int) -> int:
    if size < 1 and size != -1:
        raise ValueError(f"expected a positive number of devices, or -1 for all remaining ones, got {size}")
    return _countable(size)


AxisSize = Annotated[int, AfterValidator(_axis_size)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_by_mistake(cls, value: Any, info: Any) -> Any:
        """Read true and false as the words on and off where these are choices, and refuse them for a number.

        YAML reads yes, no, on and off as true and false, and Python takes these for 1 and 0.
        """
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and (word := "on" if value else "off") in _choices(annotation):
            return word
        kinds = _kinds(annotation)
        return a_number(value) if kinds & {int, float} and bool not in kinds and str not in kinds else value


def changed(section: Any, **changes: Any) -> Any:
    """Return a config section with changed fields, validated again."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    return type(section)(**(fields | changes))


def _kinds(annotation: Any) -> set[Any]:
    """Collect the plain types of an annotation; those of Literal values count as str."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return {str}
    return set().union(*map(_kinds, inner)) if inner else {annotation}


def _choices(annotation: Any) -> set[Any]:
    """Collect the choices of an annotation."""
    inner = get_args(annotation)
    return set(inner) if get_origin(annotation) is Literal else set().union(*map(_choices, inner))


def fields_of(section: Any) -> dict[str, Any]:
    """Return the annotations of a section's fields by name; none of what is not a section."""
    if isinstance(section, type) and is_dataclass(section):
        hints = get_type_hints(section)
        return {field.name: hints[field.name] for field in fields(section)}
    return {name: field.annotation for name, field in getattr(section, "model_fields", {}).items()}


def section_of(section: Any, name: str) -> Any:
    """Return the class of a section's field; None if it is not a section."""
    if name not in fields_of(section):
        return section if name.isdigit() else None
    annotation = fields_of(section)[name]
    return next((c for c in (annotation, *get_args(annotation)) if fields_of(c)), None)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one dict with dotted paths."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix else name
        flat |= flatten(value, path) if isinstance(value, Mapping) else {path: value}
    return flat
