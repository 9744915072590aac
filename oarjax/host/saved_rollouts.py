"""Completions saved as JSON lines, to look at again: completions.jsonl of a run, or a file of one's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarjax.host.problems import DataError

FIELDS = (
    'each line needs "prompt" (text) or "prompt_ids", "completion" (text) or "completion_ids", and may have "reference"'
)


@dataclass(frozen=True)
class SavedRollout:
    """Text or ids of each part; ids are taken as they are, a text prompt goes through the config's template."""

    prompt: str | list[int]
    completion: str | list[int]
    reference: str | None  # the right answer; None = unknown


def read_rollouts(path: Path) -> list[SavedRollout]:
    """Every line of a file.

    Raises:
        DataError: no such file, a line that is not JSON or lacks a field, or no line at all.
    """
    if not path.is_file():
        raise DataError(f"--rollouts: no file {path}; give a JSONL file such as completions.jsonl of a run folder")
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--rollouts: {path} cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(_rollout(line, f"{path}, line {number}"))
    if not found:
        raise DataError(f"--rollouts: {path} holds no rollouts; {FIELDS}")
    return found


def _rollout(line: str, place: str) -> SavedRollout:
    try:
        record = json.loads(line)
    except ValueError as error:  # also for a number of thousands of digits
        raise DataError(f"{place}: not JSON ({error}); {FIELDS}") from None
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected an object, got {type(record).__name__}; {FIELDS}")
    reference = record.get("reference")
    return SavedRollout(
        _part(record, "prompt", place),
        _part(record, "completion", place),
        None if reference is None else str(reference),
    )


def _part(record: dict[str, Any], name: str, place: str) -> str | list[int]:
    ids, text = record.get(f"{name}_ids"), record.get(name)
    if ids is not None:
        if isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            return ids
        raise DataError(f"{place}: {name}_ids: expected a list of token ids, got {ids!r:.80}")
    if isinstance(text, str) and text:
        return text
    raise DataError(f"{place}: no {name}; {FIELDS}")
