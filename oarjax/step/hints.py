"""Turn marks on the text of completions into values of their tokens. Numpy, on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from oarjax.credit.answer_span import written_pieces
from oarjax.errors import ConfigError
from oarjax.types import Rollout


class Mark(NamedTuple):
    """A stretch of a completion's text, from character ``start`` to before ``end``, and its value."""

    start: int
    end: int
    value: float = 1.0


class PlayedTurn(NamedTuple):
    """A turn of an episode, as a marker reads it."""

    text: str
    observed: str  # what the environment said before it, as the row holds it
    reward: float  # the environment's


def turn_marks(rollout: Rollout, values: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of the turns that tokens belong to, and their numbers from 1 on, [B, T] each.

    Args:
        values: of the turns of every row.
    """
    completion = np.asarray(rollout.completion)
    numbers = np.where(completion, 0 if rollout.origin is None else np.asarray(rollout.origin.turns), 0)
    marks = [np.asarray(gains, np.float32)[row] if gains else row * 0 for gains, row in zip(values, numbers)]
    return np.where(completion, marks, 0).astype(np.float32), np.where(completion, numbers + 1, 0).astype(np.int32)


def valued_turns(
    marker: Callable[..., Any], turns: Sequence[PlayedTurn], text: tuple[str, str], *, name: str | None
) -> list[float]:
    """Return the values that a marker gives the turns of an episode.

    Args:
        text: prompt and reference answer.
        name: of the marker, for errors.

    Raises:
        ConfigError: the function failed, or returned something else.
    """
    try:
        values = [float(value) for value in marker(prompt=text[0], turns=turns, reference=text[1])]
    except Exception as error:
        raise ConfigError(f"credit.marks: {name} fails on an episode: {type(error).__name__}: {error}") from error
    if len(values) != len(turns) or not np.isfinite(values).all():
        raise ConfigError(
            f"credit.marks: {name} returns {values} for an episode of {len(turns)} turns; expected a finite value for "
            "each of them"
        )
    return values


def marked_tokens(
    table: Sequence[bytes],
    rollout: Rollout,
    texts: Sequence[tuple[str, str]],
    marker: Callable[..., Any],
    *,
    name: str | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return values and numbers of the marks that tokens belong to, [B, T] each; later marks override earlier ones.

    Args:
        table: the bytes of every token id.
        texts: prompt and reference answer of every row.
        marker: (prompt, completion, reference) -> (start, end, value) of every mark, in characters.
        name: of the marker, for errors.

    Raises:
        ConfigError: the function failed, or returned something else.
    """
    completion = np.asarray(rollout.completion)
    values, numbers = np.zeros(completion.shape, np.float32), np.zeros(completion.shape, np.int32)
    ids = np.asarray(rollout.tokens)[:, -completion.shape[1] :]
    for row, (prompt, reference) in enumerate(texts):
        pieces = written_pieces(ids[row], np.flatnonzero(completion[row]), table)
        text = b"".join(pieces).decode("utf-8", "surrogateescape")
        ends = np.cumsum([len(piece) for piece in pieces])
        starts = ends - [len(piece) for piece in pieces]
        field = f"credit.marks: {name}"
        try:
            marks = [Mark(*mark) for mark in marker(prompt, text, reference)]
        except Exception as error:
            raise ConfigError(f"{field} fails on a completion: {type(error).__name__}: {error}") from error
        for number, mark in enumerate(marks, start=1):
            if not 0 <= mark.start <= mark.end <= len(text) or not np.isfinite(mark.value):
                raise ConfigError(
                    f"{field} returns {tuple(mark)} for a completion of {len(text)} characters; expected "
                    "0 <= start <= end <= its length, and a finite value"
                )
            low, high = (len(text[:at].encode("utf-8", "surrogateescape")) for at in (mark.start, mark.end))
            columns = np.flatnonzero((starts < high) & (ends > low))
            values[row, columns], numbers[row, columns] = mark.value, number
    return values, numbers
