"""Find reasoning and answer tokens of rollouts, by the config's credit section. Numpy, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oarjax.credit.answer_span import find_answers, find_units, whole_completion
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
    stop_id: int | None = None,
) -> tuple[Rollout, AnswerSpan]:
    """Replace each completion's answer with the reference answer; arguments as in with_reference."""
    probed, span = with_reference(rollout, span, endings, room=room, stop_id=stop_id)
    return probed, _with_units(credit, span, probed, token_bytes)


def with_reference(
    rollout: Rollout, span: AnswerSpan, endings: Sequence[Ending], *, room: int, stop_id: int | None = None
) -> tuple[Rollout, AnswerSpan]:
    """Build rollouts to probe instead: reasoning as generated, then a cue and the reference answer.

    The reasoning of a row without an answer is its completion but for the stop token. Reasoning tokens keep their
    places, so scores of the result, cut to the first T positions, are scores of the rollout.

    With ``stop_id`` the answer is the one whose joint probability counts (``AnswerSpan.outcome``): all that a row wrote
    before its own answer stays, its cue too, and the reference and the token that ends it follow: the one after the
    row's own answer, such as a closing brace, or the stop token. Where no answer was written, the cue is part of what
    counts. A row that was cut off has no outcome.

    Args:
        endings: token ids of the cue and of the answer for every row.
        room: positions added to the completion, at least the longest ending.
        stop_id: ends the reference answer; None: nothing does, and the cue always stands before it.

    Raises:
        ValueError: an ending that does not fit, or an empty answer.
    """
    tokens, completion = np.asarray(rollout.tokens), np.asarray(rollout.completion)
    rows, length = completion.shape
    prompt = tokens.shape[1] - length
    out = np.zeros((rows, prompt + length + room), tokens.dtype)
    valid = np.zeros(out.shape, bool)
    out[:, :prompt], valid[:, :prompt] = tokens[:, :prompt], np.asarray(rollout.valid)[:, :prompt]
    reasoning, answer, outcome = np.zeros((3, rows, length + room), bool)
    ended = np.asarray(rollout.ended)
    for row, (cue, target) in enumerate(endings):
        suffix = [] if stop_id is None else [stop_id]
        if len(cue) + len(target) + len(suffix) > room or not len(target):
            raise ValueError(
                f"with_reference: row {row} needs {len(cue)} + {len(target) + len(suffix)} tokens for cue and answer, "
                f"at least one of them the answer's; there is room for {room}"
            )
        has_answer = bool(span.has_answer[row])
        if has_answer:
            end = int(np.flatnonzero(span.reasoning[row]).max(initial=-1)) + 1
            reasoning[row, :length] = span.reasoning[row]
        else:
            end = int(completion[row].sum()) - int(ended[row])
            reasoning[row, :end] = True
        if has_answer and stop_id is not None and np.any(span.answer[row]):
            end, cue = int(np.flatnonzero(span.answer[row])[0]), []
            column = int(np.flatnonzero(span.answer[row])[-1]) + 1
            suffix = [int(tokens[row, prompt + column])] if column < length and completion[row, column] else suffix
        begin = end + len(cue)
        stop = begin + len(target)
        out[row, prompt : prompt + end] = tokens[row, prompt : prompt + end]
        out[row, prompt + end : prompt + stop + len(suffix)] = [*cue, *target, *suffix]
        valid[row, prompt : prompt + stop + len(suffix)] = True
        answer[row, begin:stop] = True
        outcome[row, end : stop + len(suffix)] = ended[row]
    filled = valid[:, prompt:]
    zeros = np.zeros(filled.shape, np.float32)
    probed: Any = Rollout(out, valid, filled, zeros, zeros, ended)  # pyright: ignore[reportArgumentType]
    probed_span: Any = AnswerSpan(reasoning=reasoning, answer=answer, has_answer=reasoning.any(1))  # pyright: ignore[reportArgumentType]
    return probed, probed_span if stop_id is None else replace(probed_span, outcome=outcome)


def _with_units(credit: CreditSettings, span: AnswerSpan, rollout: Rollout, token_bytes: Sequence[bytes]) -> AnswerSpan:
    ids, completion = _completion_ids(rollout)
    if credit.method == "causal_spans":
        reasoning = np.asarray(span.reasoning)
        units = find_calculations(ids, completion, token_bytes, reasoning, most=credit.causal_spans.spans)
    elif credit.masking.unit == "token":
        return span
    elif credit.masking.unit == "turn":
        units = np.zeros(ids.shape, np.int32) if rollout.origin is None else np.asarray(rollout.origin.turns)
    else:
        units = find_units(ids, completion, token_bytes, unit=credit.masking.unit)
    return replace(span, units=units)  # pyright: ignore[reportArgumentType]


def _completion_ids(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    completion = np.asarray(rollout.completion)
    return np.asarray(rollout.tokens)[:, -completion.shape[1] :], completion
