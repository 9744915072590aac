"""Read the rows of a dataset: a built-in task, a local file or saved dataset, or a name on the Hugging Face hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from oarjax.config.inputs import DatasetConfig
from oarjax.data.tasks.arithmetic import arithmetic_rows
from oarjax.data.tasks.forks import forks_rows
from oarjax.data.tasks.stories import stories_rows
from oarjax.data.tasks.turns import calculator_rows, guess_rows
from oarjax.errors import UserError

Row = tuple[str, dict[str, Any]]
"""A row's place (for errors) and its fields."""

Rows = Iterable[Mapping[str, Any]]
"""The rows of a dataset in Python: a list of dicts, or a ``datasets.Dataset``."""

LOCAL = "python:"
_local: dict[str, Rows] = {}

LONGEST = 2**26
"""Bytes of a line, and characters of a CSV field."""


class DataError(UserError, ValueError):
    """Raised for a dataset that cannot be read or holds no usable row; the message ends with the remedy."""


def read_rows(config: DatasetConfig, *, where: str) -> Iterator[Row]:
    """Iterate over the rows of a dataset with all their fields.

    Raises:
        DataError: the source or a package is missing, or a line is damaged.
    """
    if config.source.startswith("builtin:"):
        return _builtin_rows(config, where)
    if config.source.startswith(LOCAL):
        if config.source not in _local:
            argument = config.source.removeprefix(LOCAL)
            raise DataError(
                f"{where}.source: {config.source} are the rows that oarjax.train(cfg, {argument}=...) was given; pass "
                "them again, or set a file or a hub name"
            )
        return _decoded(_local[config.source], config.source)
    path = Path(config.source).expanduser()
    readers: dict[str, Callable[[Path, str], Iterator[Row]]] = {
        ".jsonl": _jsonl_rows,
        ".json": _json_rows,
        ".csv": _csv_rows,
        ".parquet": parquet_rows,
    }
    if path.suffix in readers:
        if not path.is_file():
            raise DataError(f"{where}.source: no file {path}; set the path of an existing {path.suffix} file")
        return readers[path.suffix](path, f"{where}.source")
    if path.is_dir():
        return _saved_rows(config, path, where)
    if path.exists():
        raise DataError(
            f"{where}.source: expected a {', '.join(readers)} file or a folder of Dataset.save_to_disk, got {path}; "
            "convert it to one of these"
        )
    return _hub_rows(config, where)


@contextmanager
def local_rows(argument: str, rows: object) -> Iterator[str]:
    """Make rows of this process a source while the context lasts; yield the source's name.

    Raises:
        DataError: they are not rows, or can be read only once.
    """
    if isinstance(rows, Mapping):  # a DatasetDict too
        some = ", ".join(map(repr, list(rows)[:5]))
        raise DataError(f"{argument}: expected rows, got a {type(rows).__name__} of {some}; pass one of its values")
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable) or isinstance(rows, Iterator):
        kind = type(rows).__name__
        raise DataError(f"{argument}: expected a list of dicts or a datasets.Dataset, got a {kind}; pass list(rows)")
    source = LOCAL + argument
    _local[source] = rows
    try:
        yield source
    finally:
        _local.pop(source, None)


def _builtin_rows(config: DatasetConfig, where: str) -> Iterator[Row]:
    generators: dict[str, tuple[Callable[..., Iterable[dict[str, Any]]], dict[str, Any]]] = {
        "builtin:forks": (forks_rows, config.forks.model_dump()),
        "builtin:stories": (stories_rows, config.stories.model_dump()),
        "builtin:guess": (guess_rows, {}),
        "builtin:calculator": (calculator_rows, config.arithmetic.model_dump()),
        "builtin:arithmetic": (arithmetic_rows, config.arithmetic.model_dump()),
    }
    if config.source not in generators:
        raise DataError(
            f"{where}.source: expected one of {', '.join(generators)}, got {config.source!r}; set one of these"
        )
    generate, settings = generators[config.source]
    try:
        rows = list(generate(config.split, rows=config.limit, **settings))
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    return ((f"{config.source} row {number}", row) for number, row in enumerate(rows))


def _jsonl_rows(path: Path, setting: str) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, LONGEST + 1), b""), start=1):
            if not line.strip():
                continue
            location = f"{path} line {number}"
            if len(line) > LONGEST:
                raise DataError(f"{location}: longer than {LONGEST:,} bytes; is it a file of JSON lines?")
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
                raise DataError(f"{location}: not JSON ({error}); expected one object per line") from None
            if not isinstance(row, dict):
                raise DataError(f"{location}: expected one object per line, got a {type(row).__name__}")
            yield location, row


def _json_rows(path: Path, setting: str) -> Iterator[Row]:
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{setting}: {path} is not JSON ({error}); a file with one object per line is called .jsonl"
        ) from None
    if not isinstance(rows, list):
        raise DataError(f"{setting}: {path}: expected a list of objects, got a {type(rows).__name__}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path} row {number}: expected an object, got a {type(row).__name__}")
        yield f"{path} row {number}", row


def _csv_rows(path: Path, setting: str) -> Iterator[Row]:
    """Iterate over the rows of a CSV file in UTF-8 whose first line names the columns; all values are text."""
    csv.field_size_limit(LONGEST)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.DictReader(file, strict=True)
        try:
            names = list(lines.fieldnames or ())
            if not names:
                raise DataError(f"{path}: no first line with names of columns; expected one, such as question,answer")
            if len(set(names)) < len(names):
                raise DataError(f"{path}: its first line names the columns {names}; expected each name once")
            for row in lines:
                location = f"{path} line {lines.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"{location}: expected {len(names)} values, one per column; quote those with commas"
                    )
                yield location, row
        except csv.Error as error:
            raise DataError(
                f"{path} line {lines.line_num + 1}: not CSV ({error}); close every quote, and double one within a value"
            ) from None
        except UnicodeDecodeError as error:  # the text is decoded in blocks, ahead of its lines
            raise DataError(f"{path}: not CSV in UTF-8 ({error.reason}); save it as CSV in UTF-8") from None


def parquet_rows(path: Path, setting: str) -> Iterator[Row]:
    """Iterate over the rows of a Parquet file; errors name the ``setting`` that its path comes from.

    Raises:
        DataError: pyarrow is missing, or cannot read the file.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"{setting}: reading {path} needs pyarrow; install oarjax[hub], or convert it to .jsonl"
        ) from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise DataError(f"{path}: not readable as Parquet after {number} rows ({error})") from None


def _saved_rows(config: DatasetConfig, folder: Path, where: str) -> Iterator[Row]:
    datasets = _datasets(config, where)
    try:
        dataset = datasets.load_from_disk(str(folder))
    except Exception as error:  # FileNotFoundError for other folders; damaged ones raise errors of their own
        raise DataError(
            f"{where}.source: cannot read the folder {folder} as a saved dataset ({type(error).__name__}: {error}); "
            "expected one of Dataset.save_to_disk, or a file"
        ) from error
    if isinstance(dataset, dict):  # one dataset per split
        if config.split not in dataset:
            raise DataError(f"{where}.split: {folder} has no split {config.split!r}; set one of {', '.join(dataset)}")
        dataset = dataset[config.split]
    return _decoded(dataset, str(folder))


def _hub_rows(config: DatasetConfig, where: str) -> Iterator[Row]:
    datasets = _datasets(config, where)
    try:
        dataset = datasets.load_dataset(config.source, config.name, split=config.split, revision=config.revision)
    except Exception as error:  # offline, unknown, gated, bad configuration or split: each has its own type
        raise DataError(
            f"{where}.source: cannot load {config.source!r} (name {config.name!r}, split {config.split!r}, revision "
            f"{config.revision!r}) from the hub: {type(error).__name__}: {error}. Check these fields and the network, "
            "or set a .jsonl or .parquet file"
        ) from error
    return _decoded(dataset, config.source)


def _decoded(dataset: Iterable[Any], source: str) -> Iterator[Row]:
    """Iterate over a dataset whose columns decode only now, such as pictures; no row is trusted."""
    number, rows = 0, iter(dataset)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # every kind of column has its own
            raise DataError(
                f"{source} row {number}: cannot be read ({type(error).__name__}: {error!s:.200}); set another dataset, "
                "or a .jsonl or .parquet file with the columns that are needed"
            ) from error
        if not isinstance(row, Mapping):
            raise DataError(
                f"{source} row {number}: expected a mapping of columns to values, got a {type(row).__name__}; of a "
                'DataFrame pass frame.to_dict("records")'
            )
        yield f"{source} row {number}", dict(row)
        number += 1


def _datasets(config: DatasetConfig, where: str) -> Any:
    """Import the package datasets.

    Raises:
        DataError: it is not installed.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        kind = "is a folder" if Path(config.source).expanduser().is_dir() else "is not a local file"
        raise DataError(
            f"{where}.source: {config.source!r} {kind}, and reading it needs the package datasets; install "
            "oarjax[hub], or set a .jsonl, .json, .csv or .parquet file"
        ) from None
    return datasets
