"""Turn the rows of a dataset into problems: a prompt or a chat, a reference answer, and columns for rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from oarjax.config.inputs import DatasetConfig
from oarjax.data.rows import DataError, Row, read_rows
from oarjax.data.tasks.arithmetic import MARKER


@dataclass(frozen=True)
class Problem:
    prompt: str  # of a chat, its last user's turn
    answer: str  # the answer field unchanged; for SFT the whole completion
    index: int  # row number in the dataset
    place: str = field(default="", compare=False)  # file and line, for errors
    columns: dict[str, Any] = field(default_factory=dict, compare=False)  # of its row, for rewards
    chat: tuple[dict[str, str], ...] = ()  # its turns, where the row has messages instead of a text
    rewards: tuple[str, ...] = ()  # names of those that grade it; (): all
    system: str | None = None  # message of its data set's own; None: the config's

    @property
    def reference(self) -> str:
        """Return the answer to compare a completion's answer with."""
        return reference_answer(self.answer)


def reference_answer(answer: str) -> str:
    """Return the text after the answer field's last ``####`` (GSM8K puts its rationale before it), else the whole."""
    return answer.rpartition(MARKER)[2].strip()


ROLES = ("system", "user", "assistant", "tool")

PICTURES = ("image", "images", "video", "videos")
"""Fields of rows with pictures, which no policy here sees."""
PICTURE_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>")


def load_problems(config: DatasetConfig, *, where: str = "data.train") -> list[Problem]:
    """Load the problems of a dataset, in its order.

    Args:
        where: the config section that errors name.

    Raises:
        DataError: the source, a field or a package is missing, a line is damaged, or a field is blank in every row.
    """
    rows = read_rows(config, where=where)
    limited = islice(rows, config.limit) if config.limit else rows
    problems = []
    for index, (location, row) in enumerate(map(_without_pictures, limited)):
        if not {config.prompt_field, config.answer_field} & row.keys():
            raise DataError(
                f"{location}: no fields {config.prompt_field!r} and {config.answer_field!r}, only "
                f"{', '.join(map(repr, row))}; set {where}.prompt_field and {where}.answer_field to two of them"
            )
        chat = _chat(row.get(config.prompt_field), config.prompt_field, location)
        last_turn = {config.prompt_field: chat[-1]["content"]} if chat else {}
        prompt = _field(row | last_turn, config.prompt_field, location, f"{where}.prompt_field")
        answer = _field(row, config.answer_field, location, f"{where}.answer_field")
        columns = _columns(row, config.columns, location, f"{where}.columns")
        problems.append(Problem(prompt, answer, index, location, columns, chat, config.rewards, config.system_prompt))
    if not problems:
        raise DataError(f"{where}.source: {config.source} holds no rows; set another source")
    _reject_blank([p.prompt for p in problems], config.prompt_field, config.source, f"{where}.prompt_field")
    _reject_blank([p.answer for p in problems], config.answer_field, config.source, f"{where}.answer_field")
    return problems


def _without_pictures(of: Row) -> Row:
    """Return a row unchanged, after checking that it has no picture: only text reaches a policy."""
    location, row = of
    fields = [name for name in PICTURES if name in row and row[name] not in (None, "", [], {})]
    texts = {name: str(value) for name, value in row.items() if isinstance(value, str | list)}
    fields += [name for name, text in texts.items() if any(mark in text for mark in PICTURE_MARKS)]
    if fields:
        raise DataError(
            f"{location}: field {fields[0]!r} holds a picture, and policies are trained on text alone, of Qwen3-VL "
            "too; remove the field if the text does without it, or leave the row out"
        )
    return of


def _field(row: dict[str, Any], name: str, place: str, setting: str) -> str:
    """Return a field as text; numbers become text."""
    if name not in row:
        names = ", ".join(map(repr, row))
        raise DataError(f"{place}: no field {name!r}, only {names}; set {setting} to one of them")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(
            f"{place}: field {name!r} is {value!r:.100}; expected text or a number; correct the row or remove "
            f"it, or set {setting} to another"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{place}: field {name!r} is {value}; expected text or a number; correct the row or remove it")
    return str(value)


def _chat(value: Any, name: str, place: str) -> tuple[dict[str, str], ...]:
    """Return the turns of a prompt that is a list of messages, () for any other value.

    Raises:
        DataError: a message has no known role or no text, or the last one is not the user's.
    """
    if not isinstance(value, list) or not value:
        return ()
    for number, turn in enumerate(value):
        role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise DataError(
                f"{place}: field {name!r}, message {number} is {turn!r:.100}; expected a role ({', '.join(ROLES)}) and "
                "a content of text; correct the row, or leave it out"
            )
    if value[-1]["role"] != "user":
        raise DataError(
            f"{place}: field {name!r} ends in a message of role {value[-1]['role']!r}; expected one of role 'user', "
            "which the policy answers"
        )
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in value)


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
