"""Prepare what a credit method reads beside rollouts, on the host: marks on completions, a teacher's prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from oarjax.config.inputs import DataConfig
from oarjax.credit.keywords import KeywordTable, keyword_table
from oarjax.credit.record import OF_MARKS, OF_TEACHER
from oarjax.credit.resolved import ResolvedMethod
from oarjax.data.problems import Problem
from oarjax.data.streams import bucketed, encode_problems, left_pad
from oarjax.errors import ConfigError, UserError
from oarjax.step.hints import marked_tokens
from oarjax.system.plugins import import_object
from oarjax.types import Hints, Privileged, Rollout

Marker = Callable[[str, str, str], Sequence[tuple[int, int, float]]]
"""(prompt, completion, reference) -> marks (start, end, value) in characters: what credit.marks names."""


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

    def __call__(self, rollout: Rollout, numbers: np.ndarray) -> Hints:
        rows = [int(p) for p in np.repeat(numbers, len(rollout.ended) // len(numbers))]
        out: dict[str, Any] = {}
        if self.marker is not None:
            texts = [(self.problems[p].prompt, self.problems[p].reference) for p in rows]
            out["marks"], out["turns"] = marked_tokens(self.table, rollout, texts, self.marker, name=self.marks)
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
    *,
    pad_id: int,
    prompt_bucket: int,
) -> HintReader | None:
    """Return what reads a credit method's hints; None if it needs none. ``problems`` are by their numbers in rollouts.

    Raises:
        ConfigError: the method reads marks, and no function provides them.
    """
    settings, wants = credit.settings, credit.signals
    marker = find_marker(settings.marks, method=settings.method) if wants & OF_MARKS else None
    if marker is None and not wants & OF_TEACHER:
        return None
    prompts = teacher_prompts(settings.teacher, data, problems.values(), tokenizer) if wants & OF_TEACHER else []
    width = bucketed(prompts or [[]], prompt_bucket)
    return HintReader(problems, marker, settings.marks, dict(zip(problems, prompts)), width, table, pad_id)


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
