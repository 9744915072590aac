"""Read a YAML file with ``key.sub=value`` overrides, and validate it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oarjax.config.changes import explained
from oarjax.config.schema import Config
from oarjax.config.section import flatten
from oarjax.config.shipped import shipped_config
from oarjax.errors import ConfigError
from oarjax.system.paths import special_kind
from oarjax.system.yaml_tree import LONGEST, YamlError, read_yaml


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file, apply overrides and validate.

    Args:
        path: of a file, or the name of a shipped config, such as ``demo``.
        overrides: ``key.sub=value``, values in YAML; default ().

    Raises:
        ConfigError: the file is missing or not YAML, an override has no ``=`` or no such parent, or fields are invalid;
            one message lists all invalid fields.
    """
    return parse_config(read_tree(path, overrides), source=str(path))


def read_tree(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> dict[str, Any]:
    """Read the fields of a YAML file with ``key.sub=value`` overrides applied, not validated.

    Raises:
        ConfigError: the file is missing or not YAML, or an override has no ``=`` or no such parent.
    """
    path = find_config(path)
    if (kind := special_kind(path)) and not str(path).startswith(("/dev/", "/proc/")):  # of a shell: <(...)
        raise ConfigError(f"config {path}: expected a file, got {kind}; pass the config's file")
    try:
        with path.open(encoding="utf-8") as file:
            tree = read_yaml(file.read(LONGEST + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: cannot be read: {error}") from None
    except YamlError as error:
        raise ConfigError(f"config {path}: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config {path}: expected a mapping of fields, got {type(tree).__name__}")
    for override in overrides:
        apply_override(tree, override)
    return tree


def find_config(path: str | Path) -> Path:
    """Return the path if it exists, else the shipped config of that name (``demo`` or ``configs/demo.yaml``).

    Raises:
        ConfigError: neither exists; suggests the shipped config with the nearest name.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        return path
    return shipped_config(path)


def parse_config(tree: dict[str, Any], *, source: str = "config") -> Config:
    """Validate a nested dict."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise explained(error, Config, source=source) from None


FILE_FIELDS = ("source", "plugins", "function", "marks")
"""Last names of the fields that may name a file of data or of Python."""

FILE = re.compile(r"(.+\.(?:jsonl|json|csv|parquet|py))(?::\w+)?")


def check_files(tree: dict[str, Any]) -> None:
    """Check that the local files of data and code that a config's fields name exist, before minutes of work.

    Raises:
        ConfigError: one is missing; names the field.
    """
    for field, value in flatten(tree).items():
        for text in value if isinstance(value, list) else [value]:
            match = FILE.fullmatch(text) if isinstance(text, str) else None
            if match and field.rpartition(".")[2] in FILE_FIELDS and not Path(match[1]).expanduser().is_file():
                raise ConfigError(f"{field}: no file {match[1]}; set the path of an existing file")


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set the field of a nested dict that ``key.sub=value`` names, creating sections on the way."""
    key, sep, text = override.partition("=")
    if not sep:
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    try:
        value = read_yaml(text)
    except YamlError:
        raise ConfigError(
            f"override {override!r:.200}: the value is not valid YAML; quote it for YAML too, as in '{key}=\"...\"'"
        ) from None
    *parents, leaf = key.split(".")
    for name in parents:
        if tree.get(name) is None:
            tree[name] = {}
        tree = tree[name]
        if not isinstance(tree, dict):
            raise ConfigError(
                f"override {override!r}: {name} is a value ({tree!r}) and has no field {leaf}; set the fields of "
                f"{name} instead"
            )
    tree[leaf] = value
