"""Prepare what a credit method reads beside rollouts, on the host: marks on completions, a teacher's prompts."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from oarjax.config.inputs import DataConfig
from oarjax.credit.methods.keywords import KeywordTable, keyword_table
from oarjax.credit.record import OF_MARKS, OF_TEACHER
from oarjax.credit.resolved import ResolvedMethod
from oarjax.data.problems import Problem
from oarjax.data.streams import bucketed, encode_problems, left_pad
from oarjax.data.tokenizer import text_of
from oarjax.errors import ConfigError, UserError
from oarjax.run.grades import turn_rewards, written_turns
from oarjax.step.hints import PlayedTurn, marked_tokens, turn_marks, valued_turns
from oarjax.system.plugins import import_object
from oarjax.types import Hints, Privileged, Rollout

Marker = Callable[..., Sequence[Any]]
"""(prompt, completion, reference) -> marks (start, end, value) in characters, or (prompt, turns, reference) -> a value
of every turn: what credit.marks names."""


@dataclass(frozen=True)
class HintReader:
    """Return the hints of a rollout's rows: calling it takes the rollout and the numbers of its problems."""

    problems: Mapping[int, Problem]
    marker: Marker | None
    marks: str | None  # the marker's name, for errors
    teacher: Mapping[int, list[int]]  # prompts by problem; empty without a teacher
    width: int  # positions of the teacher's prompts
    table: Sequence[bytes]
    pad_id: int
    plays: bool = False  # an environment's rewards are the marks, where no function gives others

    def __call__(self, rollout: Rollout, numbers: np.ndarray) -> Hints:
        rows = [int(p) for p in np.repeat(numbers, len(rollout.ended) // len(numbers))]
        out: dict[str, Any] = {}
        texts = [(self.problems[p].prompt, self.problems[p].reference) for p in rows]
        if self.marker is not None and reads_turns(self.marker):
            values = [
                valued_turns(self.marker, turns, text, name=self.marks)
                for turns, text in zip(played_turns(rollout, self.table), texts, strict=True)
            ]
            out["marks"], out["turns"] = turn_marks(rollout, values)
        elif self.marker is not None:
            out["marks"], out["turns"] = marked_tokens(self.table, rollout, texts, self.marker, name=self.marks)
        elif self.plays:
            out["marks"], out["turns"] = turn_marks(rollout, turn_rewards(rollout))
        if self.teacher:
            tokens, valid = left_pad([self.teacher[p] for p in rows], length=self.width, pad_id=self.pad_id)
            out["teacher"] = Privileged(tokens, valid)  # pyright: ignore[reportArgumentType]
        return Hints(**out)


def hints_of(
    credit: ResolvedMethod,
    data: DataConfig,
    problems: Mapping[int, Problem],
    tokenizer: PreTrainedTokenizerFast,
    table: Sequence[bytes],
    pad_id: int,
    prompt_bucket: int,
    plays: bool = False,
) -> HintReader | None:
    """Return what reads a credit method's hints; None if it needs none. ``problems`` are by their numbers in rollouts.

    Raises:
        ConfigError: the method reads marks, and neither a function nor an environment (``plays``) provides them.
    """
    settings, wants = credit.settings, credit.signals
    plays = plays and settings.marks is None and bool(wants & OF_MARKS)
    marker = find_marker(settings.marks, method=settings.method) if wants & OF_MARKS and not plays else None
    if marker is None and not plays and not wants & OF_TEACHER:
        return None
    prompts = teacher_prompts(settings.teacher, data, problems.values(), tokenizer) if wants & OF_TEACHER else []
    width = bucketed(prompts or [[]], prompt_bucket)
    return HintReader(problems, marker, settings.marks, dict(zip(problems, prompts)), width, table, pad_id, plays)


def reads_turns(marker: Callable[..., Any]) -> bool:
    """Return True if a marker takes the turns of an episode, not the text of a completion."""
    try:
        return "turns" in inspect.signature(marker).parameters
    except (TypeError, ValueError):  # of a built-in function
        return False


def played_turns(
    rollout: Rollout, table: Sequence[bytes], rows: Collection[int] | None = None
) -> list[list[PlayedTurn]]:
    """Return the turns of rows, by default all, as a marker reads them."""
    rewards, completion, extent = turn_rewards(rollout), np.asarray(rollout.completion), np.asarray(rollout.extent)
    numbers = np.zeros(completion.shape, int) if rollout.origin is None else np.asarray(rollout.origin.turns)
    ids, played = np.asarray(rollout.tokens)[:, -completion.shape[1] :], []
    for b, turns in enumerate(written_turns(rollout)):
        if rows is not None and b not in rows:
            continue
        observations = [
            text_of(ids[b][extent[b] & ~completion[b] & (numbers[b] == k)].tolist(), table) for k in range(len(turns))
        ]
        gains = rewards[b] or [0.0] * len(turns)
        parts = zip(turns, observations, gains, strict=True)
        played.append([PlayedTurn(text_of(tokens, table), observed, gain) for tokens, observed, gain in parts])
    return played


def find_marker(name: str | None, *, method: str) -> Marker:
    """Import the function that credit.marks names.

    Raises:
        ConfigError: it is not set, or cannot be imported.
    """
    if name is None:
        raise ConfigError(
            f"credit.marks: credit.method {method} reads marks on completions; set file.py:name of a function (prompt, "
            "completion, reference) -> list of (start, end, value), as in docs/examples/custom_marks.py"
        )
    try:
        marker: Marker = import_object(name, field="credit.marks", expected=object)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not callable(marker):
        raise ConfigError(f"credit.marks: {name} is a {type(marker).__name__}; expected a function")
    return marker


def teacher_prompts(
    template: str, data: DataConfig, problems: Collection[Problem], tokenizer: PreTrainedTokenizerFast
) -> list[list[int]]:
    """Encode the prompts of the teacher: credit.teacher with the problem's prompt and reference answer in it.

    Raises:
        ConfigError: credit.teacher has fields other than {prompt} and {answer}, or text that cannot be encoded.
    """
    try:
        privileged = [replace(p, prompt=template.format(prompt=p.prompt, answer=p.reference)) for p in problems]
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"credit.teacher: {error!r}; expected text with {{prompt}} and {{answer}} in it") from error
    rendering = {name: getattr(data, name) for name in ("template", "system_prompt", "prompt_format", "thinking")}
    try:
        return list(encode_problems(privileged, tokenizer, max_prompt=sys.maxsize, **rendering).prompts)
    except UserError as error:
        raise ConfigError(f"credit.teacher: {error}") from error


def spelled_keywords(words: Sequence[str], encoded: Callable[[str], list[int]], table: Sequence[bytes]) -> KeywordTable:
    """Return a tokenizer's spellings of the configured keywords.

    Raises:
        ConfigError: a word cannot be spelled.
    """
    try:
        return keyword_table(words, encoded, table)
    except ValueError as error:
        raise ConfigError(f"credit.keywords.words: {error}; set words that its tokens can spell") from error
