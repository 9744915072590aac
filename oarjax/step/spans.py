"""Find reasoning and answer tokens of rollouts, by the config's credit section. Numpy, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerFast

from oarjax.config import AnswerConfig, ConfigError, CreditConfig
from oarjax.credit.answer_span import find_answers, find_units, whole_completion, with_reference
from oarjax.credit.answer_text import CUES
from oarjax.data.problems import Problem
from oarjax.data.tokenizer import encode
from oarjax.types import AnswerSpan, Rollout

Ending = tuple[list[int], list[int]]
"""Token ids of the cue and of the reference answer."""


def find_spans(credit: CreditConfig, rollout: Rollout, token_bytes: Sequence[bytes]) -> AnswerSpan:
    """Find the reasoning and the answer of every completion, and the reasoning's lines or sentences if configured."""
    ids, completion = _completion_ids(rollout)
    if credit.answer.style == "none":
        span = whole_completion(ids, completion, token_bytes)
    else:
        span = find_answers(ids, completion, token_bytes, style=credit.answer.style, pattern=credit.answer.pattern)
    return _with_units(credit, span, rollout, token_bytes)


def reference_endings(
    answer: AnswerConfig, tokenizer: PreTrainedTokenizerFast, problems: Mapping[int, Problem]
) -> dict[int, Ending]:
    """Encode the cue and the reference answer of every problem, for ``credit.answer.source: reference``.

    Raises:
        ConfigError: the answer style has no cue, or a reference has no tokens.
    """
    cue = CUES.get(answer.style) if answer.cue is None else answer.cue
    if cue is None:
        raise ConfigError(f"credit.answer.cue: style {answer.style} has no default cue; set credit.answer.cue")
    cue_ids = encode(tokenizer, cue)
    endings = {i: (cue_ids, encode(tokenizer, problem.reference)) for i, problem in problems.items()}
    for i, (_, reference_ids) in endings.items():
        if not reference_ids:
            raise ConfigError(f"credit.answer.source: problem {i} has an empty reference answer; set source=own")
    return endings


def with_endings(
    credit: CreditConfig,
    rollout: Rollout,
    span: AnswerSpan,
    endings: Sequence[Ending],
    *,
    room: int,
    token_bytes: Sequence[bytes],
) -> tuple[Rollout, AnswerSpan]:
    """Replace each completion's answer with the cue and the reference answer; ``room`` as in with_reference."""
    probed, span = with_reference(rollout, span, endings, room=room)
    return probed, _with_units(credit, span, probed, token_bytes)


def _with_units(credit: CreditConfig, span: AnswerSpan, rollout: Rollout, token_bytes: Sequence[bytes]) -> AnswerSpan:
    unit = credit.masking.unit
    if unit == "token":
        return span
    units = find_units(*_completion_ids(rollout), token_bytes, unit=unit)
    return replace(span, units=units)  # pyright: ignore[reportArgumentType]


def _completion_ids(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    completion = np.asarray(rollout.completion)
    return np.asarray(rollout.tokens)[:, -completion.shape[1] :], completion
