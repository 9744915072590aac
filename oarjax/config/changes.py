"""Change the credit section, and turn validation errors into sentences."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from oarjax.config.foreign import NAMES
from oarjax.config.section import fields_of, section_of
from oarjax.credit.settings import CreditSettings
from oarjax.errors import ConfigError

CREDIT = TypeAdapter(CreditSettings)


def changed(credit: CreditSettings, changes: dict[str, Any]) -> CreditSettings:
    """Change some fields of a credit section; nested mappings change fields of its sections.

    Raises:
        ValidationError: a field is unknown, or a value is invalid.
    """

    try:
        return _changed(credit, json.dumps(changes))
    except TypeError:  # a value that JSON has no form for
        return CREDIT.validate_python(_merged(asdict(credit), changes))


@lru_cache(maxsize=1024)
def _changed(credit: CreditSettings, changes: str) -> CreditSettings:
    """Validate each pair once: every config names the lab's methods, most of them the same."""
    return CREDIT.validate_python(_merged(asdict(credit), json.loads(changes)))


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = {
        k: _merged(old[k], v) if isinstance(v, dict) and isinstance(old.get(k), dict) else v for k, v in new.items()
    }
    return old | merged


def explain(error: Any, root: type[Any]) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "config"
    got = f"got {in_yaml(error['input']):.200}"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        section = _section_at(error["loc"][:-1], root)
        accepted = sorted(fields_of(section))
        near = difflib.get_close_matches(str(error["loc"][-1]), accepted, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        if not is_dataclass(section):  # as those of credit are, where a paper's beta is no trainer's
            own_name = NAMES.get(str(error["loc"][-1]))
            hint = hint if own_name is None else f" (here it is {own_name})"
        if ":" in str(error["loc"][-1]):
            hint = " (in YAML a space must follow the colon)"
        return f"  {path}: no such field{hint}; accepted: {', '.join(accepted)}"
    if error["type"] == "missing":
        return f"  {path}: required and missing"
    if error["type"] == "value_error":
        where = f"{path}: " if error["loc"] else ""  # contradictions name their fields
        return "\n".join(f"  {where}{line}" for line in str(error["ctx"]["error"]).splitlines())
    if error["type"] == "tuple_type":
        return f"  {path}: expected a list, such as [{error['input']!s:.100}], {got}"
    if error["type"] in ("model_type", "dataclass_type"):
        first, *names = fields_of(_section_at(error["loc"], root))
        rest_note = f" ({', '.join(names)} may follow)" if names else ""
        return f"  {path}: expected fields, such as {{{first}: {error['input']!s:.100}}}{rest_note}, {got}"
    if error["type"] == "string_type" and isinstance(error["input"], int | float):
        return f"  {path}: expected text, {got}; write it in quotes"
    return f"  {path}: {error['msg']}, {got}"


def in_yaml(value: object) -> str:
    """Return a value as a config spells it: null and true, where Python has None and True; all else as Python does."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _section_at(places: tuple[str | int, ...], root: type[Any]) -> Any:
    section: Any = root
    for part in places:
        section = section_of(section, str(part))
    return section


def explained(error: ValidationError, root: type[Any], *, source: str) -> ConfigError:
    """Turn validation errors of a ``root`` into one error that lists every bad field with the accepted values."""
    errors = error.errors()
    parents = {e["loc"][:-1] for e in errors}  # a list whose items are all bad is not too short as well
    relevant = [e for e in errors if e["type"] != "too_short" or e["loc"] not in parents]
    lines = [line for e in relevant for line in explain(e, root).splitlines()]
    more_line = [f"  and {len(lines) - 20} more"] if len(lines) > 20 else []
    count = "1 bad field" if len(lines) == 1 else f"{len(lines)} bad fields"
    return ConfigError(f"{source}: {count}\n" + "\n".join(lines[:20] + more_line))
