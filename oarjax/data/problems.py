"""Load problems and their answers from a built-in task, JSON lines, Parquet or a Hugging Face dataset."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from oarjax.config.inputs import DatasetConfig
from oarjax.data.tasks.arithmetic import MARKER, SIZES, arithmetic_rows
from oarjax.data.tasks.forks import forks_rows
from oarjax.data.tasks.stories import stories_rows
from oarjax.errors import UserError

Row = tuple[str, dict[str, Any]]
"""A row's place (for errors) and its fields."""


class DataError(UserError, ValueError):
    """Raised for a dataset that cannot be read or holds no usable row; the message ends with the remedy."""


@dataclass(frozen=True)
class Problem:
    prompt: str
    answer: str  # the answer field unchanged; for SFT the whole completion
    index: int  # row number in the dataset
    place: str = field(default="", compare=False)  # file and line, for errors
    columns: dict[str, Any] = field(default_factory=dict, compare=False)  # of its row, for rewards

    @property
    def reference(self) -> str:
        """Return the answer to compare a completion's answer with."""
        return reference_answer(self.answer)


def reference_answer(answer: str) -> str:
    """Return the text after the answer field's last ``####`` (GSM8K puts its rationale before it), else the whole."""
    return answer.rpartition(MARKER)[2].strip()


LONGEST = 2**26
"""Bytes of a line."""


def load_problems(config: DatasetConfig, *, where: str = "data.train") -> list[Problem]:
    """Load the problems of a dataset, in its order.

    Args:
        where: the config section that errors name.

    Raises:
        DataError: the source, a field or a package is missing, a line is damaged, or a field is blank in every row.
    """
    rows = read_rows(config, where=where)
    limited = islice(rows, config.limit) if config.limit else rows
    problems = [
        Problem(
            prompt=_field(row, config.prompt_field, place, f"{where}.prompt_field"),
            answer=_field(row, config.answer_field, place, f"{where}.answer_field"),
            index=index,
            place=place,
            columns=_columns(row, config.columns, place, f"{where}.columns"),
        )
        for index, (place, row) in enumerate(limited)
    ]
    if not problems:
        raise DataError(f"{where}.source: {config.source} holds no rows; set another source")
    _reject_blank([p.prompt for p in problems], config.prompt_field, config.source, f"{where}.prompt_field")
    _reject_blank([p.answer for p in problems], config.answer_field, config.source, f"{where}.answer_field")
    return problems


def read_rows(config: DatasetConfig, *, where: str) -> Iterator[Row]:
    """Iterate over the rows of a dataset with all their fields.

    Raises:
        DataError: the source or a package is missing, or a line is damaged.
    """
    if config.source.startswith("builtin:"):
        return _builtin_rows(config, where)
    path = Path(config.source).expanduser()
    if config.source.endswith((".jsonl", ".parquet")):
        if not path.is_file():
            raise DataError(f"{where}.source: no file {path}; set the path of an existing .jsonl or .parquet file")
        return _jsonl_rows(path) if path.suffix == ".jsonl" else parquet_rows(path, f"{where}.source")
    if path.exists():
        raise DataError(f"{where}.source: {config.source} is neither .jsonl nor .parquet; convert it to one of these")
    return _hub_rows(config, where)


def _field(row: dict[str, Any], name: str, place: str, setting: str) -> str:
    """Return a field as text; numbers become text."""
    if name not in row:
        known = ", ".join(map(repr, row))
        raise DataError(f"{place}: no field {name!r}, only {known}; set {setting} to one of them")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"{place}: field {name!r} is {value!r:.100}; expected text or a number; set {setting} to another"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{place}: field {name!r} is {value}; expected text or a number; mend the row or leave it out")
    return str(value)


def _columns(row: dict[str, Any], wanted: Sequence[str] | str, place: str, setting: str) -> dict[str, Any]:
    """Return the columns of a row that rewards see, as JSON has them; of "all", those that it can hold.

    Raises:
        DataError: a column by name is not there, or JSON cannot hold it.
    """
    if wanted == "all":
        return {name: plain for name, value in row.items() if (plain := _plain(value)) is not None or value is None}
    columns = {}
    for name in wanted:
        if name not in row:
            raise DataError(
                f"{place}: no field {name!r}, only {', '.join(map(repr, row))}; set {setting} to some of them"
            )
        columns[name] = _plain(row[name])
        if columns[name] is None and row[name] is not None:
            kind = type(row[name]).__name__
            raise DataError(f"{place}: field {name!r} is a {kind}, which JSON cannot hold; leave it out of {setting}")
    return columns


def _plain(value: Any) -> Any:
    """Return a value as JSON gives it back, None where JSON cannot hold it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return None


def _reject_blank(values: list[str], name: str, source: str, setting: str) -> None:
    """Reject a field that is blank in every row. The grader counts single blank rows."""
    if not any(value.strip() for value in values):
        raise DataError(f"{source}: field {name!r} is blank in all {len(values)} rows; set {setting} to another field")


def _builtin_rows(config: DatasetConfig, where: str) -> Iterator[Row]:
    generators = {"builtin:forks": (forks_rows, config.forks), "builtin:stories": (stories_rows, config.stories)}
    if config.source in generators:
        generate, settings = generators[config.source]
        try:
            rows = list(generate(config.split, rows=config.limit, **settings.model_dump()))
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
        return ((f"{config.source} row {number}", row) for number, row in enumerate(rows))
    if config.source != "builtin:arithmetic":
        raise DataError(
            f"{where}.source: expected one of builtin:arithmetic, {', '.join(generators)}, got {config.source!r}; set "
            "one of these"
        )
    if config.split not in SIZES:
        raise DataError(
            f"{where}.split: builtin:arithmetic has no split {config.split!r}; set one of {', '.join(SIZES)}"
        )
    task = config.arithmetic
    rows = arithmetic_rows(
        config.split,
        rows=config.limit or SIZES[config.split],
        terms=task.terms,
        highest=task.highest,
        written=task.written,
        seed=task.seed,
    )
    return ((f"{config.source} row {number}", row) for number, row in enumerate(rows))


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, LONGEST + 1), b""), start=1):
            if not line.strip():
                continue
            place = f"{path} line {number}"
            if len(line) > LONGEST:
                raise DataError(f"{place}: longer than {LONGEST:,} bytes; is it a file of JSON lines?")
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
                raise DataError(f"{place}: not JSON ({error}); expected one object per line") from None
            if not isinstance(row, dict):
                raise DataError(f"{place}: expected one object per line, got a {type(row).__name__}")
            yield place, row


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


def _hub_rows(config: DatasetConfig, where: str) -> Iterator[Row]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{where}.source: {config.source!r} is not a local file, and a hub dataset needs the package datasets; "
            "install oarjax[hub], or set a .jsonl or .parquet file"
        ) from None
    try:
        dataset = datasets.load_dataset(config.source, config.name, split=config.split, revision=config.revision)
    except Exception as error:  # offline, unknown, gated, bad configuration or split: each has its own type
        raise DataError(
            f"{where}.source: cannot load {config.source!r} (name {config.name!r}, split {config.split!r}, revision "
            f"{config.revision!r}) from the hub: {type(error).__name__}: {error}. Check these fields and the network, "
            "or set a .jsonl or .parquet file"
        ) from error
    return ((f"{config.source} row {number}", dict(row)) for number, row in enumerate(dataset))
