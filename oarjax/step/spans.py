"""Find reasoning and answer tokens of rollouts, by the config's credit section. Numpy, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from oarjax.credit.answer_span import find_answers, find_units, whole_completion, with_reference
from oarjax.credit.methods.calculation_spans import find_calculations
from oarjax.credit.settings import CreditSettings
from oarjax.types import AnswerSpan, Rollout

Ending = tuple[list[int], list[int]]
"""Token ids of the cue and of the reference answer."""


def find_spans(credit: CreditSettings, rollout: Rollout, token_bytes: Sequence[bytes]) -> AnswerSpan:
    """Find the reasoning and the answer of every completion, and the lines, sentences or calculations if needed."""
    ids, completion = _completion_ids(rollout)
    if credit.answer.style == "none":
        span = whole_completion(ids, completion, token_bytes)
    else:
        span = find_answers(ids, completion, token_bytes, style=credit.answer.style, pattern=credit.answer.pattern)
    return _with_units(credit, span, rollout, token_bytes)


def with_endings(
    credit: CreditSettings,
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


def _with_units(credit: CreditSettings, span: AnswerSpan, rollout: Rollout, token_bytes: Sequence[bytes]) -> AnswerSpan:
    ids, completion = _completion_ids(rollout)
    if credit.method == "causal_spans":
        reasoning = np.asarray(span.reasoning)
        units = find_calculations(ids, completion, token_bytes, reasoning, most=credit.causal_spans.spans)
    elif credit.masking.unit == "token":
        return span
    else:
        units = find_units(ids, completion, token_bytes, unit=credit.masking.unit)
    return replace(span, units=units)  # pyright: ignore[reportArgumentType]


def _completion_ids(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    completion = np.asarray(rollout.completion)
    return np.asarray(rollout.tokens)[:, -completion.shape[1] :], completion
