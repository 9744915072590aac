"""Keep a study's finished runs in one small file: a line each, with the commit that it ran from.

A line stands for a run as long as the study sets the same fields for it (its digest). Run folders may then go, and the
study resumes from the file alone, in another checkout or on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from oarjax.errors import UserError
from oarjax.storage.durable import cannot_read, storage_errors
from oarjax.system.json import to_plain


class RecordsError(UserError, ValueError):
    """Raised for a file of records that cannot be read."""


def read_records(path: Path | None) -> dict[str, dict[str, Any]]:
    """Read a file's runs by digest, the last of equals; none without the file.

    Raises:
        RecordsError: a line is not a record.
        StorageError: the file cannot be read.
    """
    try:
        stat = None if path is None else path.stat()
        return {} if path is None or stat is None else _read(path, stat.st_mtime_ns, stat.st_size)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise cannot_read(Path(str(path)), error) from error


@lru_cache(maxsize=8)
def _read(path: Path, _changed: int, _size: int) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(line)
            measures = {name: _measure(value) for name, value in record["measures"].items()}
            out[record["digest"]] = {**record, "measures": measures}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RecordsError(
                f"records: line {number} of {path} is not a run; remove the line, and the study runs it again"
            ) from None
    return out


def _measure(value: Any) -> int | float | list[tuple[float, float]] | None:
    """Read a number, null, or a list of pairs of numbers.

    Raises:
        ValueError, TypeError: it is something else.
    """
    return value if isinstance(value, int | float | None) else [(float(a), float(b)) for a, b in value]


def add_records(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append runs to a file of records; numbers keep six digits.

    Raises:
        StorageError: the file cannot be written.
    """
    text = "".join(json.dumps(_short(to_plain(record))) + "\n" for record in records)
    if text:
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(text)


def _short(tree: Any) -> Any:
    """Round floats to six significant digits."""
    if isinstance(tree, dict):
        return {name: _short(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_short(value) for value in tree]
    return float(f"{tree:.6g}") if isinstance(tree, float) else tree
