"""Read saved completions: oarjax's JSON lines, and the files that TRL and verl write during training.

    oarjax  prompt, completion (text, ids or chat messages) and reference; completions.jsonl of a run, or a custom
            file. A text prompt goes through the config's template.
    trl     GRPOTrainer with log_completions: Parquet with step, prompt, completion, a column per reward function,
            their logs, advantage. The prompt is the rendered text.
    verl    trainer.rollout_data_dir: JSON lines with input, output, gts, score, step and the reward's extras. The
            input is the rendered text.

Both libraries decode without special tokens by default; ``oarjax.data.tokenizer.rendered_ids`` restores them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from oarjax.data.problems import reference_answer
from oarjax.data.rows import DataError, parquet_rows

Format = Literal["auto", "oarjax", "trl", "verl"]
Messages = list[dict[str, str]]
"""Turns of a chat, each with role and content."""

FIELDS = (
    'each line needs "prompt" (text or chat messages) or "prompt_ids", "completion" or "completion_ids", and may have '
    '"reference"'
)
REFERENCES = ("reference", "solution", "answer", "ground_truth")
"""Columns of TRL's files in which a reward function may have logged the right answer."""


@dataclass(frozen=True)
class SavedRollout:
    """Text, ids or messages of the prompt, text or ids of the completion; ids are used unchanged."""

    prompt: str | list[int] | Messages
    completion: str | list[int]
    reference: str | None  # the right answer; None = unknown
    rendered: bool = False  # a text prompt is already rendered by the chat template
    place: str = field(default="", compare=False)  # file and line, for errors


def read_rollouts(path: Path, form: Format = "auto") -> list[SavedRollout]:
    """Read the rollouts of a .jsonl or .parquet file, or of all such files in a folder, ordered by their numbers.

    ``auto`` detects the format by the fields of the first rollout. Empty completions of TRL and verl are left out:
    they have no tokens.

    Raises:
        DataError: there is no such file or rollout, a line is not JSON or lacks a field, or the format is unknown.
    """
    rollouts: list[SavedRollout] = []
    for file in _files(path):
        for location, record in _records(file):
            if form == "auto":
                form = _recognised(record, location)
            rollout = READ[form](record, location)
            if rollout.completion or form == "oarjax":
                rollouts.append(rollout)
    if not rollouts:
        raise DataError(f"--rollouts: {path} holds no rollouts; {FIELDS}")
    return rollouts


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = [file for file in path.glob("*") if file.suffix in (".jsonl", ".parquet")] if path.is_dir() else []
    if not files:
        raise DataError(
            f"--rollouts: no file {path}; give a JSONL or Parquet file such as completions.jsonl of a run folder, or "
            "a folder of such files"
        )
    return sorted(files, key=lambda file: ([int(n) for n in re.findall(r"\d+", file.stem)], file.name))


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix == ".parquet":
        yield from parquet_rows(path, "--rollouts")
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--rollouts: {path} cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            location = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
                raise DataError(f"{location}: not JSON ({error}); {FIELDS}") from None
            if not isinstance(record, dict):
                raise DataError(f"{location}: expected an object, got {type(record).__name__}; {FIELDS}")
            yield location, record


def _recognised(record: dict[str, Any], location: str) -> Format:
    """Detect the format by a record's fields. TRL's records have steps beside prompts; oarjax's have iterations."""
    if {"input", "output"} <= set(record):
        return "verl"
    if {"step", "prompt", "completion"} <= set(record) and "iteration" not in record:
        return "trl"
    if {"prompt", "prompt_ids", "completion", "completion_ids"} & set(record):
        return "oarjax"
    raise DataError(
        f"{location}: expected the fields of oarjax (prompt, completion), trl (step, prompt, completion, advantage) or "
        f"verl (input, output, gts, score), got {', '.join(map(repr, record))}; set --format, or rename the fields"
    )


def _oarjax(record: dict[str, Any], location: str) -> SavedRollout:
    reference = record.get("reference")
    return SavedRollout(
        _part(record, "prompt", location),
        _completion_text(_part(record, "completion", location), location),
        None if reference is None else str(reference),
        place=location,
    )


def _trl(record: dict[str, Any], location: str) -> SavedRollout:
    references = [record[name] for name in REFERENCES if isinstance(record.get(name), str | int | float)]
    prompt, completion = _column(record, "prompt", location, "trl"), _column(record, "completion", location, "trl")
    reference = reference_answer(str(references[0])) if references else None
    return SavedRollout(prompt, _completion_text(completion, location), reference, rendered=True, place=location)


def _verl(record: dict[str, Any], location: str) -> SavedRollout:
    prompt, completion = _column(record, "input", location, "verl"), _column(record, "output", location, "verl")
    truth = record.get("gts")
    if isinstance(truth, list) and len(truth) == 1:
        (truth,) = truth
    reference = reference_answer(str(truth)) if isinstance(truth, str | int | float) else None
    return SavedRollout(prompt, _completion_text(completion, location), reference, rendered=True, place=location)


READ: dict[Format, Callable[[dict[str, Any], str], SavedRollout]] = {"oarjax": _oarjax, "trl": _trl, "verl": _verl}


def _part(record: dict[str, Any], name: str, location: str) -> Any:
    ids, value = record.get(f"{name}_ids"), record.get(name)
    if ids is not None:
        if isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            return ids
        raise DataError(f"{location}: {name}_ids: expected a list of token ids, got {ids!r:.80}")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        return _messages(value, f"{location}: {name}")
    raise DataError(f"{location}: no {name}; {FIELDS}")


def _column(record: dict[str, Any], name: str, location: str, form: str) -> Any:
    value = record.get(name)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        return _messages(value, f"{location}: {name}")
    columns = ", ".join(map(repr, record))
    raise DataError(
        f"{location}: {name}: expected text or chat messages (format {form}), got {value!r:.80}; the fields are "
        f"{columns}"
    )


def _messages(turns: list[Any], where: str) -> Messages:
    """Check turns and join their text parts; a text policy cannot read other parts."""
    messages = []
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            content = "".join(str(p.get("text") or "") for p in content)
        if not isinstance(content, str) or not isinstance(turn.get("role"), str):
            raise DataError(f"{where}: expected chat messages with role and text content, got {turn!r:.80}")
        messages.append({"role": turn["role"], "content": content})
    return messages


def _completion_text(completion: Any, location: str) -> str | list[int]:
    """Return a completion as it is, or the text of a completion that was saved as an assistant's turn."""
    if not (isinstance(completion, list) and completion and isinstance(completion[0], dict)):
        return completion
    if len(completion) > 1 or completion[0]["role"] != "assistant":
        roles = ", ".join(turn["role"] for turn in completion)
        raise DataError(
            f"{location}: completion: expected one turn of the assistant, got the turns {roles}; save each turn of the "
            "assistant as a separate rollout, with the turns before it in its prompt"
        )
    return completion[0]["content"]
