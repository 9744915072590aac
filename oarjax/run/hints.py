"""Prepare what a credit method reads beside rollouts, on the host: marks on completions, a teacher's prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from oarjax.credit.record import OF_MARKS, OF_TEACHER
from oarjax.data.problems import Problem
from oarjax.data.streams import bucketed, encode_problems, left_pad
from oarjax.errors import ConfigError, UserError
from oarjax.step.hints import marked_tokens
from oarjax.system.plugins import import_object
from oarjax.types import Hints, Privileged, Rollout


def hints_of(run: Any, problems: Sequence[Problem] | None = None) -> Callable[[Rollout, np.ndarray], Hints] | None:
    """Return (rollout, numbers of problems) -> the hints of a Run's credit method; None if it reads none.

    Problems are numbered as in the training dataset, or by their place in ``problems``.

    Raises:
        ConfigError: the method reads marks, and no function provides them.
    """
    wants = run.credit.signals
    marker = find_marker(run) if wants & OF_MARKS else None
    if marker is None and not wants & OF_TEACHER:
        return None
    by_number = run.train.by_index if problems is None else dict(enumerate(problems))
    prompts = teacher_prompts(run, list(by_number.values())) if wants & OF_TEACHER else []
    numbered, width = dict(zip(by_number, prompts)), bucketed(prompts or [[]], run.cfg.rollout.prompt_bucket)

    def hints(rollout: Rollout, numbers: np.ndarray) -> Hints:
        rows = [int(p) for p in np.repeat(numbers, len(rollout.ended) // len(numbers))]
        out: dict[str, Any] = {}
        if marker is not None:
            texts = [(by_number[p].prompt, by_number[p].reference) for p in rows]
            out["marks"], out["turns"] = marked_tokens(run.table, rollout, texts, marker, name=run.cfg.credit.marks)
        if numbered:
            tokens, valid = left_pad([numbered[p] for p in rows], length=width, pad_id=run.pad_id)
            out["teacher"] = Privileged(tokens, valid)  # pyright: ignore[reportArgumentType]
        return Hints(**out)

    return hints


def find_marker(run: Any) -> Callable[..., Any]:
    """Import the function that credit.marks names.

    Raises:
        ConfigError: it is not set, or cannot be imported.
    """
    name = run.cfg.credit.marks
    if name is None:
        raise ConfigError(
            f"credit.marks: credit.method {run.cfg.credit.method} reads marks on completions; set file.py:name of a "
            "function (prompt, completion, reference) -> list of (start, end, value), as in "
            "docs/examples/custom_marks.py"
        )
    try:
        function: Any = import_object(name, field="credit.marks", expected=object)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not callable(function):
        raise ConfigError(f"credit.marks: {name} is a {type(function).__name__}; expected a function")
    return function


def teacher_prompts(run: Any, problems: Sequence[Problem]) -> list[list[int]]:
    """Encode the prompts of the teacher: credit.teacher with the problem's prompt and reference answer in it.

    Raises:
        ConfigError: credit.teacher has fields other than {prompt} and {answer}, or text that cannot be encoded.
    """
    cfg = run.cfg
    try:
        texts = [cfg.credit.teacher.format(prompt=p.prompt, answer=p.reference) for p in problems]
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"credit.teacher: {error!r}; expected text with {{prompt}} and {{answer}} in it") from error
    privileged = [replace(problem, prompt=text) for problem, text in zip(problems, texts)]
    rendering = {name: getattr(cfg.data, name) for name in ("template", "system_prompt", "prompt_format", "thinking")}
    encode = partial(encode_problems, **rendering, max_prompt=sys.maxsize)
    try:
        return list(encode(privileged, run.tokenizer).prompts)
    except UserError as error:
        raise ConfigError(f"credit.teacher: {error}") from error
