"""``oarjax config``: every field of a config with its default, accepted values and meaning, read from its types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from oarjax.config.foreign import NAMES
from oarjax.config.schema import Config
from oarjax.credit.registry import described
from oarjax.errors import ConfigError

Schema = Mapping[str, Any]
"""A JSON schema, as pydantic writes it."""

TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true | false", "null": "null"}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class FieldRow(NamedTuple):
    """One field of a config."""

    path: str  # such as rollout.group_size
    default: str  # as YAML; "required" without one
    accepted: str
    about: str


def field_rows(section: str = "") -> list[FieldRow]:
    """List the fields of a section (all for ""), in the order of the config.

    Raises:
        ConfigError: no such section; suggests the nearest.
    """
    schema = Config.model_json_schema()
    rows = list(_rows(schema, schema, ""))
    matching = [row for row in rows if section in ("", row.path) or row.path.startswith(f"{section}.")]
    if not matching:
        parents = sorted({row.path.rsplit(".", 1)[0] for row in rows if "." in row.path})
        known = NAMES.get(section.rpartition(".")[2])
        nearest = [known] if known else get_close_matches(section, [*parents, *(row.path for row in rows)], n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(f"config: no section or field {section!r}; {hint}sections: {', '.join(parents)}")
    return matching


def show_fields(section: str, *, as_json: bool) -> None:
    """Print the fields of a section as a table or as JSON."""
    rows = field_rows(section)
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, width in (("field", None), ("default", 18), ("accepted", 34), ("meaning", None)):
        table.add_column(name, max_width=width, overflow="fold", no_wrap=name == "field")
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    Console().print(table)
    if any(row.path == "credit.method" for row in rows):
        methods = Table("credit.method", "what it does", box=None, pad_edge=False, header_style="bold")
        for name, about in (described() | {"custom": "the method that credit.function names"}).items():
            methods.add_row(name, about)
        Console().print(methods)


def markdown(rows: list[FieldRow]) -> str:
    """Format fields as a Markdown table."""
    cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines = ["| field | default | accepted | meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| `{path}` | `{default}` | {ok} | {about} |" for path, default, ok, about in cells)])


def _rows(
    schema: Schema, root: Schema, prefix: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[FieldRow]:
    """List the fields of a section; ``defaults`` are those that its parent gives it."""
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        path, section = f"{prefix}{name}", _section(field, root)
        value = defaults.get(name, field.get("default"))
        default = "required" if name in required and name not in defaults else _plain(value)
        if section is None:
            yield FieldRow(path, default, _accepted(field, root), field.get("description", ""))
            continue
        if default == "null":  # a section that may be left out
            yield FieldRow(path, default, "null or a section", field.get("description", ""))
        yield from _rows(section, root, f"{path}.", value if isinstance(value, Mapping) else MappingProxyType({}))


def _section(field: Schema, root: Schema) -> Schema | None:
    """Return the section that a field holds, alone or beside null, or None."""
    for option in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        target = root["$defs"].get(option["$ref"].rsplit("/", 1)[1], {}) if "$ref" in option else {}
        if "properties" in target:
            return target
    return None


def _accepted(field: Schema, root: Schema) -> str:
    """Describe the accepted values of a field."""
    if "$ref" in field:
        return _accepted(root["$defs"][field["$ref"].rsplit("/", 1)[1]], root)
    if options := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(_accepted(option, root) for option in options))
    if "const" in field:
        return str(field["const"])
    if "enum" in field:
        return " | ".join(map(_plain, field["enum"]))
    if "properties" in field:
        return "{" + ", ".join(field["properties"]) + "}"
    if field.get("type") == "array":
        places = field.get("prefixItems")
        return f"[{', '.join(_accepted(item, root) for item in places)}]" if places else _list_of(field, root)
    if field.get("type") == "object":
        return "a mapping"
    bounds = " and ".join(f"{sign} {field[name]:g}" for name, sign in BOUNDS.items() if name in field)
    return " ".join(part for part in (TYPES.get(str(field.get("type")), "any value"), bounds) if part)


def _list_of(field: Schema, root: Schema) -> str:
    return f"a list of {_accepted(field['items'], root)}" if field.get("items") else "a list"


def _plain(value: Any) -> str:
    """Write a value as YAML would."""
    return value if isinstance(value, str) and value else json.dumps(value)
