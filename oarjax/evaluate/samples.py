"""samples.jsonl of an evaluation: every sample drawn so far, benchmark by benchmark, to resume from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oarjax.storage.durable import Lines, cannot_read, exists

FIELDS = {"benchmark", "problem", "sample", "answer", "score", "verdict", "tokens", "ended"}
"""The fields of a record that figures are computed from."""


class SampleLines:
    """The samples of an evaluation on disk. A batch that a kill cut short is removed and sampled again.

    Ask for ``known`` of each benchmark in order, and write what it lacks before asking for the next one.

    Raises:
        StorageError: from any method, where the file cannot be read or written.
    """

    def __init__(self, path: Path):
        self._path = path
        self._records, self._ends = _read(path)
        self._at = 0  # of the records, those that were asked for
        self._lines: Lines | None = None

    def known(self, benchmark: str, problems: int, *, samples: int, batch: int) -> list[dict[str, Any]]:
        """Return the known samples of the ``problems``, up to the last whole batch, in the order written."""
        records: list[dict[str, Any]] = []
        for record in self._records[self._at :]:
            if record.get("benchmark") != benchmark:
                break
            records.append(record)
        count = min(len(records) // samples, problems)
        count = count if count == problems else count // batch * batch
        self._at += count * samples
        if count < problems and self._lines is None:
            del self._records[self._at :]
            self._lines = Lines(self._path, position=self._ends[self._at - 1] if self._at else 0)
        return records[: count * samples]

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Append a batch; it is on disk on return."""
        if self._lines is None:
            raise ValueError("SampleLines.write: ask for what is known first")
        for record in records:
            self._lines.write(record)
        self._lines.sync()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Read whole lines up to the first that is no sample, and the byte after each."""
    records, ends, at = [], [], 0
    try:
        content = path.read_bytes() if exists(path) else b""
    except OSError as error:
        raise cannot_read(path, error) from error
    for line in content.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                break
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or not record.keys() >= FIELDS:
            break
        records.append(record)
        at += len(line)
        ends.append(at)
    return records, ends
